"""Train every data source, pooling and seed; write the CSV, the picture and the table of ``docs/ranking.md``.

    python examples/ranking_results.py           # all runs of the results table
    python examples/ranking_results.py --tune    # the grid behind the recipes, on validation data only

With ``--keep``, runs that the CSV already has are not repeated; each row says where it comes from.
Exit code 1: a bar of the results is not met.
"""

import os

# Before torch, whose OpenMP reads it while it loads. A thread that spins while it waits takes the core that the other
# needs: beside another busy process, an epoch of `train_ranking.py --requests 2000` took 22 s with spinning and 2.3 s
# without (two cores of an AMD EPYC).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from ranking import sources
from ranking.errors import InputError
from ranking.outputs import read_csv, write_csv
from ranking.provenance import provenance
from ranking.recipes import DATA, POOLINGS, grid, recipe
from ranking.summary import Row, around_results, insert, markdown, plot, tuned, verdicts
from ranking.training import TrainConfig, Trainer

from jagged_attn.bench.arguments import Parser, device_here, output_folder, run_command, seed_number, whole

ROOT = Path(__file__).resolve().parent.parent
TUNING_SEED = 1000  # no seed of the results


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="ranking_results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the tuning grid instead")
    parser.add_argument("--keep", action="store_true", help="do not repeat the runs that the CSV has")
    parser.add_argument("--data", choices=DATA, nargs="+", default=list(DATA))
    parser.add_argument("--pooling", choices=POOLINGS, nargs="+", default=list(POOLINGS))
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", type=device_here, default="cpu")
    parser.add_argument("--requests", type=whole(10), help="size of the synthetic log")
    tables = output_folder(("ranking.csv", "ranking_tuning.csv"))
    parser.add_argument("--out", type=tables, default=str(ROOT / "examples" / "results"), help="folder of the CSV")
    parser.add_argument("--docs", default=str(ROOT / "docs"), help="folder of ranking.md and ranking.png")
    options = parser.parse_args(arguments)
    if not options.tune:
        options.docs = parser.convert("--docs", _docs, options.docs)
    return options


def _docs(text: str) -> Path:
    folder = output_folder(("ranking.md", "ranking.png"))(text)
    try:
        around_results(folder / "ranking.md")
    except (InputError, OSError) as error:
        raise argparse.ArgumentTypeError(f"must be a folder with a page of results, got {text} ({error})") from None
    return folder


def _kept(table: Path) -> list[Row]:
    """The rows that are there already."""
    rows = read_csv(table) if table.is_file() else []
    for name in ("data", "pooling", "seed", "held_out", "learning_rate", "embedding_boost", "epoch", "ne", "auc"):
        if any(row.get(name) is None for row in rows):
            raise InputError(f"--keep needs a table with a column {name}, got {table}.")
    return rows


def _runs(options: argparse.Namespace) -> Iterator[tuple[str, TrainConfig]]:
    for data in options.data:
        for pooling in options.pooling:
            if options.tune:
                yield from ((data, config) for config in grid(data, pooling, TUNING_SEED))
            else:
                yield from ((data, recipe(data, pooling, seed)) for seed in options.seeds)


def _key(run: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(str(run[name]) for name in ("data", "pooling", "seed", "learning_rate", "embedding_boost"))


def _train(data: str, config: TrainConfig, options: argparse.Namespace) -> list[Row]:
    """One row an epoch."""
    held_out = "validation" if options.tune else "test"
    dataset = sources.load(data, config.seed, held_out, requests=options.requests if data == "synthetic" else None)
    trainer = Trainer(dataset, config, options.device)
    trainer.run()
    bayes = trainer.bayes
    run = {
        "data": data,
        "pooling": config.pooling,
        "seed": config.seed,
        "held_out": held_out,
        "learning_rate": config.learning_rate,
        "embedding_boost": config.embedding_boost,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "base_rate": f"{dataset.held_out.label.mean():.6f}",
        "bayes_ne": "" if bayes is None else f"{bayes.ne:.6f}",
        "bayes_auc": "" if bayes is None else f"{bayes.auc:.6f}",
    }
    figures = [{name: f"{value:.6g}" for name, value in epoch.items()} for epoch in trainer.epochs]
    return [{name: str(value) for name, value in {**run, **epoch}.items()} for epoch in figures]


def run(options: argparse.Namespace) -> bool:
    """Train what is asked for, write the results, and say whether they meet the bars."""
    origin = provenance(options.device)
    table = options.out / ("ranking_tuning.csv" if options.tune else "ranking.csv")
    rows = _kept(table) if options.keep else []
    done = {_key(row) for row in rows}
    for data, config in _runs(options):
        if _key({"data": data, **asdict(config)}) in done:
            continue
        rows += [{**row, **origin} for row in _train(data, config, options)]
        write_csv(table, rows, rows[0])
        last = rows[-1]
        print(
            f"{data}, {config.pooling}, seed {config.seed}, learning rate {config.learning_rate}, embedding boost "
            f"{config.embedding_boost}: {last['held_out']} NE {last['ne']}, AUC {last['auc']}",
            flush=True,
        )
    if options.tune:
        print(
            "\n".join(f"{' '.join(run)}: learning rate and embedding boost {best}" for run, best in tuned(rows).items())
        )
        return True
    plot(options.docs / "ranking.png", rows)
    insert(options.docs / "ranking.md", markdown(rows))
    print(markdown(rows))
    return all(met for met, _ in verdicts(rows))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parse(arguments)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        return 0 if run(options) else 1
    except (InputError, OSError) as error:
        print(f"ranking_results: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_command(main)
