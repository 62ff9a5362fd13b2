"""Rows: what a run found, as a table to read and a CSV to keep."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .problem import FORWARD, Problem
from .provenance import Provenance

OK, WRONG, FAILED, UNSUPPORTED = "ok", "wrong", "failed", "unsupported"
CALL, CALL_RECORDING = "forward call, no grad", "forward call, recording"


@dataclass
class Row:
    """One contestant in one phase of one workload; numbers that were not measured are NaN.

    Attributes:
        workload: its name.
        contestant: its name.
        is_ours: whether it is a backend of this library.
        phase: forward, backward or both; or the kind of call whose host time was taken.
        status: ``ok``; ``wrong`` (the gate refused it), ``failed`` (it raised), ``unsupported`` (it does not take the
            problem): those three have no speed.
        reason: why there is no speed.
        median_ms: median over the passes.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        passes: how many there are.
        tflops: useful operations over the median.
        tflops_of_ceiling: the same over this run's matrix product.
        gb_per_s: necessary bytes over the median.
        gb_per_s_of_ceiling: the same over this run's copy.
        vs_best_peer: median over that of the fastest right peer in this run; less than 1 is faster.
        peak_mib: most memory beyond the inputs in a forward and backward.
        error_of_allowed: largest error as a fraction of what is allowed, over output and gradients.
        error_out: relative error of the output, in norm, against float64.
        error_dq: of the queries' gradient.
        error_dk: of the keys'.
        error_dv: of the values'.
        shape: the workload in words.
        dtype: of the inputs.
        tokens_q: rows of q.
        tokens_kv: rows of k.
        scale: ``full``, or ``small`` for a trial.
        seed: of lengths and values.
        ceiling_tflops: this run's matrix product.
        ceiling_gb_per_s: this run's copy.
    """

    workload: str
    contestant: str
    is_ours: bool
    phase: str
    status: str
    reason: str = ""
    median_ms: float = math.nan
    p20_ms: float = math.nan
    p80_ms: float = math.nan
    passes: int = 0
    tflops: float = math.nan
    tflops_of_ceiling: float = math.nan
    gb_per_s: float = math.nan
    gb_per_s_of_ceiling: float = math.nan
    vs_best_peer: float = math.nan
    peak_mib: float = math.nan
    error_of_allowed: float = math.nan
    error_out: float = math.nan
    error_dq: float = math.nan
    error_dk: float = math.nan
    error_dv: float = math.nan
    shape: str = ""
    dtype: str = ""
    tokens_q: int = 0
    tokens_kv: int = 0
    scale: str = ""
    seed: int = 0
    ceiling_tflops: float = math.nan
    ceiling_gb_per_s: float = math.nan


COLUMNS = tuple(f.name for f in fields(Row)) + tuple(f.name for f in fields(Provenance))


def write_csv(path: Path, rows: Iterable[Row], provenance: Provenance) -> None:
    """Write the rows, each with the whole provenance, so that a row can be quoted on its own."""
    values = (asdict(row) | asdict(provenance) for row in rows)
    write_rows(path, COLUMNS, ({name: _cell(value) for name, value in row.items()} for row in values))


def write_rows(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV with these columns; its folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def compare_with_peers(rows: Sequence[Row]) -> None:
    """Fill in ``vs_best_peer`` of the rows of one workload."""
    for row in rows:
        peers = [r.median_ms for r in rows if r.phase == row.phase and r.status == OK and not r.is_ours]
        if row.is_ours and row.status == OK and peers:
            row.vs_best_peer = row.median_ms / min(peers)


def render(problem: Problem, rows: Sequence[Row]) -> str:
    """The rows of one workload as a table, calls in microseconds; where there is no speed, the reason stands."""
    w = problem.workload
    unit, per_ms = ("ms", 1.0) if w.measures == "time" else ("us", 1e3)
    lines = [
        f"{w.name}: {w.describe()}; {rows[0].dtype}, {rows[0].tokens_q:,} x {rows[0].tokens_kv:,} tokens",
        f"  {'contestant':<14}{'phase':<24}{f'median {unit}':>11}{'p20':>10}{'p80':>10}{'TFLOP/s':>9}{'GB/s':>8}"
        f"{'peak MiB':>10}{'err/allowed':>12}{'vs best peer':>14}",
    ]
    for row in rows:
        head = f"  {row.contestant:<14}{row.phase:<24}"
        if row.status != OK:
            lines.append(f"{head}  {row.status.upper()}: {row.reason}")
            continue
        times = [time * per_ms for time in (row.median_ms, row.p20_ms, row.p80_ms)]
        lines.append(
            f"{head}{times[0]:>11.4g}{times[1]:>10.4g}{times[2]:>10.4g}{_number(row.tflops, 9, '.3g')}"
            f"{_number(row.gb_per_s, 8, '.3g')}{_number(row.peak_mib, 10, '.1f')}"
            f"{_number(row.error_of_allowed, 12, '.2f')}{_number(row.vs_best_peer, 14, '.3f')}"
        )
    return "\n".join(lines)


def _number(value: float, width: int, form: str) -> str:
    return f"{'-' if math.isnan(value) else format(value, form):>{width}}"


def summarize(rows: Sequence[Row]) -> str:
    """How many results were refused, and what that means for the exit code."""
    ours = [row for row in rows if row.is_ours]
    bad = sorted({(row.workload, row.contestant) for row in ours if row.status in (WRONG, FAILED)})
    bad_peers = sorted(
        {(row.workload, row.contestant) for row in rows if not row.is_ours and row.status in (WRONG, FAILED)}
    )
    measured = sum(row.status == OK and row.phase in (FORWARD, CALL) for row in ours)
    lines = [f"{measured} of our results measured, {len(bad)} refused; {len(bad_peers)} of the peers' refused."]
    lines += [f"  refused: {contestant} on {workload}" for workload, contestant in (*bad, *bad_peers)]
    return "\n".join(lines)


def exit_code(rows: Sequence[Row]) -> int:
    """0 if something of ours was measured, and nothing of ours was wrong or failed; else 1."""
    statuses = {row.status for row in rows if row.is_ours}
    return 0 if OK in statuses and not statuses & {WRONG, FAILED} else 1
