"""``python -m jagged_attn.bench.turns``: checkouts of this library against one another, in turns.

Two runs of a benchmark differ by more than most changes give: a card at its power limit clocks itself by what it has
just done, and two cards are not alike. Here each checkout is a process of its own on one device; they take turns at a
few passes each, and who begins a round changes. Every checkout's result is judged by the gate first, as in the bench.

Besides forward and backward from idle caches there are ``sustained`` figures: of calls without a pause for a quarter of
a second, which is where the power limit is felt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Timer
from typing import Any

from ..backends import BACKENDS
from .arguments import Parser, default_device, device_here, natural, output_file, run_command, seed_number
from .problem import BACKWARD, FORWARD
from .provenance import collect_provenance, commit_of
from .report import write_rows
from .timing import Quantiles
from .workloads import select_workloads

_WORKER = Path(__file__).with_name("turns_worker.py")
_SUSTAINED_SECONDS = 0.25
_FIGURES = ("median_ms", "p20_ms", "p80_ms", "passes", "over_first")
_COLUMNS = ("workload", "phase", "checkout", "commit", "status", *_FIGURES)


class Checkout:
    """A checkout's process.

    Args:
        name: how rows call it.
        folder: what has ``jagged_attn`` in it.
        patience: seconds to wait for an answer, after which the process is ended: a kernel may hang.
    """

    def __init__(self, name: str, folder: Path, patience: int) -> None:
        self.name = name
        self.commit = commit_of(folder / "jagged_attn")
        self._patience = patience
        self._is_given_up = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, bufsize=1, env={**os.environ, "PYTHONPATH": path}, cwd=folder,
        )  # fmt: skip

    def tell(self, job: dict[str, Any]) -> None:
        """Hand it a job; ``hear`` takes the answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which ``hear`` says
            self._process.stdin.write(json.dumps(job) + "\n")

    def hear(self) -> Any:
        """Its answer.

        Raises:
            RuntimeError: the job raised, the process ended, or nothing was heard for too long.
        """
        assert self._process.stdout is not None
        timer = Timer(self._patience, self._give_up)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line and self._is_given_up:
            raise RuntimeError(f"nothing was heard of it for {self._patience} s")
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["without a word"]
            raise RuntimeError(f"its process ended: {last[0]}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RuntimeError(answer["raised"])
        return answer

    def _give_up(self) -> None:
        self._is_given_up = True
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            # What a dead process was not told is lost, and closing its pipe says so.
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def _checkout(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    path = Path(folder).resolve()
    if not (name and equals and (path / "jagged_attn" / "__init__.py").is_file()):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, a folder with jagged_attn in it, got {text}")
    return name, path


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jagged_attn.bench.turns",
        description="Time checkouts of this library against one another, in turns, on one device. The first is what "
        "the others are compared with. Exit code 1 if a checkout was wrong or failed; 2 for bad arguments.",
    )
    parser.add_argument("--checkout", nargs="+", required=True, type=_checkout, metavar="NAME=FOLDER")
    parser.add_argument("--case", nargs="+", required=True, metavar="NAME", help="workloads of the bench, or globs")
    parser.add_argument("--backend", choices=tuple(BACKENDS), required=True)
    parser.add_argument("--device", type=device_here, default=default_device(), help="default: cuda where there is one")
    parser.add_argument("--rounds", type=natural, default=8, help="turns of each (default 8)")
    parser.add_argument("--passes", type=natural, default=8, help="passes of a turn (default 8)")
    parser.add_argument("--sustained", action="store_true", help="also calls without a pause")
    parser.add_argument("--check", type=natural, default=24, metavar="N", help="sequences compared (default 24)")
    parser.add_argument("--patience", type=natural, default=180, metavar="S", help="wait so long for an answer (180 s)")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="small: a trial in seconds")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--out", type=output_file(), metavar="CSV")
    return parser


def _pose(checkouts: Sequence[Checkout], job: dict[str, Any]) -> dict[str, str]:
    """Have all make a problem, side by side; what was wrong, by checkout."""
    for checkout in checkouts:
        checkout.tell(job)
    told = {}
    for checkout in checkouts:
        try:
            faults = checkout.hear()
        except RuntimeError as error:
            faults = [str(error)]
        if faults:
            told[checkout.name] = faults[0]
    return told


def _take_turns(checkouts: Sequence[Checkout], job: dict[str, Any], rounds: int) -> dict[str, list[float] | str]:
    """Milliseconds of each checkout's passes, or how it failed."""
    times: dict[str, list[float] | str] = {checkout.name: [] for checkout in checkouts}
    for round_ in range(rounds):
        for i in range(len(checkouts)):
            checkout = checkouts[(round_ + i) % len(checkouts)]
            found = times[checkout.name]
            if isinstance(found, str):
                continue
            checkout.tell(job)
            try:
                found += checkout.hear()
            except RuntimeError as error:
                times[checkout.name] = str(error)
    return times


def _measure(checkouts: Sequence[Checkout], workload: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each phase and checkout of a workload."""
    pose = {"case": workload, "device": str(options.device), "backend": options.backend, "seed": options.seed}
    wrong = _pose(checkouts, {**pose, "small": options.scale == "small", "check": options.check})
    for name, fault in wrong.items():
        yield {"workload": workload, "phase": "", "checkout": name, "status": fault}
    right = [checkout for checkout in checkouts if checkout.name not in wrong]
    jobs: dict[str, dict[str, Any]] = {p: {"phase": p, "passes": options.passes} for p in (FORWARD, BACKWARD)}
    if options.sustained:
        jobs |= {f"{p}, sustained": {"phase": p, "seconds": _SUSTAINED_SECONDS} for p in (FORWARD, BACKWARD)}
    for label, job in jobs.items():
        first = None
        for name, times in _take_turns(right, job, options.rounds).items():
            row: dict[str, Any] = {"workload": workload, "phase": label, "checkout": name}
            if isinstance(times, str):
                yield {**row, "status": times}
                continue
            found = Quantiles.of(times)
            first = first or found.median
            figures = dict(zip(_FIGURES, (*found, found.median / first), strict=True))
            yield {**row, "status": "ok", **figures}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:<28} {row['phase']:<20} {row['checkout']:<16}"
    if row["status"] != "ok":
        return f"{head} {row['status']}"
    return f"{head} {row['median_ms']:9.4g} {row['p20_ms']:9.4g} {row['p80_ms']:9.4g} {row['over_first']:8.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if every checkout was right and timed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = [name for name, _ in options.checkout]
    if len(set(names)) < len(names):
        parser.error(f"--checkout must have a name for each, got {' '.join(names)}")
    try:
        workloads = [w.name for w in select_workloads(options.case, options.device.type) if w.measures == "time"]
    except ValueError as error:
        parser.error(str(error))
    provenance = collect_provenance(options.device, arguments, None, ("python", "-m", "jagged_attn.bench.turns"))
    print(f"device: {provenance.device}, {provenance.date}, torch {provenance.torch}, triton {provenance.triton}")
    print(f"{'workload':<28} {'phase':<20} {'checkout':<16} median ms       p20       p80  over first")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        checkouts = [Checkout(name, folder, options.patience) for name, folder in options.checkout]
        for checkout in checkouts:
            stack.callback(checkout.close)
        commits = {checkout.name: checkout.commit for checkout in checkouts}
        for workload in workloads:
            for row in _measure(checkouts, workload, options):
                print(_line(row), flush=True)
                rows.append({**row, "commit": commits[row["checkout"]]})
            if options.out:  # after every workload, so that a run cut short leaves what it has
                _write(options.out, rows, vars(provenance))
    return int(any(row["status"] != "ok" for row in rows))


def _write(path: Path, rows: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> None:
    facts = {key: provenance[key] for key in ("date", "device", "driver", "command", "python", "torch", "triton")}
    write_rows(path, (*_COLUMNS, *facts), ({**row, **facts} for row in rows))


if __name__ == "__main__":
    run_command(main)
