"""Train a click model with attention over jagged user histories, on a synthetic log or on MovieLens-100k.

    python examples/train_ranking.py --data synthetic --out out/synthetic
    python examples/train_ranking.py --data movielens --out out/movielens

Writes ``metrics.csv``, ``curves.png`` and ``checkpoint.pt`` to the output folder after every epoch, each in one step.
Exit code 2 and one line on standard error: an input or an option is wrong, and nothing was written.
"""

import os

# Before torch, whose OpenMP reads it while it loads. A thread that spins while it waits takes the core that the other
# needs: beside another busy process, an epoch of `train_ranking.py --requests 2000` took 22 s with spinning and 2.3 s
# without (two cores of an AMD EPYC).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from ranking import sources
from ranking.errors import InputError
from ranking.metrics import Metrics
from ranking.outputs import plot_curves, write_csv
from ranking.recipes import DATA, POOLINGS, recipe
from ranking.training import Trainer

from jagged_attn import UnsupportedError
from jagged_attn.bench.arguments import (
    BACKEND_NAMES,
    Parser,
    device_here,
    natural,
    output_folder,
    run_command,
    seed_number,
)

FILES = ("metrics.csv", "curves.png", "checkpoint.pt")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train_ranking", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = output_folder(FILES)
    parser.add_argument("--data", choices=DATA, default="synthetic")
    parser.add_argument("--pooling", choices=POOLINGS, default="attention", help="mean: the baseline without attention")
    parser.add_argument("--device", type=device_here, default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--backend", choices=BACKEND_NAMES, default="auto", help="what runs the attention")
    parser.add_argument("--seed", type=seed_number, default=0, help="of the weights, and of the synthetic log")
    parser.add_argument("--epochs", type=natural, help="passes over the training part (default: the tuned number)")
    parser.add_argument("--out", type=folder, help="output folder (default: out/ranking-DATA-POOLING-seedN)")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="go on from a checkpoint of the same run")
    parser.add_argument("--requests", type=natural, help="size of the synthetic log")
    parser.add_argument("--movielens-file", type=Path, help="ratings file (default: the one that recbole ships)")
    options = parser.parse_args(arguments)
    if options.out is None:
        default = f"out/ranking-{options.data}-{options.pooling}-seed{options.seed}"
        options.out = parser.convert("--out", folder, default)
    return options


def _score(metrics: Metrics) -> str:
    return f"NE {metrics.ne:.4f}, AUC {metrics.auc:.4f}"


def _report_epoch(trainer: Trainer, out: Path, title: str) -> None:
    """Print the last epoch and bring the files in ``out`` up to date."""
    row, bayes = trainer.epochs[-1], trainer.bayes
    print(
        f"epoch {row['epoch']}/{trainer.config.epochs}: training log-loss {row['train_loss']:.4f}, "
        f"held-out {_score(Metrics(row['ne'], row['auc']))} ({row['seconds']:.0f} s)",
        flush=True,
    )
    write_csv(out / "metrics.csv", trainer.epochs, row)
    plot_curves(out / "curves.png", title, trainer.epochs, None if bayes is None else bayes.ne)
    trainer.save(out / "checkpoint.pt")


def run(options: argparse.Namespace) -> None:
    """Load, train, and write the results."""
    config = recipe(options.data, options.pooling, options.seed)
    if options.epochs is not None:
        config = replace(config, epochs=options.epochs)
    dataset = sources.load(options.data, options.seed, requests=options.requests, path=options.movielens_file)
    trainer = Trainer(dataset, config, options.device, options.backend)
    if options.resume is not None:
        trainer.load(options.resume)
    train, held_out, bayes = dataset.train, dataset.held_out, trainer.bayes
    print(
        f"{dataset.name}: {len(train)} requests with {len(train.label)} candidates to learn from, {len(held_out)} with "
        f"{len(held_out.label)} held out; held-out base rate {held_out.label.mean():.4f}, which scores NE 1"
        + ("" if bayes is None else f"; the true probabilities score {_score(bayes)}"),
        flush=True,
    )
    if len(trainer.epochs) == config.epochs:
        print(f"nothing left to train, nothing written: {options.resume} has all epochs ({config.epochs})")
        return
    title = f"{options.data}, {options.pooling}, seed {options.seed}"
    trainer.run(lambda trainer: _report_epoch(trainer, options.out, title))
    print(f"wrote {options.out}/metrics.csv, curves.png and checkpoint.pt")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parse(arguments)
    # TorchRec asks in every forward whether fx is tracing, and torch 2.13 logs advice to whoever asks.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        run(options)
    except (InputError, UnsupportedError, OSError) as error:
        print(f"train_ranking: {'; '.join(line.strip() for line in str(error).splitlines())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
