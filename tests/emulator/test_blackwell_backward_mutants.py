"""Teeth: every standard fault in the Blackwell backward is reported, or is shown to be harmless."""

import functools
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import test_blackwell_backward as keys_stay
import test_blackwell_broadcast_q as queries_stay
import torch

from jagged_attn.backends._jit.rings import open_slot, publish
from jagged_attn.backends.tlx_blackwell import launch_backward
from jagged_attn.backends.tlx_blackwell.backward import backward_kv
from jagged_attn.schedule.blackwell_backward import BackwardConfig
from jagged_attn.testing.emulator import Schedule, hunt, launches
from jagged_attn.testing.emulator.checking import KernelCase
from jagged_attn.testing.emulator.errors import EmulatorError, Verdict
from jagged_attn.testing.emulator.faults import standard_mutants
from jagged_attn.testing.emulator.mutants import Mutant
from jagged_attn.testing.emulator.rewrite import Program
from jagged_attn.testing.emulator.run import Launch, Report, emulate

_SECONDS = 120


def _out_of_time(*_: Any) -> None:
    raise EmulatorError(Verdict.DEADLOCK, f"no end after {_SECONDS} s")


@dataclass
class _Replay(KernelCase):
    """One launch of the kernel, as the host made it, as often as wanted; the results of the first are the references.

    Args:
        once: outputs of which every element is written once.
        before: what the arguments held before the launch.
    """

    once: Sequence[str] = ()
    before: dict[str, torch.Tensor] = field(default_factory=dict)

    def check(self, schedule: Schedule, program: Program | None = None) -> Report:
        for name, value in self.before.items():
            self.result(name).copy_(value)
        launch = replace(self.launch, schedule=schedule, outputs=tuple(self.once), scratch=("slots",))
        # A role that does nothing for ever takes no step that the emulator could count.
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(_SECONDS)
        try:
            report = emulate(self.kernel, self.grid, self.arguments, launch, program)
        finally:
            signal.alarm(0)
        if self.references and not self.error() <= 1:
            raise EmulatorError(Verdict.VALUE, f"{self.error():.3g} times the tolerance")
        return report


def _capture(run: Callable[[], Any], once: Sequence[str]) -> _Replay:
    """The launch of the kernel that ``run`` makes."""
    found: list[_Replay] = []

    def record(kernel: Any, grid: Any, arguments: Any, launch: Launch, *_: Any) -> Report:
        if kernel is not backward_kv:
            return emulate(kernel, grid, arguments, launch)
        case = _Replay(kernel, grid, dict(arguments), {}, {}, launch, once)
        tensors = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) or hasattr(x, "base")]
        case.before = {name: case.result(name).clone() for name in tensors}
        report = case.check(launch.schedule)
        case.references = {name: case.result(name).clone() for name in ("desc_dq", "desc_dk", "desc_dv")}
        case.tolerances = dict.fromkeys(case.references, 0.01)
        found.append(case)
        return report

    with mock.patch.object(launches, "emulate", record):
        run()
    return found[0]


def _keys(config: BackwardConfig, dim: int = 64, deterministic: bool = False) -> _Replay:
    case = keys_stay.Case((257, 5), dim=dim, deterministic=deterministic)
    processors = 2 if deterministic else 1
    with mock.patch.object(launch_backward, "backward_config", return_value=config):
        found = _capture(
            lambda: keys_stay._run(case, Schedule("random", 0), processors=processors), ("desc_dk", "desc_dv")
        )
    if deterministic:
        found.tolerances = dict.fromkeys(found.references, 1e-12)
    return found


def _queries(config: BackwardConfig, dim: int = 64) -> _Replay:
    case = queries_stay.problem(40, (257, 5, 130) if dim == 64 else (129,), tail=3, dim=dim)
    return _capture(lambda: case.run(config=config, ctas=1, outputs=()), ("desc_dq", "desc_dk", "desc_dv"))


CASES: dict[str, Callable[[], _Replay]] = {
    "keys stay, early": functools.partial(_keys, BackwardConfig(2, 2, 2, "first", "none")),
    "queries stay, early": functools.partial(_queries, BackwardConfig(1, 2, 2, "first", "none")),
    "queries stay": functools.partial(_queries, BackwardConfig(1, 1, 2, "last", "dk")),
    "keys stay": functools.partial(_keys, BackwardConfig(2, 1, 1, "middle", "dq"), 128),
    "queries stay, wide": functools.partial(_queries, BackwardConfig(1, 2, 2, "last", "none"), 128),
    "in order": functools.partial(_keys, BackwardConfig(2, 2, 2, "first", "none"), deterministic=True),
}
_case = functools.cache(lambda name: CASES[name]())
_ONLY = {"_load": "keys", "_reduce_dq": "keys", "_epilogue": "keys", "_load_keys": "queries", "_send": "queries"}
_ONLY |= {"_send_keys": "queries", "_await_turn": "order", "_pass_turn": "order"}
MUTANTS = [m for kernel in (backward_kv, publish, open_slot) for m in standard_mutants(kernel)]
MUTANTS = [m for m in MUTANTS if m.site.function not in ("receive", "next_item")]

# Mutants that change nothing, with the reason.
EQUIVALENT = {
    "named barrier dropped | _pass_turn: named_barrier_wait() #0": (
        "it is for the threads of a task, which in the emulator is one actor"
    ),
    "fence dropped | _await_turn: fence() #0": (
        "additions by TMA are no race in the emulator, and its bits are right as soon as the poll has ended"
    ),
}


def _survives(mutant: Mutant, seeds: Sequence[int]) -> list[str]:
    """What each case said; empty if one of them reports the mutant."""
    verdicts = []
    for name in CASES:
        if _ONLY.get(mutant.site.function, "stay") in name:
            result = hunt(_case(name), mutant, seeds)
            if result.reported:
                return []
            verdicts.append(f"{name}: {result.verdicts}")
    return verdicts


# Faults of several kinds and roles; the others are hunted in the sweep.
@pytest.mark.parametrize("mutant", MUTANTS[::49], ids=lambda m: m.name)
def test_some_mutants_are_found(mutant):
    assert bool(_survives(mutant, range(4))) == (mutant.name in EQUIVALENT)


@pytest.mark.slow
def test_every_mutant_is_found_or_harmless():
    """The score is printed with -s."""
    survivors = [mutant.name for mutant in MUTANTS if _survives(mutant, range(8))]
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} mutants reported; survivors:")
    print("\n".join(survivors))
    assert set(survivors) == set(EQUIVALENT)
