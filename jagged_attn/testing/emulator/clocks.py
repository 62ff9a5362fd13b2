"""Vector clocks: what an actor knows to have happened.

An actor is a task (program order, counted in epochs) or one asynchronous operation (an epoch of its own: done or not).
Knowledge travels with barriers, commits and waits.
"""

from __future__ import annotations


class Clock:
    """What is known to have happened before a point.

    Attributes:
        tasks: Task number to the last epoch known.
        ops: Bit set of the asynchronous operations known to be complete.
        fenced: Task number to the epoch up to which its generic writes are visible to the async proxy.
        fenced_ops: Bit set of operations whose generic writes are visible to the async proxy.
        phases: Barrier number to the number of phases known to be complete.
    """

    __slots__ = ("fenced", "fenced_ops", "ops", "phases", "tasks")

    def __init__(self) -> None:
        self.tasks: dict[int, int] = {}
        self.ops = 0
        self.fenced: dict[int, int] = {}
        self.fenced_ops = 0
        self.phases: dict[int, int] = {}

    def copy(self) -> Clock:
        """Return an independent copy."""
        new = Clock.__new__(Clock)
        new.tasks = self.tasks.copy()
        new.ops = self.ops
        new.fenced = self.fenced.copy()
        new.fenced_ops = self.fenced_ops
        new.phases = self.phases.copy()
        return new

    def join(self, other: Clock) -> None:
        """Learn everything that ``other`` knows."""
        for mine, theirs in ((self.tasks, other.tasks), (self.fenced, other.fenced), (self.phases, other.phases)):
            for key, value in theirs.items():
                if mine.get(key, 0) < value:
                    mine[key] = value
        self.ops |= other.ops
        self.fenced_ops |= other.fenced_ops

    def fence(self) -> None:
        """Make every generic write known here visible to the async proxy."""
        for key, value in self.tasks.items():
            if self.fenced.get(key, 0) < value:
                self.fenced[key] = value
        self.fenced_ops |= self.ops

    def knows_op(self, number: int) -> bool:
        """Whether operation ``number`` is known to be complete."""
        return bool(self.ops >> number & 1)

    def knows(self, access: Access) -> bool:
        """Whether ``access`` happened before this point."""
        if access.op:
            return bool(self.ops >> access.op & 1)
        return self.tasks.get(access.task, 0) >= access.epoch

    def sees(self, access: Access) -> bool:
        """Whether the async proxy sees the generic write ``access``."""
        if access.op:
            return bool(self.fenced_ops >> access.op & 1)
        return self.fenced.get(access.task, 0) >= access.epoch


class Access:
    """One read or write in the history of a memory.

    Args:
        task: Number of the task, 0 if an operation did it.
        epoch: Epoch of the task.
        op: Number of the operation, 0 if a task did it.
        write: A write, or a read.
        atomic: Atomic accesses do not race with one another.
        generic: Through the generic proxy (ordinary loads and stores), not TMA or the tensor core.
        where: Who, and at which source line.
    """

    __slots__ = ("atomic", "epoch", "generic", "op", "task", "where", "write")

    def __init__(
        self,
        task: int,
        epoch: int,
        op: int,
        write: bool,
        atomic: bool,
        generic: bool,
        where: str,
    ) -> None:
        self.task = task
        self.epoch = epoch
        self.op = op
        self.write = write
        self.atomic = atomic
        self.generic = generic
        self.where = where

    @property
    def verb(self) -> str:
        """The access in a word."""
        return "atomic access" if self.atomic else "write" if self.write else "read"
