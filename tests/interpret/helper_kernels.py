"""Kernels that call one device helper each and store what it returns."""

import triton
import triton.language as tl

from jagged_attn.backends._jit.jagged import count_tiles, sequence_rows
from jagged_attn.backends._jit.scores import activate, derivative, key_range, query_range, split_range


@triton.jit
def ranges(out, len_q, len_kv, MASK: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    key_lo, key_hi = key_range(n, len_q, len_kv, MASK)
    query_lo, query_hi = query_range(n, len_q, len_kv, MASK)
    tl.store(out + n, key_lo)
    tl.store(out + BLOCK + n, key_hi)
    tl.store(out + 2 * BLOCK + n, query_lo)
    tl.store(out + 3 * BLOCK + n, query_hi)


@triton.jit
def split(out, first, length, MASK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    first = tl.cast(first, tl.int32)
    last = tl.minimum(first + BLOCK_Q, length) - 1
    lo_first, hi_first = key_range(first, length, length, MASK)
    lo_last, hi_last = key_range(last, length, length, MASK)
    begin, main_begin, main_end, end = split_range(lo_first, hi_first, lo_last, hi_last, BLOCK_KV)
    tl.store(out, begin)
    tl.store(out + 1, main_begin)
    tl.store(out + 2, main_end)
    tl.store(out + 3, end)


@triton.jit
def activation(x, value, slope, ACT: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    x_tile = tl.load(x + n)
    tl.store(value + n, activate(x_tile, ACT, False))
    tl.store(slope + n, derivative(x_tile, ACT, False))


@triton.jit
def bounds(out, offsets, num_sequences, total_rows):
    b = tl.program_id(0)
    start, length = sequence_rows(offsets, b, num_sequences, total_rows)
    tl.store(out + 2 * b, start)
    tl.store(out + 2 * b + 1, length.to(tl.int64))


@triton.jit
def tiles(out, table, max_tiles):
    tl.store(out, count_tiles(table, max_tiles))
