"""What the emulator reports: one exception class, one word per check."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """The check that a report comes from."""

    RACE = "RACE"  # two accesses, one of them a write, that nothing orders
    FENCE = "FENCE"  # the async proxy uses what the generic proxy wrote, without a proxy fence
    UNWRITTEN = "UNWRITTEN"  # a read of memory that nothing wrote
    OVERWRITTEN = "OVERWRITTEN"  # a second write to an output element
    MISSING = "MISSING"  # an output element that no one wrote
    OUTSIDE = "OUTSIDE"  # an access outside every tensor, or an index outside an allocation
    DEADLOCK = "DEADLOCK"
    LIVELOCK = "LIVELOCK"
    LAPPED = "LAPPED"  # a barrier went on two phases past the one a waiter meant
    OVERFLOW = "OVERFLOW"  # more arrivals than a barrier's count
    BYTES = "BYTES"  # transaction bytes that do not add up
    PHASE = "PHASE"  # a parity other than 0 or 1
    WGMMA = "WGMMA"  # an asynchronous product used before its own async_dot_wait
    REMOTE = "REMOTE"  # an illegal use of another CTA's memory or barrier
    EXIT = "EXIT"  # something still in flight, or left over, when a CTA ends
    BUDGET = "BUDGET"  # shared memory, tensor memory, warps or registers exceeded
    ALIAS = "ALIAS"  # reuse= of unequal size or kind
    SHAPE = "SHAPE"  # operand shapes or kinds that the instruction does not have
    VALUE = "VALUE"  # wrong numbers; raised by tests, not by the emulator
    UNSUPPORTED = "UNSUPPORTED"  # an operation that the emulator lacks


class EmulatorError(Exception):
    """A finding: ``verdict`` names the check, ``schedule`` the interleaving that showed it.

    Args:
        verdict: The check.
        message: What was found, with task names and source lines.
    """

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(verdict, message)
        self.verdict = verdict
        self.message = message
        self.schedule = ""
        self.repeat = ""

    def __str__(self) -> str:
        text = f"{self.verdict}: {self.message}"
        if self.schedule:
            text += f"\nschedule: {self.schedule}"
        if self.repeat:
            text += f"\nrepeat with: {self.repeat}"
        return text
