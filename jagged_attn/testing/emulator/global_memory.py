"""Global memory: the tensors of a launch, checked pointer accesses, atomics."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .clocks import Access, Clock
from .descriptors import Descriptor
from .errors import EmulatorError, Verdict
from .numerics import decode, encode, np_dtype
from .races import History

if TYPE_CHECKING:
    from .machine import Machine


class GlobalTensor:
    """The bytes of one tensor argument and their history.

    Args:
        name: Argument name.
        data: Bytes, a flat uint8 view of the caller's tensor.
        itemsize: Bytes of an element: the size of a history cell.
        written: The caller has filled it.
        once: Every element is to be written, and no more than once.
        machine: The run.
    """

    def __init__(self, name: str, data: np.ndarray, itemsize: int, written: bool, once: bool, machine: Machine) -> None:
        self.name = name
        self.data = data
        self.itemsize = itemsize
        self.address = data.__array_interface__["data"][0]
        self.end = self.address + data.nbytes
        self.history = History(name, data.nbytes // itemsize, written, proxies=False, checks=machine.checks)
        self.history.once = once
        self.once = once
        # Knowledge published at an address by releases, for acquires.
        self.released: dict[int, Clock] = {}

    def missing(self) -> int:
        """Elements that nothing wrote."""
        return len(self.history.unwritten_cells())


class GlobalMemory:
    """Every tensor of a launch, found by address.

    Args:
        machine: The run.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tensors: list[GlobalTensor] = []
        self._starts: list[int] = []

    def add(self, name: str, data: np.ndarray, itemsize: int, written: bool, once: bool) -> GlobalTensor:
        """Register a tensor; a second argument over the same bytes shares the first one's history."""
        address = data.__array_interface__["data"][0]
        for known in self.tensors:
            if known.address <= address and address + data.nbytes <= known.end:
                return known
        new = GlobalTensor(name, data, itemsize, written, once, self.machine)
        if data.nbytes:
            place = bisect_right(self._starts, new.address)
            self._starts.insert(place, new.address)
            self.tensors.insert(place, new)
        return new

    def find(self, address: int) -> GlobalTensor:
        """The tensor that holds ``address``."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0 and address < self.tensors[place].end:
            return self.tensors[place]
        near = (
            f"{address - self.tensors[place].end} bytes past {self.tensors[place].name}" if place >= 0 else "below all"
        )
        raise self.machine.fail(Verdict.OUTSIDE, f"address {address:#x} lies in no tensor ({near})")

    def _locate(self, addresses: np.ndarray, itemsize: int) -> tuple[GlobalTensor, np.ndarray]:
        """Tensor and byte offsets of active addresses."""
        low, high = int(addresses.min()), int(addresses.max())
        found = self.find(low)
        if high + itemsize > found.end:
            text = f"an access to {found.name} reaches {high + itemsize - found.end} bytes past its end"
            raise self.machine.fail(Verdict.OUTSIDE, text)
        return found, (addresses - np.uint64(found.address)).astype(np.int64)

    def _record(self, found: GlobalTensor, offsets: np.ndarray, write: bool, atomic: bool) -> None:
        task = self.machine.running
        cells = offsets // found.itemsize
        access = Access(task.number, task.clock.tasks[task.number], 0, write, atomic, True, self.machine.here())
        (found.history.write if write else found.history.read)(cells, access, task.clock)

    def load(
        self, addresses: np.ndarray, mask: np.ndarray, fill: np.ndarray | None, kind: tl.dtype, volatile: bool
    ) -> np.ndarray:
        """Load elements; a volatile load is a strong relaxed one, and lets others run first."""
        if volatile:
            self.machine.pause()
        dtype = np_dtype(kind)
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        out = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
        active = np.broadcast_to(addresses, shape)[np.broadcast_to(mask, shape)]
        if active.size:
            found, offsets = self._locate(active, dtype.itemsize)
            self._record(found, offsets, False, volatile)
            out[np.broadcast_to(mask, shape)] = found.data.view(dtype)[offsets // dtype.itemsize]
            if volatile:
                self._observe(found, offsets)
        return out

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, kind: tl.dtype) -> None:
        """Store elements."""
        dtype = np_dtype(kind)
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        where = np.broadcast_to(mask, shape)
        active = np.broadcast_to(addresses, shape)[where]
        if active.size:
            found, offsets = self._locate(active, dtype.itemsize)
            self._record(found, offsets, True, False)
            found.data.view(dtype)[offsets // dtype.itemsize] = np.broadcast_to(value, shape)[where]
            self._publish(found, offsets, self.machine.running.published)

    def atomic(
        self,
        op: str,
        addresses: np.ndarray,
        value: np.ndarray,
        mask: np.ndarray,
        kind: tl.dtype,
        sem: str,
        compare: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read, modify and write every active element in turn; return what was there."""
        self.machine.pause()
        dtype = np_dtype(kind)
        old = np.zeros(addresses.shape, dtype)
        where = np.broadcast_to(mask, addresses.shape)
        active = addresses[where]
        if not active.size:
            return old
        found, offsets = self._locate(active, dtype.itemsize)
        task = self.machine.running
        if sem in ("ACQUIRE", "ACQUIRE_RELEASE"):
            self._acquire(found, offsets)
        else:
            self._observe(found, offsets)
        self._record(found, offsets, True, True)
        cells = found.data.view(dtype)
        values = np.broadcast_to(value, addresses.shape)[where]
        compares = np.broadcast_to(value if compare is None else compare, addresses.shape)[where]
        before = []
        for at, new, expected in zip(offsets // dtype.itemsize, values, compares, strict=True):
            before.append(cells[at])
            cells[at] = _combine(op, cells[at], new, expected, kind)
        old[where] = before
        releases = sem in ("RELEASE", "ACQUIRE_RELEASE")
        self._publish(found, offsets, task.release() if releases else task.published)
        return old

    def _publish(self, found: GlobalTensor, offsets: np.ndarray, clock: Clock | None) -> None:
        if clock is None:
            return
        for offset in offsets.tolist()[:64]:
            found.released.setdefault(offset, Clock()).join(clock)

    def _acquire(self, found: GlobalTensor, offsets: np.ndarray) -> None:
        for offset in offsets.tolist():
            if offset in found.released:
                self.machine.running.clock.join(found.released[offset])

    def _observe(self, found: GlobalTensor, offsets: np.ndarray) -> None:
        for offset in offsets.tolist():
            if offset in found.released:
                self.machine.running.observed.join(found.released[offset])

    def fence(self) -> None:
        """A memory fence: what relaxed reads saw is known from here on; relaxed writes from here on publish it."""
        task = self.machine.running
        task.clock.join(task.observed)
        task.published = task.release()

    def descriptor(
        self, address: int, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], kind: tl.dtype
    ) -> Descriptor:
        """A TMA descriptor over the tensor at ``address``."""
        return Descriptor(self, self.find(address), address, shape, strides, block, kind)


def _combine(op: str, old: Any, new: Any, expected: Any, kind: tl.dtype) -> Any:
    """The value that an atomic leaves behind."""
    if op == "cas":
        return new if old == expected else old
    if op in ("exch", "xchg"):
        return new
    if op in ("and", "or", "xor"):
        return {"and": old & new, "or": old | new, "xor": old ^ new}[op]
    a, b = (decode(np.asarray(v), kind) if kind.is_floating() else v for v in (old, new))
    result = {"add": lambda: a + b, "fadd": lambda: a + b, "max": lambda: max(a, b), "umax": lambda: max(a, b)}
    result |= {"min": lambda: min(a, b), "umin": lambda: min(a, b)}
    if op not in result:
        raise EmulatorError(Verdict.UNSUPPORTED, f"atomic {op} is not emulated")
    return encode(np.asarray(result[op]()), kind) if kind.is_floating() else result[op]()
