"""Access histories: who last wrote each cell of a memory, who has read it since, and what that forbids."""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import Access, Clock
from .errors import EmulatorError, Verdict
from .parameters import Checks

NOBODY = 0
HOST = 1


def _distinct(values: np.ndarray) -> list[int]:
    """The distinct values of a small-integer array, quickly when there is only one."""
    if values.size == 0:
        return []
    low = int(values.min())
    return [low] if low == int(values.max()) else [int(v) for v in np.unique(values)]


class History:
    """The history of one memory, kept per cell.

    Two integer arrays hold, for each cell, the record of the last plain write and the set of reads and atomic accesses
    since. Cells of one tile mostly share both, so a check touches one or two records.

    Args:
        name: Memory, for reports.
        cells: Number of cells.
        written: The host has filled the memory; otherwise nothing has.
        proxies: Generic and async accesses go through different proxies (shared memory).
        checks: Which checks run.
    """

    def __init__(self, name: str, cells: int, written: bool, proxies: bool, checks: Checks) -> None:
        self.name = name
        self.proxies = proxies
        self.checks = checks
        self.once = False
        self.writer = np.full(cells, HOST if written else NOBODY, np.int32)
        self.readers = np.zeros(cells, np.int32)
        # Cells that atomic operations have filled: they have no single writer.
        self.reduced: np.ndarray | None = None
        self._records: list[Access | None] = [None, None]
        self._sets: list[tuple[int, ...]] = [()]

    def read(self, cells: Any, access: Access, clock: Clock, tolerant: bool = False) -> None:
        """Check and record a read of ``cells`` (anything that indexes a flat array).

        A ``tolerant`` read may find cells that nothing has written: it gets poison.
        """
        self._check_last_writes(cells, access, clock, tolerant)
        if not access.atomic:
            self._check_additions(cells, access, clock)
        self._add_reader(cells, access, clock)

    def write(self, cells: Any, access: Access, clock: Clock) -> None:
        """Check and record a write; an atomic one may race with other atomic ones."""
        self._check_last_writes(cells, access, clock)
        for group in _distinct(self.readers[cells]):
            for number in self._sets[group]:
                other = self._records[number]
                assert other is not None
                if not (access.atomic and other.atomic):
                    self._check_order(access, other, clock)
        if access.atomic:
            if self.reduced is None:
                self.reduced = np.zeros(self.writer.shape, bool)
            self.reduced[cells] = True
            self._add_reader(cells, access, clock)
            return
        self._records.append(access)
        self.writer[cells] = len(self._records) - 1
        self.readers[cells] = 0

    def forget(self, cells: Any) -> None:
        """Make ``cells`` unwritten again."""
        self.writer[cells] = NOBODY
        self.readers[cells] = 0

    def unwritten_cells(self) -> np.ndarray:
        """Indices of cells that nothing has written, atomic writes included."""
        empty = self.writer == NOBODY
        if self.reduced is not None:
            empty &= ~self.reduced
        return np.flatnonzero(empty)

    def _check_last_writes(self, cells: Any, access: Access, clock: Clock, tolerant: bool = False) -> None:
        for number in _distinct(self.writer[cells]):
            other = self._records[number]
            if other is not None:
                self._check_order(access, other, clock)
                self._check_proxy(access, other, clock)
                if self.once and access.write and not access.atomic:
                    text = f"{self.name}: {access.where} writes again what {other.where} has written"
                    raise EmulatorError(Verdict.OVERWRITTEN, text)
            elif (
                number == NOBODY
                and not (access.write or tolerant)
                and self.checks.unwritten
                and not self._reduced(cells)
            ):
                text = f"{self.name}: {access.where} reads what nothing has written"
                raise EmulatorError(Verdict.UNWRITTEN, text)

    def _check_additions(self, cells: Any, access: Access, clock: Clock) -> None:
        """A read comes after every atomic write before it, or may find a sum that is not complete."""
        for group in _distinct(self.readers[cells]) if self.reduced is not None else ():
            for number in self._sets[group]:
                other = self._records[number]
                assert other is not None
                if other.atomic and other.write:
                    self._check_order(access, other, clock)

    def _reduced(self, cells: Any) -> bool:
        """Whether atomic writes have filled the unwritten ones of ``cells``."""
        return self.reduced is not None and bool((self.reduced[cells] | (self.writer[cells] != NOBODY)).all())

    def _check_order(self, access: Access, other: Access, clock: Clock) -> None:
        if self.checks.races and not clock.knows(other):
            text = (
                f"{self.name}: {access.verb} by {access.where} is not ordered after the {other.verb} by {other.where}"
            )
            raise EmulatorError(Verdict.RACE, text)

    def _check_proxy(self, access: Access, other: Access, clock: Clock) -> None:
        if not self.proxies or not self.checks.fences or access.generic or not other.generic:
            return
        if not clock.sees(other):
            text = f"{self.name}: {access.where} uses, through the async proxy, the write by {other.where}"
            text += ": no fence between"
            raise EmulatorError(Verdict.FENCE, text)

    def _add_reader(self, cells: Any, access: Access, clock: Clock) -> None:
        self._records.append(access)
        number = len(self._records) - 1
        old = self.readers[cells]
        groups = _distinct(old)
        new = [self._extended(group, number, clock) for group in groups]
        if len(groups) == 1:
            self.readers[cells] = new[0]
        elif groups:
            self.readers[cells] = np.asarray(new, np.int32)[np.searchsorted(groups, old)]

    def _extended(self, group: int, number: int, clock: Clock) -> int:
        """The set ``group`` with one more reader, without those that the new one is ordered after."""
        kept = []
        for n in self._sets[group]:
            record = self._records[n]
            assert record is not None
            if not clock.knows(record):
                kept.append(n)
        self._sets.append((*kept, number))
        return len(self._sets) - 1
