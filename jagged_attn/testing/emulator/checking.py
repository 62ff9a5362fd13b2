"""Kernel tests in a few lines: run under a schedule, compare with a reference; hunt a mutant over seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .errors import EmulatorError, Verdict
from .mutants import Mutant
from .parameters import HOUSE_RULES
from .rewrite import Program
from .run import SCHEDULE_VARIABLE, Launch, Report, emulate, repeat_command
from .schedules import Schedule


@dataclass
class KernelCase:
    """A kernel, its inputs and what it should compute.

    Args:
        kernel: The jit function.
        grid: CTAs.
        arguments: Every argument by name.
        references: For each output argument, the right values.
        tolerances: For each, the largest absolute error relative to the largest finite reference value.
        launch: Cluster, architecture, checks; its schedule and outputs are set by ``check``.
        without_fault: What ``hunt`` has found without a fault, by seed and most steps.
    """

    kernel: Any
    grid: Sequence[int]
    arguments: Mapping[str, Any]
    references: Mapping[str, torch.Tensor]
    tolerances: Mapping[str, float]
    launch: Launch = field(default_factory=lambda: Launch(checks=HOUSE_RULES))
    without_fault: dict[tuple[int, int], str | None] = field(default_factory=dict, repr=False)

    def check(self, schedule: Schedule, program: Program | None = None) -> Report:
        """Run under ``schedule``; every element of every output has to be written once, and be right.

        Raises:
            EmulatorError: Any finding of the emulator, or VALUE.
        """
        launch = replace(self.launch, schedule=schedule, outputs=tuple(self.references))
        report = emulate(self.kernel, self.grid, self.arguments, launch, program)
        error = self.error()
        if not error <= 1:
            text = f"{error:.3g} times the tolerance"
            raise _at(EmulatorError(Verdict.VALUE, text), report.schedule)
        return report

    def error(self) -> float:
        """Largest error in units of its tolerance; infinite where a result is not a number, or infinite by mistake."""
        return max(self._error(name, want) for name, want in self.references.items())

    def _error(self, name: str, want: torch.Tensor) -> float:
        if not want.numel():
            return 0.0
        got, want = self.result(name).double().cpu().reshape(want.shape), want.double()
        # Infinities that are right are equal, which their difference is not.
        off = torch.where(got == want, 0.0, (got - want).abs())
        largest = torch.where(want.isfinite(), want.abs(), 0.0).max().clamp(min=1e-30)
        worst = float(off.max() / largest)
        return worst / self.tolerances[name] if worst == worst else float("inf")

    def result(self, name: str) -> torch.Tensor:
        """The tensor behind an argument."""
        value = self.arguments[name]
        tensor: torch.Tensor = value.base if isinstance(value, TensorDescriptor) else value
        return tensor


def _at(error: EmulatorError, schedule: Schedule) -> EmulatorError:
    error.schedule, error.repeat = str(schedule), repeat_command(schedule)
    return error


@dataclass(frozen=True)
class Hunt:
    """What became of a mutant.

    Args:
        mutant: The fault.
        verdicts: One a seed, in order, up to the first that was meant for the fault; None where nothing was found.
    """

    mutant: Mutant
    verdicts: tuple[str | None, ...]

    @property
    def caught(self) -> bool:
        """Whether the check meant for it found it."""
        return bool(self.verdicts) and self.verdicts[-1] in {str(v) for v in self.mutant.expected}

    @property
    def reported(self) -> bool:
        """Whether anything found it."""
        return any(self.verdicts)


def hunt(case: KernelCase, mutant: Mutant, seeds: Sequence[int] = range(8), max_steps: int = 20_000) -> Hunt:
    """Run a mutant on random schedules until the check meant for it reports it.

    Raises:
        ValueError: without the fault something is reported, too, so that the hunt would prove nothing.
    """
    program = mutant.program()
    case = replace(case, launch=replace(case.launch, max_steps=max_steps))
    verdicts: list[str | None] = []
    for seed in seeds:
        schedule = Schedule("random", seed)
        if (seed, max_steps) not in case.without_fault:
            case.without_fault[seed, max_steps] = _verdict(lambda at=schedule: case.check(at))  # type: ignore[misc]
        if case.without_fault[seed, max_steps]:
            raise ValueError(
                f"case must be right without a fault, got {case.without_fault[seed, max_steps]} on {seed=}."
            )
        verdict = _verdict(lambda at=schedule: case.check(at, program))  # type: ignore[misc]
        verdicts.append(verdict)
        if verdict in {str(v) for v in mutant.expected}:
            break
    return Hunt(mutant, tuple(verdicts))


def _verdict(run: Callable[[], Any]) -> str | None:
    if SCHEDULE_VARIABLE in os.environ:
        raise ValueError(f"{SCHEDULE_VARIABLE} must not be set for a hunt over seeds.")
    try:
        run()
    except EmulatorError as error:
        return str(error.verdict)
    return None
