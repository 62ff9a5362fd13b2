"""``python -m jagged_attn.perfmodel``: predictions beside measurements, predictions for Blackwell, microbenchmarks."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..bench.arguments import Parser, output_file, run_command
from ..bench.problem import BACKWARD, FORWARD
from ..bench.workloads import WORKLOADS, Workload
from . import blackwell
from .hopper import DIM
from .machine import B200, H200, Machine, number_of
from .predict import Prediction, draw, predict_backward, predict_forward

_RESULTS = Path(__file__).parent.parent / "bench" / "results" / "h200_hopper.csv"
# The ten cases of the issue of the Hopper kernels.
BARS = (
    "self/512", "self/1024", "self/2048", "broadcast_q/s32-kv2048", "broadcast_q/s64-kv2048", "broadcast_q/s128-kv2048",
    "broadcast_q/s256-kv2048", "broadcast_q/s128-kv512", "cross/1024x256", "window/2048-w100",
)  # fmt: skip
# How far a prediction may be off to count.
TOLERANCE = 0.2
# B200, TFLOP/s at lengths of 256, 512, 1024 and 2048, read by eye off charts of the public GDPA library.
LENGTHS = (256, 512, 1024, 2048)
PUBLISHED = {
    (FORWARD, 1.0): {"FA4": (170, 380, 615, 840), "CuTe GDPA": (815, 900, 1015, 1145)},
    (FORWARD, 0.5): {"FA4": (110, 280, 490, 730), "CuTe GDPA": (500, 610, 795, 985)},
    (BACKWARD, 1.0): {"FA4": (130, 265, 430, 610), "CuTe GDPA": (255, 410, 570, 702)},
    (BACKWARD, 0.5): {"FA4": (75, 165, 305, 475), "CuTe GDPA": (160, 270, 420, 577)},
    (FORWARD, None): {"FA4": (170, 213, 248, 260), "CuTe GDPA": (812, 828, 775, 790)},
    (BACKWARD, None): {"FA4": (173, 215, 245, 262), "CuTe GDPA": (258, 342, 410, 456)},
}


@dataclass(frozen=True)
class Compared:
    """A prediction beside a measurement."""

    case: str
    phase: str
    measured_ms: float
    predicted: Prediction

    @property
    def error(self) -> float:
        """By how much the prediction is over the measurement, as a share of it."""
        return self.predicted.ms / self.measured_ms - 1

    @property
    def counts(self) -> bool:
        """Whether it is one of the issue's ten cases, and close enough."""
        return self.case in BARS and abs(self.error) <= TOLERANCE


def _is_predicted(row: dict[str, str]) -> bool:
    if row["contestant"] != "tlx_hopper" or row["status"] != "ok" or row["phase"] not in (FORWARD, BACKWARD):
        return False
    workload = WORKLOADS.get(row["workload"])
    # An unknown name is refused where rows are read.
    return workload is None or workload.head_dim == DIM


def compare(machine: Machine, rows: Sequence[dict[str, str]]) -> Iterator[Compared]:
    """Every forward and backward of ours in a bench CSV, on a machine with the ceilings of that row's run."""
    for row in filter(_is_predicted, rows):
        workload = replace(WORKLOADS[row["workload"]])
        with_ceilings = machine.with_ceilings(float(row["ceiling_tflops"]), float(row["ceiling_gb_per_s"]))
        predict = predict_forward if row["phase"] == FORWARD else predict_backward
        predicted = predict(with_ceilings, workload, draw(workload, int(row["seed"])))
        yield Compared(workload.name, row["phase"], float(row["median_ms"]), predicted)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a bench CSV that can be predicted.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, or has no such row.
    """
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if _is_predicted(row)]
        for row in rows:
            numbers = [float(row[name]) for name in ("ceiling_tflops", "ceiling_gb_per_s", "median_ms")]
            if not all(0 < x < math.inf for x in numbers):
                raise ValueError(f"{row['workload']}: time and ceilings must be positive")
            if row["workload"] not in WORKLOADS:
                raise ValueError(f"{row['workload']}: there is no such workload")
            int(row["seed"])
    except (KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not rows:
        raise ValueError("it has no forward or backward of tlx_hopper")
    return rows


def _print_comparison(machine: Machine, path: Path) -> None:
    rows = read_rows(path)
    print("| case | phase | measured | predicted | error | main kernel | tensor | shared | memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    hits = {FORWARD: 0, BACKWARD: 0}
    for found in compare(machine, rows):
        p = found.predicted
        hits[found.phase] += found.counts
        print(
            f"| {found.case} | {found.phase} | {found.measured_ms:.3g} | {p.ms:.3g} | {found.error:+.0%} |"
            f" {p.main_ms:.3g} | {p.tensor_busy:.0%} | {p.shared_busy:.0%} | {p.memory_busy:.0%} |",
            flush=True,
        )
    for phase, count in hits.items():
        print(f"{phase}: {count} of the {len(BARS)} cases within {TOLERANCE:.0%}")


def _chart_workload(length: int, density: float | None, activation: str) -> Workload:
    """A shape of the published charts; density None: 256 keys."""
    return Workload(
        "chart", "cross", 1152, 256 if density is None else length, "constant", longest_q=length, mean_fill=0.5,
        lengths_q="uniform" if density == 0.5 else "constant", activation=activation,
    )  # fmt: skip


def _tflops(machine: Machine, phase: str, workload: Workload) -> float:
    lengths = draw(workload)
    predict = blackwell.predict_forward if phase == FORWARD else blackwell.predict_backward
    pairs = sum(q * kv for q, kv in zip(lengths.q, lengths.kv, strict=True))
    products = 2 if phase == FORWARD else 5
    flop = 2.0 * products * pairs * workload.num_heads * workload.head_dim
    return flop / predict(machine, workload, lengths).ms * 1e-9


def _print_blackwell(machine: Machine) -> None:
    print(f"PREDICTIONS for {machine.name}, which nobody has measured; TFLOP/s at L = 256 / 512 / 1024 / 2048")
    names = ("predicted, fast_gelu", "predicted, softmax", "published CuTe GDPA (GELU)", "published FA4 (softmax)")
    print(f"| case | {' | '.join(names)} |\n|---|---|---|---|---|")
    for (phase, density), published in PUBLISHED.items():
        cells = []
        for activation in ("fast_gelu", "softmax"):
            values = (_tflops(machine, phase, _chart_workload(n, density, activation)) for n in LENGTHS)
            cells.append(" / ".join(f"{x:.0f}" for x in values))
        cells += [" / ".join(map(str, published[name])) for name in ("CuTe GDPA", "FA4")]
        name = "256 keys" if density is None else f"density {density:g}"
        print(f"| {phase}, {name} | {' | '.join(cells)} |", flush=True)


def _checked(read: Callable[[Path], object], what: str) -> Callable[[str], Path]:
    """The ``type`` of an option: files that ``read`` can read."""

    def convert(text: str) -> Path:
        try:
            read(Path(text))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).split("\n")[0]
            raise argparse.ArgumentTypeError(f"must be {what}, got {text} ({reason})") from None
        return Path(text)

    return convert


def _change(text: str) -> tuple[str, float]:
    """The ``type`` of ``--set``."""
    name, _, value = text.partition("=")
    try:
        return name, number_of(name, value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text} ({error})") from None


def _machine(base: Machine, parameters: Path | None, changes: Sequence[tuple[str, float]]) -> Machine:
    machine = base if parameters is None else base.fitted(parameters)
    return replace(machine, **dict(changes))  # type: ignore[arg-type]


def _parser() -> Parser:
    parser = Parser(prog="python -m jagged_attn.perfmodel", description=__doc__)
    parser.add_argument("what", choices=("predict", "blackwell", "parameters", "measure"))
    rows, written = _checked(read_rows, "a CSV of the bench"), _checked(H200.fitted, "what `measure` wrote")
    parser.add_argument("--csv", type=rows, default=_RESULTS, help="rows of the bench to predict")
    parser.add_argument("--parameters", type=written, help="what `measure` wrote")
    parser.add_argument(
        "--set", nargs="*", type=_change, default=[], metavar="NAME=VALUE",
        help="other parameters, to see what they do",
    )  # fmt: skip
    parser.add_argument("--out", help="where `measure` writes (default: parameters.json)")
    return parser


def _measure(parser: Parser, machine: Machine, out: str) -> None:
    if not torch.cuda.is_available():
        parser.error("measure must run on a CUDA GPU, got none")
    path = parser.convert("--out", output_file(), out)
    try:
        from . import microbench
    except ImportError as error:
        parser.error(f"measure must run where triton has TLX, got {error}")
    device = torch.device("cuda")
    found = microbench.measure(machine, device)
    microbench.write(path, found, device)
    for name, value in found.items():
        print(f"{name:20} {value:<10.4g} was {getattr(machine, name):g}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    base = B200 if options.what == "blackwell" else H200
    machine = _machine(base, None if options.what == "blackwell" else options.parameters, options.set)
    if options.what == "predict":
        _print_comparison(machine, options.csv)
    elif options.what == "blackwell":
        _print_blackwell(machine)
    elif options.what == "parameters":
        for name, source in machine.sources.items():
            print(f"{name:20} {getattr(machine, name):<10g} {source}")
    else:
        _measure(parser, machine, options.out or "parameters.json")


if __name__ == "__main__":
    run_command(main)
