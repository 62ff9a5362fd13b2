"""Compare Kunlun with the ranking example's model on the synthetic log; fill in the table of ``docs/kunlun.md``.

    python examples/kunlun_results.py train     tune both alike on validation data, then train three seeds of each
    python examples/kunlun_results.py report    read the two CSV files, write the table, judge

``train --model kunlun`` and ``train --model ranking`` may run side by side. Exit code 1 of ``report``: the bar is not
met, which is that Kunlun's NE is lower by more, in the mean over seeds, than that difference varies.
"""

import argparse
import logging
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from kunlun.model import count_parameters
from kunlun.synthetic import generate
from kunlun.training import TrainConfig, Trainer
from ranking.errors import InputError
from ranking.outputs import read_csv, write_atomically, write_csv
from ranking.provenance import provenance

from jagged_attn.bench.arguments import Parser, device_here, run_command, seed_number

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "kunlun" / "results"
MODELS = ("kunlun", "ranking")
TUNING_SEED = 1000  # no seed of the results
LEARNING_RATES = (2e-3, 4e-3, 8e-3)
START, END = "<!-- learning: written by examples/kunlun_results.py -->", "<!-- end of learning -->"


def train_one(config: TrainConfig, device: torch.device) -> dict[str, str]:
    """Generate the log of the seed, train, and return the row of the last epoch."""
    trainer = Trainer(generate(config.seed), config, device)
    last = trainer.run()
    row = {
        "model": config.model, "held_out": config.held_out, "seed": config.seed, "learning_rate": config.learning_rate,
        "epochs": config.epochs, "parameters": count_parameters(trainer.model), "ne": f"{last['ne']:.6f}",
        "auc": f"{last['auc']:.6f}", "bayes_ne": f"{trainer.bayes.ne:.6f}", **provenance(device),
    }  # fmt: skip
    print(
        f"{config.model}, {config.held_out}, seed {config.seed}, {config.learning_rate}: NE {last['ne']:.4f}",
        flush=True,
    )
    return {name: str(value) for name, value in row.items()}


def train(model: str, seeds: list[int], device: torch.device) -> None:
    """Tune the learning rate on validation data of a log of its own, then train every seed."""
    base = TrainConfig(model=model)
    rows = []
    for rate in LEARNING_RATES:
        config = replace(base, seed=TUNING_SEED, learning_rate=rate, held_out="validation")
        rows.append(train_one(config, device))
        write_csv(RESULTS / f"{model}.csv", rows, rows[0])
    best = float(min(rows, key=lambda row: float(row["ne"]))["learning_rate"])
    for seed in seeds:
        rows.append(train_one(replace(base, seed=seed, learning_rate=best), device))
        write_csv(RESULTS / f"{model}.csv", rows, rows[0])


def report() -> bool:
    """Write the table into the page, and say whether the bar is met.

    Logs of different seeds are not equally predictable, so models are compared seed by seed.
    """
    rows = {model: [r for r in read_csv(RESULTS / f"{model}.csv") if r["held_out"] == "test"] for model in MODELS}
    lines = ["| model | parameters | learning rate | NE by seed | mean NE | spread |", "|---|---|---|---|---|---|"]
    mean, spread = {}, {}
    for model, runs in rows.items():
        ne = [float(run["ne"]) for run in runs]
        mean[model], spread[model] = statistics.mean(ne), max(ne) - min(ne)
        each = ", ".join(f"{x:.4f}" for x in ne)
        lines.append(
            f"| {model} | {runs[0]['parameters']} | {runs[0]['learning_rate']} | {each} | {mean[model]:.4f} | "
            f"{spread[model]:.4f} |"
        )
    bayes = ", ".join(f"{float(run['bayes_ne']):.4f}" for run in rows["kunlun"])
    by_seed = [float(r["ne"]) - float(k["ne"]) for k, r in zip(rows["kunlun"], rows["ranking"], strict=True)]
    difference, allowed = statistics.mean(by_seed), max(by_seed) - min(by_seed)
    met = difference > allowed
    first = rows["kunlun"][0]
    text = [
        *lines,
        "",
        f"Bayes-optimal NE by seed: {bayes}. Both models see the same log, another for each seed. Kunlun's NE is "
        f"lower by {', '.join(f'{x:.4f}' for x in by_seed)}; {difference:.4f} in the mean, with a spread of "
        f"{allowed:.4f}. The bar, a mean difference beyond that spread, is {'met' if met else 'not met'}.",
        "",
        f"{first['device']}, {first['date']}, torch {first['torch']}, by `{first['command']}`.",
    ]
    page = ROOT / "docs" / "kunlun.md"
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    new = before + "\n".join([START, *text, END]) + after
    write_atomically(page, lambda temporary: temporary.write_text(new))
    print("\n".join(text))
    return met


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="kunlun_results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "report"])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", type=device_here, default="cpu")
    options = parser.parse_args(arguments)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        if options.what == "report":
            return 0 if report() else 1
        torch.set_num_threads(1)  # as train_kunlun.py does by default
        for model in options.model:
            train(model, options.seeds, options.device)
    except (InputError, OSError) as error:
        print(f"kunlun_results: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
