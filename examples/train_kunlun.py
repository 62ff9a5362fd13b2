"""Train a Kunlun-style model on a synthetic log of clicks and impressions with timestamps.

    python examples/train_kunlun.py --tiny --out out/kunlun-tiny     some fifteen seconds
    python examples/train_kunlun.py --out out/kunlun                 the size of the comparison in docs/kunlun.md
    python examples/train_kunlun.py --model ranking                  the ranking example's model on the same log

Writes ``metrics.csv`` and ``curves.png`` to the output folder after every epoch, each in one step. Exit code 2 and one
line on standard error: an option is wrong, and nothing was written.
"""

import argparse
import logging
import sys
from dataclasses import replace

import torch
from kunlun.model import count_parameters
from kunlun.synthetic import LogConfig, generate
from kunlun.training import TrainConfig, Trainer
from ranking.errors import InputError
from ranking.outputs import plot_curves, write_csv

from jagged_attn import UnsupportedError
from jagged_attn.bench.arguments import (
    BACKEND_NAMES,
    Parser,
    device_here,
    natural,
    output_folder,
    run_command,
    seed_number,
    whole,
)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train_kunlun", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["kunlun", "ranking"], default="kunlun")
    parser.add_argument("--tiny", action="store_true", help="a small log of a few items, and three epochs")
    parser.add_argument("--device", type=device_here, default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--backend", choices=BACKEND_NAMES, default="auto", help="what runs the attention")
    # Tensors of this size lose more to sharing than they gain, the more so on a machine that has other work.
    parser.add_argument("--threads", type=natural, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--seed", type=seed_number, default=0, help="of the weights and of the log")
    parser.add_argument("--epochs", type=natural, help="passes over the training part")
    parser.add_argument("--requests", type=whole(10), help="size of the log")
    folder = output_folder(("metrics.csv", "curves.png"))
    parser.add_argument("--out", type=folder, default="out/kunlun", help="output folder")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> tuple[LogConfig, TrainConfig]:
    log, config = LogConfig(), TrainConfig(model=options.model, seed=options.seed)
    if options.tiny:
        log = replace(log, num_requests=3_000, num_items=8, num_categories=4, max_events=32)
        log = replace(log, median_clicks=8.0, median_impressions=5.0)
        config = replace(config, epochs=3, batch_size=128)
    if options.requests is not None:
        log = replace(log, num_requests=options.requests)
    return log, config if options.epochs is None else replace(config, epochs=options.epochs)


def run(options: argparse.Namespace) -> None:
    """Generate, train, and write the results."""
    log_config, config = _settings(options)
    torch.set_num_threads(options.threads)
    trainer = Trainer(generate(options.seed, log_config), config, options.device, options.backend)
    bayes = trainer.bayes
    print(
        f"{len(trainer.train)} requests to learn from, {len(trainer.held_out)} held out, base rate "
        f"{trainer.log.label[trainer.held_out].mean():.4f} (NE 1); the true probabilities score NE {bayes.ne:.4f}; "
        f"{config.model} has {count_parameters(trainer.model)} parameters",
        flush=True,
    )

    def report(trainer: Trainer) -> None:
        row = trainer.epochs[-1]
        print(
            f"epoch {row['epoch']}/{config.epochs}: training log-loss {row['train_loss']:.4f}, held-out NE "
            f"{row['ne']:.4f}, AUC {row['auc']:.4f}",
            flush=True,
        )
        write_csv(options.out / "metrics.csv", trainer.epochs, row)
        title = f"synthetic clicks and impressions, {config.model}, seed {config.seed}"
        plot_curves(options.out / "curves.png", title, trainer.epochs, bayes.ne)

    trainer.run(report)
    print(f"wrote {options.out}/metrics.csv and curves.png")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parse(arguments)
    # TorchRec asks in every forward whether fx is tracing, and torch 2.13 logs advice to whoever asks.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        run(options)
    except (InputError, UnsupportedError, OSError) as error:
        print(f"train_kunlun: {'; '.join(line.strip() for line in str(error).splitlines())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
