"""Which runnable task or pending operation goes next: named policies, reproducible from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# What can be starved by name, besides any task role.
ENGINES = ("tma_load", "tma_store", "wgmma", "mma", "cp_async", "clc", "remote")
# A starved or lazy choice still goes once in this many steps, so that a kernel that polls memory ends.
_RELIEF = 256


class Candidate(Protocol):
    """A task or an operation, as far as a schedule cares."""

    label: str


@dataclass(frozen=True)
class Schedule:
    """A policy and a seed.

    * ``eager``: operations finish as soon as they can.
    * ``lazy``: operations finish only when no task can go on.
    * ``random``: any choice, from the seed.
    * ``round_robin``: tasks in turn, one step each, operations at random.
    * ``starve:NAME``: an engine (``tma_load``, ``tma_store``, ``wgmma``, ``mma``, ``cp_async``, ``clc``, ``remote``) or
      a role (a prefix of the task's name) goes only when nothing else can.
    * ``starve_cta:N``: the same for one CTA.

    Args:
        policy: One of the above.
        seed: Seed of every choice.
    """

    policy: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        name = self.policy.split(":")[0]
        known = ("eager", "lazy", "random", "round_robin", "starve", "starve_cta")
        if name not in known or (name.startswith("starve") and ":" not in self.policy):
            raise ValueError(f"policy must be one of {known} (the last two with ':NAME'), got {self.policy!r}.")

    def __str__(self) -> str:
        return f"{self.policy}@{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``str`` writes: ``"starve:mma@17"``."""
        policy, _, seed = text.rpartition("@")
        return cls(policy, int(seed)) if policy else cls(text)


def standard_schedules(seeds: int = 3, roles: Sequence[str] = ()) -> list[Schedule]:
    """One schedule of every policy, ``seeds`` random ones, and one that starves each of ``roles``."""
    starved = dict.fromkeys(("tma_load", "tma_store", "wgmma", "mma", *roles))
    fixed = [Schedule(p, 0) for p in ("eager", "lazy", "round_robin", *(f"starve:{s}" for s in starved))]
    return fixed + [Schedule("random", s) for s in range(seeds)]


class Chooser:
    """Makes the choices of one run."""

    def __init__(self, schedule: Schedule) -> None:
        self.random = random.Random(f"{schedule}")
        self.policy, _, self.argument = schedule.policy.partition(":")
        self._turn = 0
        self._steps = 0

    def choose(self, tasks: list[Candidate], ops: list[Candidate]) -> Candidate:
        """Pick one of what can go; at least one list holds something."""
        self._steps += 1
        if self._steps % _RELIEF:
            tasks, ops = self._narrow(tasks, ops)
        if self.policy == "round_robin" and tasks and self.random.random() < 0.5:
            self._turn += 1
            return tasks[self._turn % len(tasks)]
        return self.random.choice(tasks + ops)

    def _narrow(self, tasks: list[Candidate], ops: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        if self.policy == "eager" and ops:
            return [], ops
        if self.policy == "lazy" and tasks:
            return tasks, []
        if self.policy.startswith("starve"):
            kept = [x for x in tasks if not self._starved(x)], [x for x in ops if not self._starved(x)]
            if kept[0] or kept[1]:
                return kept
        return tasks, ops

    def _starved(self, candidate: Candidate) -> bool:
        cta, _, role = candidate.label.partition(".")
        return cta == f"cta{self.argument}" if self.policy == "starve_cta" else role.startswith(self.argument)
