"""``python -m jagged_attn.bench``: measure, check, compare."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..backends import BACKENDS
from .arguments import Parser, default_device, device_here, natural, output_file, run_command, seed_number
from .contestants import PEERS, select_contestants
from .plot import FORMATS, plot_rows
from .provenance import Provenance, collect_provenance
from .report import Row, exit_code, render, summarize, write_csv
from .runner import Settings, run_workload
from .timing import make_clock, measure_ceilings
from .workloads import WORKLOADS, select_workloads

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jagged_attn.bench",
        description="Time our backends and their peers, in one run, on named workloads. Every result is checked "
        "against a float64 reference first; what is wrong gets no speed. Exit code 1 if a backend of ours was wrong, "
        "failed, or could not be measured at all; 2 for bad arguments.",
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and stop; * marks the defaults")
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="workloads, by name or glob")
    parser.add_argument("--backend", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(PEERS)}; or none")
    parser.add_argument("--device", type=device_here, default=default_device(), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--repeats", type=natural, help="timed passes of each; default 30 on a GPU, 7 on a CPU")
    parser.add_argument(
        "--check", type=natural, metavar="N", help="sequences compared; default 64 on a GPU, 24 on a CPU"
    )
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="small: a trial in seconds")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--out", type=output_file(), metavar="CSV", help="write the rows, each with its provenance")
    parser.add_argument("--plot", type=output_file(*FORMATS), metavar="PNG", help="draw forward and backward times")
    parser.add_argument("--commit", help="what to record where the package does not lie in its git repository")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of the process by default.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        _print_list()
        return 0
    try:
        workloads = select_workloads(options.case, options.device.type)
        contestants = select_contestants(options.backend, options.peers, options.device.type)
    except ValueError as error:
        parser.error(str(error))
    device = _with_index(options.device)
    provenance = collect_provenance(device, arguments, options.commit)
    print(_head(provenance))
    settings = _settings(options, device)
    rows: list[Row] = []
    progress = _Progress(len(workloads))
    for workload in workloads:
        problem, found = run_workload(workload, contestants, settings, progress.say, progress.passes)
        progress.write(render(problem, found))
        rows += found
        if options.out:  # after every workload, so that a run cut short leaves what it has
            write_csv(options.out, rows, provenance)
    progress.close()
    print(summarize(rows))
    if options.plot:
        _plot(options.plot, rows, provenance)
    return exit_code(rows)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _settings(options: argparse.Namespace, device: torch.device) -> Settings:
    on_gpu, small = device.type == "cuda", options.scale == "small"
    if on_gpu:
        torch.cuda.set_device(device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    clock = make_clock(device)
    ceilings = measure_ceilings(device, dtype, clock, small)
    print(
        f"ceilings of this run: {ceilings.tflops:.4g} TFLOP/s ({ceilings.matmul_size} cubed product, {dtype}), "
        f"{ceilings.gb_per_s:.4g} GB/s (copy of {ceilings.copy_bytes / 2**20:.0f} MiB, read and written)\n"
    )
    repeats = options.repeats or (30 if on_gpu else 7)
    sample = options.check or (64 if on_gpu else 24)
    return Settings(device, dtype, options.seed, small, repeats, sample, options.memory, ceilings, clock)


def _print_list() -> None:
    for workload in WORKLOADS.values():
        marks = "".join("*" if device in workload.default_on else " " for device in ("cuda", "cpu"))
        print(f"{marks} {workload.name:<44} {workload.describe()}")


def _head(provenance: Provenance) -> str:
    lines = [f"device: {provenance.device}" + (f", driver {provenance.driver}" if provenance.driver else "")]
    lines.append(f"date: {provenance.date}, commit: {provenance.commit}")
    lines.append(
        f"python {provenance.python}, torch {provenance.torch}, triton {provenance.triton or 'none'}, "
        f"FlashAttention-4 {provenance.fa4 or 'none'}"
    )
    return "\n".join(lines)


def _plot(path: Path, rows: Sequence[Row], provenance: Provenance) -> None:
    try:
        plot_rows(path, rows, provenance)
    except (ImportError, ValueError) as error:
        print(f"no chart: {error}")


class _Progress:
    """A progress bar over the passes if tqdm is installed; silence otherwise."""

    def __init__(self, workloads: int) -> None:
        self._bar: Any = None
        with suppress(ImportError):
            from tqdm import tqdm

            self._bar = tqdm(total=0, unit="pass", leave=False, disable=None)
        if self._bar is None:
            print("tqdm is not installed: no progress bar.")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_description(text)

    def passes(self, total: int) -> Callable[[], Any]:
        if self._bar is None:
            return lambda: None
        self._bar.reset(total)
        return self._bar.update

    def write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(text + "\n", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    run_command(main)
