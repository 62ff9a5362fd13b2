# mypy: allow-untyped-defs
"""Cosines and sines of the rows' angles by one kernel; PyTorch's operators launch forty for them."""

import math
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from .prepared import PreparedKernel

# Angles that a program holds at a time: 8 a thread.
_ANGLES = 1024


@triton.jit
def _bounds(row, offsets, total_rows, num_sequences, search_steps):
    """First row and end of the sequence of each row, clamped as in ``row_bounds``; the rows of none come last."""
    # How many sequences end at the row or before it.
    low = tl.zeros_like(row)
    high = low + num_sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_open = low < high
        goes_up = is_open & (tl.load(offsets + middle + 1, mask=is_open, other=0).to(tl.int64) <= row)
        low = tl.where(goes_up, middle + 1, low)
        high = tl.where(goes_up, high, middle)
    start = tl.load(offsets + low, mask=low < num_sequences + (num_sequences > 0), other=0).to(tl.int64)
    end = tl.load(offsets + low + 1, mask=low < num_sequences, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), total_rows)
    return start, tl.where(low < num_sequences, tl.minimum(tl.maximum(end, start), total_rows), total_rows)


@triton.jit
def _time(timestamps, row):
    time = tl.load(timestamps + row)
    return time.to(tl.int64) if timestamps.dtype.element_ty == tl.int32 else time


@triton.jit
def _logarithms(timestamps, row, start, end, total_rows, TIME_SCALE: tl.constexpr, TO_LAST: tl.constexpr):
    """``log(1 + gap / TIME_SCALE)`` of each row, fp32; the difference is one of fp32, fp64 or int64."""
    own = _time(timestamps, tl.minimum(row, total_rows - 1))
    if TO_LAST:
        gap = _time(timestamps, tl.minimum(tl.maximum(end - 1, 0), total_rows - 1)) - own
    else:
        gap = own - _time(timestamps, tl.minimum(tl.maximum(row - 1, start), total_rows - 1))
    # Not a maximum, which would make 0 of NaN.
    gap = tl.where(gap < 0, tl.zeros_like(gap), gap).to(tl.float64)
    # In fp64, where the sum does not lose a small gap; there is no log1p that Triton's interpreter has too.
    return tl.log(1.0 + gap / tl.full([1], TIME_SCALE, tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["total_rows", "num_sequences", "search_steps"])
def _rotate_rows(offsets, timestamps, rotation, total_rows, num_sequences, search_steps, LOG_BASE: tl.constexpr,
                 TIME_SCALE: tl.constexpr, HAS_TIMES: tl.constexpr, TO_LAST: tl.constexpr, SPLIT: tl.constexpr,
                 HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr):  # fmt: skip
    """BLOCK_ROWS rows of ``rotation``."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start, end = _bounds(row, offsets, total_rows, num_sequences, search_steps)
    position = (row - start).to(tl.float32)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    # Columns of the angles of positions, and of those of gaps, which begin anew.
    part: tl.constexpr = HALF // 2 if SPLIT else HALF
    # base^(-j / HALF) = 2^(-j log2(base) / HALF), in fp64: an error of the power grows with the position.
    frequency = (column % part).to(tl.float64) * tl.full([1, 1], -LOG_BASE / HALF, tl.float64)
    frequency = tl.exp2(frequency).to(tl.float32)
    turns = position
    if HAS_TIMES:
        tau = _logarithms(timestamps, row, start, end, total_rows, TIME_SCALE, TO_LAST)[:, None]
        turns = tl.where(column < part, position, tau) if SPLIT else position + tau
    angle = turns * frequency
    ok = (row < total_rows)[:, None] & (column < HALF)
    target = rotation + row[:, None] * HALF + column
    tl.store(target, tl.cos(angle), mask=ok)
    tl.store(target + tl.cast(total_rows, tl.int64) * HALF, tl.sin(angle), mask=ok)


@lru_cache(maxsize=64)
def _prepared(
    half: int, base: float, time_scale: float, has_times: bool, to_last: bool, is_split: bool
) -> PreparedKernel:
    block_half = triton.next_power_of_2(half)
    constants = {
        "LOG_BASE": math.log2(base), "TIME_SCALE": time_scale,
        "HAS_TIMES": has_times, "TO_LAST": to_last, "SPLIT": is_split,
        "HALF": half, "BLOCK_HALF": block_half, "BLOCK_ROWS": max(_ANGLES // block_half, 1),
    }  # fmt: skip
    return PreparedKernel(_rotate_rows, constants, {"num_warps": 4})


def write_rotation(
    offsets: Tensor, timestamps: Tensor | None, rotation: Tensor, base: float, time_scale: float, to_last: bool,
    is_split: bool,
) -> None:  # fmt: skip
    """Write cosines and sines of all rows.

    Args:
        offsets: ``[B + 1]``, or empty for B = 0; int32 or int64, contiguous.
        timestamps: ``[T]``, int32, int64, fp32 or fp64, contiguous; None: angles of positions alone.
        rotation: ``[2, T, D/2]``, fp32, contiguous.
        base: of the frequencies.
        time_scale: unit of the gaps.
        to_last: gaps to the sequence's last row, in place of the one before.
        is_split: half of the frequencies for positions and half for gaps, in place of all for their sum.
    """
    _, rows, half = rotation.shape
    if not rows:
        return
    sequences = max(offsets.numel() - 1, 0)
    kernel = _prepared(half, base, time_scale, timestamps is not None, to_last, is_split and timestamps is not None)
    kernel.launch(
        -(-rows // kernel.constants["BLOCK_ROWS"]),
        (offsets, offsets if timestamps is None else timestamps, rotation),
        (rows, sequences, sequences.bit_length()),
        (),
    )
