"""Shared and tensor memory of a CTA: arenas, allocations, views and aliases.

Views are numpy views of one arena, so aliasing is physical: what one alias writes, the other reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .errors import EmulatorError, Verdict
from .numerics import np_dtype, unwrap
from .parameters import (
    SHARED_BYTES,
    SHARED_CELL,
    TENSOR_CELL_LANES,
    TENSOR_COLUMNS,
    TENSOR_LANES,
    TENSOR_MIN_COLUMNS,
    TENSOR_ROW_BYTES,
    Checks,
)
from .races import History

if TYPE_CHECKING:
    from .machine import Cta

SMEM = "smem"
TMEM = "tmem"
# Distributed shared memory: a view of another CTA's.
CLUSTER = "smemCluster"
# Extra room behind the limit, so that the budget check (which can be off) is not an index error.
_SLACK = 1 << 16
_POISON = 0xFF


def _cell_map(storage: str, size: int) -> np.ndarray:
    """The cell of every byte of an arena."""
    byte = np.arange(size, dtype=np.int32)
    if storage == SMEM:
        return byte // SHARED_CELL
    lane, column = byte // TENSOR_ROW_BYTES, byte % TENSOR_ROW_BYTES // 4
    return lane // TENSOR_CELL_LANES * TENSOR_COLUMNS + column


_MAPS: dict[str, np.ndarray] = {}
_CELLS: dict[tuple[Any, ...], Any] = {}


class Arena:
    """One memory of one CTA: bytes, allocator, history.

    Args:
        storage: ``"smem"`` or ``"tmem"``.
        name: For reports.
        checks: Which checks run.
    """

    def __init__(self, storage: str, name: str, checks: Checks) -> None:
        self.storage = storage
        self.name = name
        self.checks = checks
        self.used = 0
        size = SHARED_BYTES + _SLACK if storage == SMEM else TENSOR_LANES * TENSOR_ROW_BYTES
        self.bytes = np.full(size, _POISON, np.uint8)
        self.base = self.bytes.__array_interface__["data"][0]
        if storage not in _MAPS:
            _MAPS[storage] = _cell_map(storage, size)
        cells = int(_MAPS[storage].max()) + 1
        self.history = History(name, cells, written=False, proxies=storage == SMEM, checks=checks)

    def allocate(self, amount: int, align: int = 128) -> int:
        """Reserve bytes (shared) or columns (tensor) and return the offset; past the limit, a BUDGET report."""
        if self.storage == SMEM:
            offset = -(-self.used // align) * align
            limit, unit = SHARED_BYTES, "bytes of shared memory"
        else:
            offset, limit, unit = self.used, TENSOR_COLUMNS, "columns of tensor memory"
        self.used = offset + amount
        if self.used > limit and (self.checks.budgets or self.storage == TMEM):
            raise EmulatorError(Verdict.BUDGET, f"{self.used} {unit} asked for, {limit} exist")
        return offset

    @property
    def columns(self) -> int:
        """Columns that a tcgen05 allocation takes for what is used: a power of two."""
        return 0 if not self.used else max(TENSOR_MIN_COLUMNS, 1 << (self.used - 1).bit_length())

    def cells(self, view: np.ndarray) -> Any:
        """The cells under a view, as a slice where they are contiguous."""
        offset = view.__array_interface__["data"][0] - self.base
        # A transposed view covers the same bytes.
        dims = sorted(zip(view.strides, view.shape, strict=True), reverse=True)
        key = (self.storage, offset, tuple(dims), view.itemsize)
        if key not in _CELLS:
            _CELLS[key] = self._find_cells(offset, dims, view.itemsize)
        return _CELLS[key]

    def _find_cells(self, offset: int, dims: list[tuple[int, int]], itemsize: int) -> Any:
        table = _MAPS[self.storage][offset:]
        shape = (*(n for _, n in dims), itemsize)
        strides = (*(4 * s for s, _ in dims), 4)
        found = np.unique(np.lib.stride_tricks.as_strided(table, shape, strides))
        if found[-1] - found[0] + 1 == len(found):
            return slice(int(found[0]), int(found[-1]) + 1)
        return found


class Buffer:
    """An allocation of ``num`` tiles (``data`` is None), or a view of one.

    Args:
        cta: Whose memory.
        storage: ``"smem"`` or ``"tmem"``.
        dtype: Triton element type.
        shape: Shape of a tile.
        name: For reports.
        num: Number of tiles of an allocation.
        unit: Bytes (shared) or columns (tensor) of a tile.
        data: The view.
    """

    def __init__(
        self,
        cta: Cta,
        storage: str,
        dtype: tl.dtype,
        shape: list[int],
        name: str,
        num: int = 0,
        unit: int = 0,
        data: np.ndarray | None = None,
    ) -> None:
        self.cta = cta
        self.storage = storage
        self.dtype = dtype
        self.tile_shape = shape
        self.name = name
        self.num = num
        self.unit = unit
        self.view_data = data
        self.alias: AliasSpec | None = None
        # Tile i lies at offset + i // group * stride + i % group * unit.
        self.offset = 0
        self.group = 1
        self.stride = unit

    @property
    def shape(self) -> list[int]:
        """Shape of the view, or of one tile."""
        if self.view_data is None or self.halved:
            return self.tile_shape
        return list(self.view_data.shape)

    @property
    def halved(self) -> bool:
        """A tile of 64 rows of a pair of CTAs: its left half lies in lanes 0 to 63, its right half in 64 to 127."""
        pair = self.storage == TMEM and self.tile_shape[0] < TENSOR_LANES and len(self.cta.cluster) > 1
        return pair and (self.view_data is None or self.view_data.ndim == 3)

    @property
    def type(self) -> Buffer:
        """Kernels ask ``buffer.type.shape``; the emulator keeps no separate type."""
        return self

    @property
    def data(self) -> np.ndarray:
        """The numpy view; an allocation has to be indexed first."""
        if self.view_data is None:
            if self.num == 1:
                return self[0].data
            raise EmulatorError(Verdict.SHAPE, f"{self.name} holds {self.num} tiles: index it first")
        return self.view_data

    @property
    def arena(self) -> Arena:
        """The memory it lies in."""
        return self.cta.arenas[self.storage]

    @property
    def nbytes(self) -> int:
        """Bytes of the view."""
        return self.data.nbytes

    def view(self, data: np.ndarray, dtype: tl.dtype | None = None, name: str = "") -> Buffer:
        """Another view of the same memory."""
        shape = self.tile_shape if data.ndim == 3 and self.halved else list(data.shape)
        return Buffer(self.cta, self.storage, dtype or self.dtype, shape, name or self.name, data=data)

    def __getitem__(self, index: Any) -> Buffer:
        i = int(unwrap(index))
        if self.view_data is not None:
            return self.view(self.view_data[i], name=f"{self.name}[{i}]")
        if not 0 <= i < self.num:
            raise EmulatorError(Verdict.OUTSIDE, f"tile {i} of {self.name}, which has {self.num}")
        if self.alias is not None:
            self.alias.settle()
        at = self.offset + i // self.group * self.stride + i % self.group * self.unit
        return self.view(self._tile(at), name=f"{self.name}[{i}]")

    def _tile(self, at: int) -> np.ndarray:
        kind = np_dtype(self.dtype)
        if self.storage == SMEM:
            return self.arena.bytes[at : at + self.unit].view(kind).reshape(self.tile_shape)
        rows, columns = self.tile_shape
        words = self.arena.bytes.reshape(TENSOR_LANES, TENSOR_ROW_BYTES)
        if self.halved:
            # Rows, halves, columns of a half.
            return words[:, 4 * at : 4 * (at + self.unit)].view(kind).reshape(2, rows, columns // 2).swapaxes(0, 1)
        return words[:rows, 4 * at : 4 * (at + self.unit)].view(kind)[:, :columns]

    def at(self, cta: Cta) -> Buffer:
        """The same bytes in another CTA of the cluster."""
        if cta is self.cta:
            return self
        mine, theirs = self.arena, cta.arenas[self.storage]
        offset = self.data.__array_interface__["data"][0] - mine.base
        data: np.ndarray = np.ndarray(self.data.shape, self.data.dtype, theirs.bytes, offset, self.data.strides)
        return Buffer(cta, self.storage, self.dtype, self.shape, f"{self.name} of {cta.name}", data=data)


class ReuseGroup:
    """A node of an overlap tree: its elements share bytes, or lie side by side."""

    def __init__(self, *elements: Any, group_type: str = "shared", group_size: Any = 1) -> None:
        self.elements = elements
        self.kind = group_type
        self.size = int(unwrap(group_size))


class AliasSpec:
    """A backing store that several allocations share.

    Args:
        storage: ``"smem"`` or ``"tmem"``.
        size: Declared bytes, or None to grow to what is needed.
    """

    def __init__(self, storage: str, size: int | None) -> None:
        self.storage = storage
        self.size = size
        self.buffers: list[Buffer] = []
        self.settled = False

    def set_buffer_overlap(self, tree: ReuseGroup) -> None:
        """Lay the allocations out as ``tree`` says."""
        period = self._extent(tree)
        base = self._reserve(period * self._periods(tree, 1))
        self._place(tree, base, 1, period)
        self.settled = True

    def settle(self) -> None:
        """Without an overlap tree, all allocations begin at the same byte."""
        if self.settled:
            return
        base = self._reserve(max(b.unit * b.num for b in self.buffers))
        for buffer in self.buffers:
            buffer.offset = base
        self.settled = True

    def _reserve(self, amount: int) -> int:
        limit = self.size if self.storage == SMEM or self.size is None else self.size // (4 * TENSOR_LANES)
        if limit is not None and amount > limit:
            raise EmulatorError(Verdict.ALIAS, f"a storage_alias_spec of {limit} is asked to hold {amount}")
        return self.buffers[0].arena.allocate(max(amount, limit or 0))

    def _extent(self, node: Any) -> int:
        if isinstance(node, Buffer):
            return node.unit
        sizes = [self._extent(e) * node.size for e in node.elements]
        return max(sizes) if node.kind == "shared" else sum(sizes)

    def _periods(self, node: Any, group: int) -> int:
        if isinstance(node, Buffer):
            return -(-node.num // group)
        return max(self._periods(e, group * node.size) for e in node.elements)

    def _place(self, node: Any, offset: int, group: int, period: int) -> None:
        if isinstance(node, Buffer):
            node.offset, node.group, node.stride = offset, group, period
            return
        for element in node.elements:
            self._place(element, offset, group * node.size, period)
            if node.kind == "distinct":
                offset += self._extent(element) * node.size
