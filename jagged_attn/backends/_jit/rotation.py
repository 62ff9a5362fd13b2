# mypy: allow-untyped-defs
"""Pairs of columns turned by a kernel that reads and writes each element once; PyTorch's own make a dozen passes."""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from .prepared import PreparedKernel

# Pairs that a program holds at a time, a row's cosines and sines among them: 8 a thread, loads of 16 bytes in bf16.
_PAIRS = 1024


@triton.jit(do_not_specialize=["total_rows", "num_heads"])
def _turn(heads, out, rotation, total_rows, num_heads, heads_row, heads_head, out_row, out_head, INVERSE: tl.constexpr,
          HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr):  # fmt: skip
    """All heads of BLOCK_ROWS rows, whose cosines and sines stay in registers."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    ok = (row < total_rows)[:, None] & (column < HALF)
    angle = row[:, None] * HALF + column
    cos = tl.load(rotation + angle, mask=ok, other=0.0)
    sin = tl.load(rotation + tl.cast(total_rows, tl.int64) * HALF + angle, mask=ok, other=0.0)
    if INVERSE:
        sin = -sin
    source = heads + row[:, None] * heads_row + column
    target = out + row[:, None] * out_row + column
    for _ in range(num_heads):
        a = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
        tl.store(target, (a * cos - b * sin).to(out.dtype.element_ty), mask=ok)
        tl.store(target + HALF, (a * sin + b * cos).to(out.dtype.element_ty), mask=ok)
        source += heads_head
        target += out_head


@lru_cache(maxsize=64)
def _prepared(half: int, inverse: bool) -> PreparedKernel:
    block_half = triton.next_power_of_2(half)
    blocks = {"BLOCK_HALF": block_half, "BLOCK_ROWS": max(_PAIRS // block_half, 1)}
    return PreparedKernel(_turn, {"INVERSE": inverse, "HALF": half, **blocks}, {"num_warps": 4})


def turn(heads: Tensor, rotation: Tensor, inverse: bool, out: Tensor) -> None:
    """Write the turned heads into ``out``.

    Args:
        heads: ``[T, H, D]``, fp32, bf16 or fp16, the last stride 1.
        rotation: ``[2, T, D/2]``, fp32, contiguous.
        inverse: turn back.
        out: like ``heads``, with strides of its own, the last 1; no memory in common with them.
    """
    rows, num_heads, dim = heads.shape
    if not heads.numel():
        return
    kernel = _prepared(dim // 2, inverse)
    strides = (*heads.stride()[:2], *out.stride()[:2])
    kernel.launch(-(-rows // kernel.constants["BLOCK_ROWS"]), (heads, out, rotation), (rows, num_heads), strides)
