"""Global memory: the tensors of a launch, checked pointer accesses, atomics, and TMA descriptors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .clocks import Access, Clock
from .errors import EmulatorError, Verdict
from .numerics import decode, encode, np_dtype, raw_data, tensor, unwrap
from .races import History

if TYPE_CHECKING:
    from .machine import Machine, Op

_WRAP = 1 << 64


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


class Box:
    """What one TMA access touches: the tile's valid part and the global elements under it."""

    def __init__(self, tile: tuple[slice, ...], view: np.ndarray, cells: np.ndarray) -> None:
        self.tile = tile
        self.view = view
        self.cells = cells


class Descriptor:
    """A TMA tensor map: base, shape, strides (elements, 64-bit wrap-around) and block."""

    def __init__(
        self,
        memory: GlobalMemory,
        base: GlobalTensor,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        kind: tl.dtype,
    ) -> None:
        self.memory = memory
        self.base = base
        self.address = address
        self.shape = list(shape)
        self.strides = list(strides)
        self.block_shape = list(block)
        self.dtype = kind
        self.handle = self

    def box(self, offsets: Sequence[Any]) -> Box | None:
        """The part of the block at ``offsets`` that lies inside the map; None if there is none."""
        where = [int(unwrap(o)) for o in offsets]
        if len(where) != len(self.shape):
            raise EmulatorError(Verdict.SHAPE, f"{len(where)} coordinates for a map of {len(self.shape)} dimensions")
        first = [max(0, -c) for c in where]
        count = [min(b, s - c) - a for c, s, b, a in zip(where, self.shape, self.block_shape, first, strict=True)]
        if min(count) <= 0:
            return None
        size = np_dtype(self.dtype).itemsize
        start = sum((c + a) * s for c, a, s in zip(where, first, self.strides, strict=True)) * size
        start = (start + self.address - self.base.address) % _WRAP
        start -= _WRAP if start >= _WRAP // 2 else 0
        # The stride of a dimension with one valid index does not matter; in ragged maps it is huge.
        steps = [s * size if n > 1 else 0 for s, n in zip(self.strides, count, strict=True)]
        end = start + sum((n - 1) * s for n, s in zip(count, steps, strict=True)) + size
        if start < 0 or end > self.base.data.nbytes:
            text = f"the block at {where} of {self.base.name} covers bytes {start} to {end} of {self.base.data.nbytes}"
            raise EmulatorError(Verdict.OUTSIDE, text)
        flat = self.base.data[start:].view(np_dtype(self.dtype)) if start % size == 0 else None
        if flat is None:
            raise EmulatorError(Verdict.SHAPE, f"{self.base.name}: misaligned block at {where}")
        view = np.lib.stride_tricks.as_strided(flat, count, steps)
        tile = tuple(slice(a, a + n) for a, n in zip(first, count, strict=True))
        return Box(tile, view, self._cells(start, count, steps))

    def _cells(self, start: int, count: list[int], steps: list[int]) -> np.ndarray:
        offsets = np.zeros((1,), np.int64) + start
        for n, step in zip(count, steps, strict=True):
            offsets = (offsets[:, None] + np.arange(n) * step).reshape(-1)
        return offsets // self.base.itemsize

    def record(self, op: Op, box: Box | None, write: bool, atomic: bool = False, number: int = 0) -> None:
        """Check and record what an operation does to global memory."""
        if box is not None:
            access = Access(0, 0, number or op.number, write, atomic, False, f"{op.where} ({self.base.name})")
            (self.base.history.write if write else self.base.history.read)(box.cells, access, op.clock)

    def reduce(self, box: Box | None, tile: np.ndarray, how: str) -> None:
        """Write or reduce a tile into global memory."""
        if box is None:
            return
        new = tile.reshape(self.block_shape)[box.tile]
        if not how:
            box.view[...] = new
        elif self.dtype.is_floating() and how in ("add", "min", "max"):
            a, b = decode(box.view, self.dtype), decode(new, self.dtype)
            function = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
            box.view[...] = encode(function(a, b), self.dtype)
        else:
            functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
            functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
            box.view[...] = functions[how](box.view, new)

    def fetch(self, box: Box | None, tile: np.ndarray) -> None:
        """Fill a tile: zeros where the map ends."""
        tile[...] = 0
        if box is not None:
            tile.reshape(self.block_shape)[box.tile] = box.view

    # Synchronous forms, which the compiler stages through shared memory of its own.

    def load(self, offsets: Sequence[Any], latency: Any = None) -> tl.tensor:
        """Load a block into registers."""
        machine = self.memory.machine
        box = self.box(offsets)
        out = np.zeros(self.block_shape, np_dtype(self.dtype))
        if box is not None:
            task = machine.running
            access = Access(task.number, task.clock.tasks[task.number], 0, False, False, False, machine.here())
            self.base.history.read(box.cells, access, task.clock)
            out[box.tile] = box.view
        return tensor(out, self.dtype)

    def store(self, offsets: Sequence[Any], value: tl.tensor, store_reduce: Any = "") -> None:
        """Store or reduce a block from registers; it completes some time before the kernel ends."""
        machine, how = self.memory.machine, unwrap(store_reduce)
        box = self.box(offsets)
        op = machine.issue("tma_store", [machine.running.cta], machine.running.clock.copy())
        # The staging buffer is the compiler's, which waits for it: nothing is left to wait for.
        machine.running.cta.issued &= ~(1 << op.number)
        self.record(op, box, True, bool(how))
        tile = np.array(raw_data(value))
        op.action = lambda: self.reduce(box, tile, how)
        machine.submit(op)
        machine.pause()

    def atomic_add(self, offsets: Sequence[Any], value: tl.tensor) -> None:
        """Reduce a block from registers."""
        self.store(offsets, value, "add")
