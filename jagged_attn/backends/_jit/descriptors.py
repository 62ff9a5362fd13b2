"""TMA maps of jagged tensors."""

from collections.abc import Hashable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16
# Extents of a ragged map, as in ``triton.tools.ragged_tma``: rows are addressed backwards from 2**30 through two more
# dimensions, whose strides cancel modulo 2**64. See ``rings.ragged``.
_EXTENT = 2**30
_OUTER = 0x7FFF0000
_WRAP = 2**34


class _Map(TensorDescriptor):
    """A descriptor that is right by construction: the checks of its base class cost more than a launch.

    Padding is by 0, and no element is rounded, as the base class has it.
    """

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape

    @property
    def key(self) -> tuple[Hashable, ...]:
        """All that the map, once encoded, depends on beside dtype and block, which a kernel is compiled for."""
        return (self.base.data_ptr(), *self.shape, *self.strides)


class _RaggedMap(TensorDescriptor):
    """What ``ragged_map`` returns. Its numbers are made when asked for, which a launch that remembers it does not."""

    def __init__(self, base: Tensor, block_rows: int, block_columns: int) -> None:
        self.base = base
        self._block = (block_rows, block_columns)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``_Map.key``."""
        base = self.base
        return (base.data_ptr(), base.shape, base.stride())

    @property
    def shape(self) -> list[int]:
        """Of the map."""
        *_, heads, dim = self.base.shape
        return [_OUTER, _OUTER, _EXTENT, heads * dim]

    @property
    def strides(self) -> list[int]:
        """Of the map, in elements."""
        row = self.base.stride(-3)
        return [_WRAP - row, row, row, 1]

    @property
    def block_shape(self) -> list[int]:
        """Of the tiles."""
        return [1, 1, *self._block]


def for_tma(x: Tensor) -> Tensor:
    """``x [rows, heads, D]`` itself if TMA can address it as a matrix of heads side by side, else a contiguous copy.

    TMA needs a base and a row stride that are multiples of 16 bytes. The heads of a row have to lie side by side;
    views of a fused projection do, tensors with the heads first do not.
    """
    (_, heads, dim), (row, head, column) = x.shape, x.stride()
    side_by_side = column == 1 and head == dim and row >= head * heads
    if side_by_side and row * x.element_size() % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def ragged_map(x: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A map of ``x [rows, heads, D]``, for tiles that end with their sequence.

    Coordinates are those of ``rings.ragged``; the column counts over all heads. ``x`` is what ``for_tma`` returned, or
    contiguous, with any dimensions before its heads; it has a row, and fewer than 2**30.
    """
    return _RaggedMap(x, block_rows, block_columns)


def matrix_map(x: Tensor, rows: int, columns: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A plain map of ``x``, whose rows are ``x.stride(0)`` apart, as ``[rows, columns]``."""
    return _Map(x, [rows, columns], [x.stride(0), 1], [block_rows, block_columns])
