"""mbarriers (phases, arrivals, transaction bytes), named barriers and the cluster barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clocks import Clock
from .errors import EmulatorError, Verdict
from .numerics import unwrap

if TYPE_CHECKING:
    from .machine import Cta, Task


class Mbarrier:
    """One mbarrier.

    Args:
        number: Unique in a run; the key of known phases in clocks.
        name: Source name and index.
        count: Arrivals that complete a phase.
        cta: Whose shared memory it lies in.
        per_thread: Every thread of a task arrives for itself (``alloc_warp_barrier``).
    """

    def __init__(self, number: int, name: str, count: int, cta: Cta, per_thread: bool) -> None:
        self.number = number
        self.name = name
        self.count = count
        self.cta = cta
        self.per_thread = per_thread
        self.phase = 0
        self.pending = count
        self.bytes = 0
        self.touched = False
        # An arrival is a release and the arrivals of a barrier form one release sequence, so knowledge adds up.
        self.arrived = Clock()
        self.completed = Clock()

    @property
    def state(self) -> str:
        """Everything a report needs."""
        return f"phase {self.phase}, {self.pending} of {self.count} arrivals pending, {self.bytes} bytes pending"

    def arrive(self, clock: Clock, count: int, who: str) -> None:
        """Count ``count`` arrivals that carry what ``clock`` knows."""
        self.touched = True
        if self.cta.ended and self.cta.machine.checks.exits:
            raise EmulatorError(Verdict.EXIT, f"{who} arrives at {self.name} of {self.cta.name}, which has ended")
        if count > self.pending:
            raise EmulatorError(Verdict.OVERFLOW, f"{who} arrives {count} times at {self.name}: {self.state}")
        self.arrived.join(clock)
        self.pending -= count
        self._turn()

    def expect(self, count: int) -> None:
        """Await ``count`` more bytes in this phase (the arrival that goes with it is separate)."""
        self.bytes += count

    def complete(self, clock: Clock, count: int, who: str) -> None:
        """Count ``count`` bytes as transferred."""
        self.touched = True
        self.arrived.join(clock)
        self.bytes -= count
        self._turn()
        if self.bytes < 0 and self.pending == 0:
            text = f"{who} brings {count} bytes to {self.name}, {-self.bytes} more than it expects: {self.state}"
            raise EmulatorError(Verdict.BYTES, text)

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.completed = self.arrived.copy()
            self.completed.phases[self.number] = self.phase

    def phases_needed(self, known: int, parity: int) -> int:
        """Completed phases that a waiter means who knows ``known`` to be complete.

        It means the phase in progress if that has the parity, and otherwise the one just completed.
        """
        return known + 1 if known & 1 == parity else known

    def open_to(self, parity: int) -> bool:
        """Whether a wait for ``parity`` passes now."""
        return self.phase & 1 != parity

    def check_lap(self, needed: int, parity: int, who: str) -> None:
        """Report a barrier that completed more phases than its waiter could count."""
        if self.phase > needed and self.cta.machine.checks.laps:
            text = f"{who} waits for parity {parity} of {self.name}, meaning phase {needed - 1}"
            text += f"; it has completed {self.phase}"
            raise EmulatorError(Verdict.LAPPED, text)


class BarrierArray:
    """What ``alloc_barriers`` returns; index it for one barrier."""

    def __init__(self, barriers: list[Mbarrier]) -> None:
        self.barriers = barriers

    def __getitem__(self, index: Any) -> Mbarrier:
        i = int(unwrap(index))
        if not 0 <= i < len(self.barriers):
            name = self.barriers[0].name.split("[")[0]
            raise EmulatorError(Verdict.OUTSIDE, f"barrier {i} of {name}, which has {len(self.barriers)}")
        return self.barriers[i]


class Rendezvous:
    """A barrier counted in threads (named) or CTAs (cluster): no phase for the caller to name, knowledge both ways."""

    def __init__(self) -> None:
        self.here = 0
        self.expected = 0
        self.generation = 0
        self.gathering = Clock()
        self.released = Clock()

    def arrive(self, task: Task, weight: int, expected: int, name: str) -> int:
        """Arrive with ``weight`` of ``expected`` and return the generation joined."""
        generation = self.generation
        if self.here and expected != self.expected:
            text = f"{task.name} expects {expected} threads at {name}, others {self.expected}"
            raise EmulatorError(Verdict.OVERFLOW, text)
        self.expected = expected
        self.gathering.join(task.release())
        self.here += weight
        if self.here > expected:
            raise EmulatorError(Verdict.OVERFLOW, f"{task.name} is one too many at {name} of {expected}")
        if self.here == expected:
            self.here = 0
            self.generation += 1
            self.released = self.gathering.copy()
        return generation
