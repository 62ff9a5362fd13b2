"""Cosines and sines of rows' angles, of their positions and time gaps: the formula, and one kernel in its place.

PyTorch's operators launch some forty kernels for one event tower, each for a few bytes a row. The formula is for CPUs,
float64, compilers and whatever else wants operators that it knows.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .autograd import is_plain
from .layout import row_bounds
from .rotation import has_kernel

Gap = Literal["previous", "to_last"]
Combine = Literal["sum", "split"]
Bounds = tuple[Tensor, Tensor]


class Angles(NamedTuple):
    """What ``RotaryTemporalEmbedding`` is told; its docstring says what each means."""

    head_dim: int
    base: float
    time_scale: float
    gap: Gap
    combine: Combine


def rotation_of(
    values: Tensor, offsets: Tensor, timestamps: Tensor | None, angles: Angles, bounds: Bounds | None = None
) -> Tensor:
    """Cosines and sines of the angles of rows; the arguments are taken as checked.

    Args:
        values: ``[T, ...]``, for its dtype and device.
        offsets: ``[B + 1]``.
        timestamps: ``[T]``, or None.
        angles: the options.
        bounds: ``bounds_of_rows``, if they are known already.

    Returns:
        ``[2, T, D/2]``, fp32, or float64 for float64 values.
    """
    if _takes_kernel(values, offsets, timestamps):
        from .backends._jit.angles import write_rotation

        rotation = values.new_empty(2, values.shape[0], angles.head_dim // 2, dtype=torch.float32)
        times = None if timestamps is None else timestamps.contiguous()
        options = (angles.base, angles.time_scale, angles.gap == "to_last", angles.combine == "split")
        write_rotation(offsets.contiguous(), times, rotation, *options)
        return rotation
    return _formula(values, timestamps, angles, bounds or bounds_of_rows(offsets, values.shape[0]))


def _takes_kernel(values: Tensor, offsets: Tensor, timestamps: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or values.dtype == torch.float64 or not is_plain(values, offsets):
        return False
    if timestamps is not None and (not is_plain(timestamps) or timestamps.requires_grad):
        return False
    return has_kernel(values.device)


def _formula(values: Tensor, timestamps: Tensor | None, angles: Angles, bounds: Bounds) -> Tensor:
    (starts, ends), head_dim = bounds, angles.head_dim
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    position = (torch.arange(values.shape[0], device=values.device) - starts).to(dtype)
    # ω_j = base^(-2j / D)
    frequency = angles.base ** (torch.arange(0, head_dim, 2, device=values.device, dtype=dtype) / -head_dim)
    if timestamps is None:
        angle = position[:, None] * frequency
    else:
        tau = torch.log1p(_gaps(timestamps, starts, ends, angles.gap).to(dtype) / angles.time_scale)
        if angles.combine == "sum":
            angle = (position + tau)[:, None] * frequency
        else:
            low = frequency[: head_dim // 4]
            angle = torch.cat([position[:, None] * low, tau[:, None] * low], dim=1)
    return torch.stack([angle.cos(), angle.sin()])


def bounds_of_rows(offsets: Tensor, rows: int) -> Bounds:
    """First row and end of the sequence that each row belongs to, ``[T]`` int64; without padding, without waiting.

    Rows after the last sequence form one of their own.
    """
    starts, ends = row_bounds(offsets, rows)
    index = torch.arange(rows, device=offsets.device)
    sequence = torch.searchsorted(ends, index, right=True)
    rest = ends[-1:] if ends.numel() else ends.new_zeros(1)
    return torch.cat([starts, rest])[sequence], torch.cat([ends, ends.new_full((1,), rows)])[sequence]


def _gaps(timestamps: Tensor, starts: Tensor, ends: Tensor, gap: Gap) -> Tensor:
    """``[T]``, at least 0, in the dtype of the timestamps; those of integers in int64."""
    timestamps = timestamps.long() if timestamps.dtype == torch.int32 else timestamps
    if gap == "to_last":
        other, first = ends - 1, timestamps
        return (timestamps[other] - first).clamp_min(0)
    index = torch.arange(timestamps.shape[0], device=timestamps.device)
    return (timestamps - timestamps[torch.maximum(index - 1, starts)]).clamp_min(0)
