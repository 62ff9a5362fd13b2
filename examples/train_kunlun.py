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
from pathlib import Path
from typing import NoReturn

import torch
from kunlun.model import count_parameters
from kunlun.synthetic import LogConfig, generate
from kunlun.training import TrainConfig, Trainer
from ranking.errors import InputError
from ranking.outputs import plot_curves, write_csv

from jagged_attn import UnsupportedError
from jagged_attn.backends import BACKENDS


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="train_kunlun", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["kunlun", "ranking"], default="kunlun")
    parser.add_argument("--tiny", action="store_true", help="a small log of a few items, and three epochs")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--backend", choices=["auto", *BACKENDS], default="auto", help="what runs the attention")
    # Tensors of this size lose more to sharing than they gain, the more so on a machine that has other work.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the log")
    parser.add_argument("--epochs", type=int, help="passes over the training part")
    parser.add_argument("--requests", type=int, help="size of the log")
    parser.add_argument("--out", type=Path, default=Path("out/kunlun"), help="output folder")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> tuple[LogConfig, TrainConfig, torch.device]:
    for name in ("epochs", "requests", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}.")
    if options.seed < 0:
        raise InputError(f"--seed must not be negative, got {options.seed}.")
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a CPU build of torch asserts that it has CUDA
        raise InputError(f"--device {options.device}: is not available here.") from error
    try:
        log = LogConfig()
        if options.tiny:
            log = replace(log, num_requests=3_000, num_items=8, num_categories=4, max_events=32)
            log = replace(log, median_clicks=8.0, median_impressions=5.0)
        if options.requests is not None:
            log = replace(log, num_requests=options.requests)
    except ValueError as error:
        raise InputError(f"--requests: {error}") from error
    config = TrainConfig(model=options.model, seed=options.seed)
    if options.tiny:
        config = replace(config, epochs=3, batch_size=128)
    return log, config if options.epochs is None else replace(config, epochs=options.epochs), device


def run(options: argparse.Namespace) -> None:
    """Generate, train, and write the results."""
    log_config, config, device = _settings(options)
    torch.set_num_threads(options.threads)
    trainer = Trainer(generate(options.seed, log_config), config, device, options.backend)
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
    sys.exit(main())
