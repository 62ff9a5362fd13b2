"""Train the ranking model on many processes: sharded tables, data-parallel attention, TorchRec's train pipeline.

    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --backend-comm gloo --out out/pipeline
    torchrun --standalone --nproc-per-node 8 examples/train_pipeline.py --backend-comm nccl --out out/pipeline

Writes ``metrics.csv`` and ``checkpoint.pt`` to the output folder after every epoch, each in one step.
Exit code 2 and one line on standard error: an input or an option is wrong, and nothing was written.
"""

import os

# Before torch, whose OpenMP reads it while it loads; see train_ranking.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import logging
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have, torchmetrics of distutils' version class.
    warnings.simplefilter("ignore")
    from ranking import sources
    from ranking.errors import InputError
    from ranking.outputs import write_csv
    from ranking.recipes import DATA, recipe
    from ranking.sharded import SHARDINGS, ShardedTrainer

from jagged_attn import UnsupportedError
from jagged_attn.bench.arguments import (
    BACKEND_NAMES,
    Parser,
    has_gpu_for_each_process,
    natural,
    output_folder,
    positive,
    run_command,
    seed_number,
)

# Row-wise Adagrad wants larger steps than the tuned AdamW of the recipes.
DENSE_RATE, TABLE_RATE = 4e-3, 0.1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train_pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = output_folder(("metrics.csv", "checkpoint.pt"))
    parser.add_argument("--data", choices=DATA, default="synthetic")
    parser.add_argument("--backend-comm", choices=["gloo", "nccl"], default="gloo", help="gloo: CPUs; nccl: GPUs")
    parser.add_argument("--sharding", choices=SHARDINGS, default="table_wise", help="how tables are cut")
    parser.add_argument("--backend", choices=BACKEND_NAMES, default="auto", help="what runs the attention")
    parser.add_argument("--seed", type=seed_number, default=0, help="of the weights, and of the synthetic log")
    parser.add_argument("--epochs", type=natural, help="passes over the training part (default: the recipe's)")
    parser.add_argument("--batch-size", type=natural, help="requests of all processes together (default: the recipe's)")
    parser.add_argument("--out", type=folder, help="output folder (default: out/pipeline-DATA-seedN)")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="go on from a checkpoint of the same run")
    parser.add_argument("--requests", type=natural, help="size of the synthetic log")
    parser.add_argument("--movielens-file", type=Path, help="ratings file (default: the one that recbole ships)")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds to wait for another process")
    options = parser.parse_args(arguments)
    if options.backend_comm == "nccl" and not has_gpu_for_each_process():
        parser.error("--backend-comm must be gloo where there is not a GPU for each process, got nccl")
    if options.out is None:
        options.out = parser.convert("--out", folder, f"out/pipeline-{options.data}-seed{options.seed}")
    return options


def _device(communication: str) -> torch.device:
    """The device of this process, which torchrun numbered."""
    if communication == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _report_epoch(trainer: ShardedTrainer, out: Path) -> None:
    """Print the last epoch and bring the files in ``out`` up to date."""
    row = trainer.epochs[-1]
    if trainer.rank == 0:
        print(
            f"epoch {row['epoch']}/{trainer.config.epochs}: training log-loss {row['train_loss']:.4f}, "
            f"held-out NE {row['ne']:.4f} ({row['seconds']:.0f} s)",
            flush=True,
        )
    trainer.save(out / "checkpoint.pt")
    if trainer.rank == 0:
        write_csv(out / "metrics.csv", trainer.epochs, row)


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Load, train, and write the results; in a process group."""
    config = recipe(options.data, "attention", options.seed)
    config = replace(config, learning_rate=DENSE_RATE, embedding_boost=TABLE_RATE / DENSE_RATE)
    if options.epochs is not None:
        config = replace(config, epochs=options.epochs)
    if options.batch_size is not None:
        config = replace(config, batch_size=options.batch_size)
    dataset = sources.load(options.data, options.seed, requests=options.requests, path=options.movielens_file)
    trainer = ShardedTrainer(dataset, config, device, options.sharding, options.backend)
    if options.resume is not None:
        trainer.load(options.resume)
    if trainer.rank == 0:
        print(
            f"{dataset.name}: {len(dataset.train)} requests to learn from, {len(dataset.held_out)} held out; "
            f"{trainer.world_size} processes on {device.type}, {options.sharding} tables",
            flush=True,
        )
    is_done = len(trainer.epochs) == config.epochs
    trainer.run(lambda trainer: _report_epoch(trainer, options.out))
    if trainer.rank == 0 and is_done:
        print(f"nothing left to train, nothing written: {options.resume} has all epochs ({config.epochs})")
    elif trainer.rank == 0:
        print(f"wrote {options.out}/metrics.csv and checkpoint.pt")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parse(arguments)
    # Advice of torch 2.13 to whoever asks whether fx is tracing, and of TorchRec on how a topology should be made.
    for name in ("torch.fx._symbolic_trace", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    is_first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        if "RANK" not in os.environ:
            raise InputError(
                "must be started by torchrun: torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py"
            )
        device = _device(options.backend_comm)
        dist.init_process_group(options.backend_comm, timeout=timedelta(seconds=options.timeout))
        run(options, device)
    # What is wrong with an input is wrong on every rank of a host; one of them says it.
    except (InputError, UnsupportedError, OSError) as error:
        if is_first_of_host:
            print(f"train_pipeline: {'; '.join(line.strip() for line in str(error).splitlines())}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_command(main)
