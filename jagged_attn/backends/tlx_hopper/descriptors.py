"""TMA maps of jagged tensors."""

import torch
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16


def for_tma(x: Tensor) -> Tensor:
    """``x [rows, heads, D]`` itself if TMA can address it as a matrix of heads side by side, else a contiguous copy.

    TMA needs a base and a row stride that are multiples of 16 bytes. The heads of a row have to lie side by side;
    views of a fused projection do, tensors with the heads first do not.
    """
    rows_ok = x.stride(0) * x.element_size() % _ALIGNMENT == 0 and x.stride(0) >= x.shape[1] * x.shape[2]
    heads_ok = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if rows_ok and heads_ok and x.data_ptr() % _ALIGNMENT == 0:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def ragged_descriptor(x: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A map of ``x [rows, heads, D]``, which ``for_tma`` returned, for tiles that end with their sequence.

    Coordinates are those of ``_jit.rings.ragged``; the column counts over all heads.
    """
    matrix = x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
    return create_ragged_descriptor(matrix, [block_rows, block_columns])
