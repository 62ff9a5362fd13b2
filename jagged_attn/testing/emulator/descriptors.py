"""TMA descriptors: which global elements a block touches, loads, stores and reductions through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .clocks import Access
from .errors import EmulatorError, Verdict
from .numerics import decode, encode, np_dtype, raw_data, tensor, unwrap

if TYPE_CHECKING:
    from .global_memory import GlobalMemory, GlobalTensor
    from .machine import Op

_WRAP = 1 << 64


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


class DescriptorSlots:
    """Where a kernel keeps descriptors that it makes: ``tlx.allocate_tensor_descriptor``."""

    def __init__(self, made: list[Descriptor | None], first: int = 0) -> None:
        self._made = made
        self._first = first

    def __getitem__(self, index: Any) -> DescriptorSlots:
        return DescriptorSlots(self._made, self._first + int(unwrap(index)))

    def put(self, desc: Descriptor) -> None:
        """Keep a descriptor."""
        self._made[self._first] = desc

    def get(self) -> Descriptor:
        """The descriptor kept here."""
        found = self._made[self._first]
        if found is None:
            raise EmulatorError(Verdict.UNWRITTEN, "a tensor descriptor is used before it is made")
        return found
