"""The runner: makes each problem, puts every contestant through the gate, and times those that pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .contestants import Attempt, Contestant
from .gate import Gate, Verdict, poison
from .memory import peak_mib_cpu, peak_mib_cuda
from .problem import BACKWARD, BOTH, FORWARD, Problem, Solution, make_problem
from .report import CALL, CALL_RECORDING, FAILED, OK, UNSUPPORTED, WRONG, Row, compare_with_peers
from .timing import Ceilings, Clock, Quantiles, passes_of, time_attempts, time_calls
from .workloads import Workload

# So few that the device's queue, which is waited for between batches, cannot fill up and hold the host.
_CALLS = 200
_PHASES = {"time": (FORWARD, BACKWARD, BOTH), "overhead": (CALL, CALL_RECORDING)}


@dataclass(frozen=True)
class Settings:
    """What holds for all workloads of a run.

    Attributes:
        device: where it runs.
        dtype: of the inputs.
        seed: of lengths and values.
        small: whether workloads are cut down to a trial.
        repeats: timed passes.
        sample: sequences that the gate compares.
        memory: whether peak memory is measured.
        ceilings: this run's matrix product and copy.
        clock: the device's clock.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    small: bool
    repeats: int
    sample: int
    memory: bool
    ceilings: Ceilings
    clock: Clock


@dataclass
class _Entry:
    """A contestant on its way through one workload."""

    contestant: Contestant
    status: str = OK
    reason: str = ""
    attempt: Attempt | None = None
    verdict: Verdict | None = None
    times: dict[str, Quantiles] | None = None
    peak_mib: float = float("nan")

    def fail(self, error: Exception) -> None:
        self.status, self.reason = FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.attempt = None


def run_workload(
    workload: Workload,
    contestants: Sequence[Contestant],
    settings: Settings,
    say: Callable[[str], Any] = lambda text: None,
    progress: Callable[[int], Callable[[], Any]] = lambda total: lambda: None,
) -> tuple[Problem, list[Row]]:
    """Measure one workload.

    Args:
        workload: the shape, before it is made small.
        contestants: who runs.
        settings: of the run.
        say: told what goes on.
        progress: given a number of passes, returns what to call after each.

    Returns:
        The problem and its rows: for each contestant one for every phase, or one that says why there is no speed.
    """
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # the last workload's blocks are of other sizes
    shape = workload.small() if settings.small else workload
    problem = make_problem(shape, settings.dtype, settings.device, settings.seed)
    entries = [_Entry(contestant) for contestant in contestants]
    say(f"{workload.name}: checking")
    _check(problem, entries, settings)
    if workload.measures == "time":
        say(f"{workload.name}: timing")
        _time(entries, settings, progress)
        if settings.memory:
            say(f"{workload.name}: memory")
            _measure_memory(workload, entries, settings)
    else:
        say(f"{workload.name}: timing calls")
        _time_calls(entries, settings)
    rows = [row for entry in entries for row in _rows(problem, workload, entry, settings)]
    compare_with_peers(rows)
    return problem, rows


def _check(problem: Problem, entries: Sequence[_Entry], settings: Settings) -> None:
    """Let those through who take the problem and solve it; leave an attempt with them."""
    gates: dict[bool, Gate] = {}
    for entry in entries:
        try:
            refusal = entry.contestant.refusal(problem)
            if refusal is not None:
                entry.status, entry.reason = UNSUPPORTED, refusal
                continue
            posed = entry.contestant.posed(problem)
            # Solving another problem than the one handed out costs another gate.
            gate = gates.get(posed is problem) or gates.setdefault(posed is problem, Gate(posed, settings.sample))
            entry.attempt = entry.contestant.attempt(posed)
            poison(posed)
            entry.verdict = gate.judge(entry.attempt.solve())
        except Exception as error:  # whatever a contestant raises is its result
            entry.fail(error)
            continue
        if not entry.verdict.passed:
            entry.status, entry.reason, entry.attempt = WRONG, "; ".join(entry.verdict.faults[:3]), None


def _time(entries: Sequence[_Entry], settings: Settings, progress: Callable[[int], Callable[[], Any]]) -> None:
    attempts = {e.contestant.name: e.attempt for e in entries if e.attempt is not None}
    if not attempts:
        return
    on_pass = progress(passes_of(attempts, settings.repeats))
    try:
        results = time_attempts(attempts, settings.clock, settings.repeats, on_pass)
    except Exception as error:  # past the warm-up it may be anybody's: nobody's times can be trusted
        results = dict.fromkeys(attempts, error)
    for entry in entries:
        result = results.get(entry.contestant.name)
        if isinstance(result, Exception):
            entry.fail(result)
        elif result is not None:
            entry.times = result


def _time_calls(entries: Sequence[_Entry], settings: Settings) -> None:
    for entry in entries:
        if entry.attempt is None:
            continue
        forward = entry.attempt.forward

        def no_grad(forward: Callable[[], Any] = forward) -> None:
            with torch.no_grad():
                forward()

        try:
            wait, calls = settings.clock.wait, 10 if settings.small else _CALLS
            entry.times = {
                phase: time_calls(call, wait, calls, settings.repeats)
                for phase, call in ((CALL, no_grad), (CALL_RECORDING, forward))
            }
        except Exception as error:  # whatever a contestant raises is its result
            entry.fail(error)


def _measure_memory(workload: Workload, entries: Sequence[_Entry], settings: Settings) -> None:
    for entry in entries:
        if entry.attempt is None:
            continue
        try:
            if settings.device.type == "cuda":
                entry.peak_mib = peak_mib_cuda(entry.attempt, settings.device)
            else:
                entry.peak_mib = peak_mib_cpu(
                    workload.name, entry.contestant.name, settings.dtype, settings.seed, settings.small
                )
        except Exception as error:  # the speed stands without it
            entry.reason = f"memory not measured: {type(error).__name__}: {error}"


def _rows(problem: Problem, workload: Workload, entry: _Entry, settings: Settings) -> list[Row]:
    ceilings, verdict, phases = settings.ceilings, entry.verdict, _PHASES[workload.measures]
    row = Row(
        workload=workload.name, contestant=entry.contestant.name, is_ours=entry.contestant.is_ours,
        phase="/".join(phases[:2]), status=entry.status, reason=entry.reason, peak_mib=entry.peak_mib,
        error_of_allowed=max(verdict.worst.values()) if verdict and verdict.worst else float("nan"),
        shape=problem.workload.describe(), dtype=str(settings.dtype).removeprefix("torch."),
        tokens_q=problem.inputs.q.shape[0], tokens_kv=problem.inputs.k.shape[0],
        scale="small" if settings.small else "full", seed=settings.seed,
        ceiling_tflops=ceilings.tflops, ceiling_gb_per_s=ceilings.gb_per_s,
    )  # fmt: skip
    if verdict:
        row.error_out, row.error_dq, row.error_dk, row.error_dv = map(verdict.relative_error, Solution._fields)
    if entry.status != OK or entry.times is None:
        return [row]
    return [_timed(row, phase, entry.times[phase], problem, ceilings) for phase in phases]


def _timed(row: Row, phase: str, times: Quantiles, problem: Problem, ceilings: Ceilings) -> Row:
    """The row with a phase's speed."""
    row = replace(row, phase=phase, median_ms=times.median, p20_ms=times.p20, p80_ms=times.p80, passes=times.passes)
    if problem.workload.measures == "time":
        row.tflops = problem.flops(phase) / times.median * 1e-9
        row.gb_per_s = problem.bytes_moved(phase) / times.median * 1e-6
        row.tflops_of_ceiling = row.tflops / ceilings.tflops
        row.gb_per_s_of_ceiling = row.gb_per_s / ceilings.gb_per_s
    return row
