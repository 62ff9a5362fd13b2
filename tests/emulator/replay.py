"""One launch of a kernel as the library's own launch code makes it, to be repeated with faults in the kernel."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from jagged_attn.testing.emulator import Schedule, launches
from jagged_attn.testing.emulator.checking import KernelCase
from jagged_attn.testing.emulator.errors import EmulatorError, Verdict
from jagged_attn.testing.emulator.rewrite import Program
from jagged_attn.testing.emulator.run import Launch, Report, emulate

_SECONDS = 120


def _out_of_time(*_: Any) -> None:
    raise EmulatorError(Verdict.DEADLOCK, f"no end after {_SECONDS} s")


@dataclass
class Replay(KernelCase):
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
        scratch = tuple(name for name in ("slots",) if name in self.arguments)
        launch = replace(self.launch, schedule=schedule, outputs=tuple(self.once), scratch=scratch)
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


def capture(run: Callable[[], Any], kernels: Sequence[Any], references: Sequence[str], once: Sequence[str]) -> Replay:
    """The first launch of one of ``kernels`` that ``run`` makes; its ``references`` are to come out again."""
    found: list[Replay] = []

    def record(kernel: Any, grid: Any, arguments: Any, launch: Launch, *_: Any) -> Report:
        if kernel not in kernels:
            return emulate(kernel, grid, arguments, launch)
        case = Replay(kernel, grid, dict(arguments), {}, {}, launch, once=once)
        tensors = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) or hasattr(x, "base")]
        case.before = {name: case.result(name).clone() for name in tensors}
        report = case.check(launch.schedule)
        case.references = {name: case.result(name).clone() for name in references}
        case.tolerances = dict.fromkeys(case.references, 0.01)
        found.append(case)
        return report

    with mock.patch.object(launches, "emulate", record):
        run()
    return found[0]
