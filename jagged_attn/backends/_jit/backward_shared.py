# mypy: allow-untyped-defs
"""What the TLX broadcast-Q backwards share: chunks of key tiles, the statistics of the queries' rows, the sum of dQ.

A CTA has one head for its whole life and takes its key tiles in chunks: runs of entries of the tile table, handed out
by a counter for each head, or dealt out in turn if dQ has to repeat bit for bit. Each CTA's dQ is a part, which
``reduce_parts`` adds up in a fixed order.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jagged import count_tiles, sequence_rows
from .rings import publish
from .scores import LOG2E, activate, derivative


@triton.jit
def key_run(table, offsets, tile, end, num_sequences, total_kv, KEYS: tl.constexpr):
    """The tiles of one sequence that begin with entry ``tile`` of the table and end with the sequence or at ``end``.

    Returns:
        ``b, start, rows, keys, first, tiles``: the sequence; its first row and its rows, which are stored; how many of
        them are read: none of the rows that belong to no sequence; the first tile's row in it; the number of tiles, 0
        from ``end`` on.
    """
    named = tile < end
    b = tl.load(table + 2 * tile, mask=named, other=0)
    first = tl.load(table + 2 * tile + 1, mask=named, other=0)
    start, rows = sequence_rows(offsets, b, num_sequences, total_kv)
    keys = tl.where(b < num_sequences, rows, 0)
    tiles = tl.minimum(tl.cdiv(rows - first, KEYS), end - tile)
    # Offsets that changed since the table was made must not make a loop endless.
    return b, start.to(tl.int32), rows, keys, first, tl.where(named, tl.maximum(tiles, 1), 0)


@triton.jit
def publish_chunk(control, chunk_full, chunk_empty, turn, chunk, entries, chunk_tiles, H: tl.constexpr):
    """Hand a chunk, or the end, to the groups, and return its entries ``[tile, end)``."""
    tile = chunk * chunk_tiles
    publish(control + H + 1, chunk_full, chunk_empty, turn, (tl.where(tile < entries, chunk, -1),), 1)
    return tile, tl.minimum(tile + chunk_tiles, entries)


@triton.jit
def following_chunk(
    control, chunk_full, chunk_empty, turn, chunk, tile, end, entries, chunk_tiles, H: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """The state of the load role after the entries before ``tile``: in the same chunk, or at the head of a new one."""
    if tile >= end:
        parts = tl.num_programs(0) // H
        if DYNAMIC:
            chunk = parts + tl.atomic_add(control + tl.program_id(0) % H, 1)
        else:
            chunk += parts
        turn += 1
        tile, end = publish_chunk(control, chunk_full, chunk_empty, turn, chunk, entries, chunk_tiles, H)
    return turn, chunk, tile, end


@triton.jit
def weights(s, row_lse, scale, ACT: tl.constexpr, FAST_TANH: tl.constexpr):
    """P, and what dP has to be multiplied by, from Q K^T; ``scale`` goes with base 2 for softmax."""
    if ACT == "softmax":
        # Never above 1 but for rounding, save for keys that do not exist, where it could overflow.
        p = tl.math.exp2(tl.minimum(s * scale - row_lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
        return p, p
    else:
        return activate(s * scale, ACT, FAST_TANH), derivative(s * scale, ACT, FAST_TANH)


@triton.jit
def statistics(stats, b, head, H: tl.constexpr, ROWS: tl.constexpr):
    """Where lse and, ROWS further, delta of a sequence and head begin."""
    return stats + (b.to(tl.int64) * H + head) * (2 * ROWS)


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "max_tiles", "do_row"])
def prepare_shared(
    do, out, lse, stats, table, control, num_sequences, num_queries, max_tiles, do_row, scale,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Set the counters to 0, count the table's entries, and write what softmax needs: ``stats [B + 1, H, 2, ROWS]``.

    They are lse in base 2 and ``scale * rowsum(dO * O)``. Where there is no query or no key, lse is inf and the sum 0:
    P = 0. Entry B is for the rows that belong to no sequence. One program for BLOCK rows of ROWS, head and entry; a
    single one for element-wise activations.
    """
    program = tl.program_id(0)
    if program == 0:
        for h in range(H):
            tl.store(control + h, 0)
        tl.store(control + H, count_tiles(table, max_tiles))
    if ACT == "softmax":
        blocks: tl.constexpr = ROWS // BLOCK
        i = program % blocks * BLOCK + tl.arange(0, BLOCK)
        head = program // blocks % H
        b = program // blocks // H
        ok = (i < num_queries) & (b < num_sequences)
        rows = b.to(tl.int64) * num_queries + i
        # A multiple of 16 bytes, as TMA needs it; unless this is said, single elements are loaded.
        do_row = do_row // 8 * 8
        d = tl.arange(0, D)[None, :]
        do_tile = tl.load(do + rows[:, None] * do_row + head * D + d, mask=ok[:, None], other=0.0)
        out_tile = tl.load(out + (rows[:, None] * H + head) * D + d, mask=ok[:, None], other=0.0)
        delta = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1) * scale
        row_lse = tl.load(lse + rows * H + head, mask=ok, other=float("inf"))
        row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2E)
        row_stats = statistics(stats, b, head, H, ROWS)
        tl.store(row_stats + i, row_lse)
        tl.store(row_stats + ROWS + i, delta)


@triton.jit(do_not_specialize=["num_parts", "num_queries"])
def reduce_parts(
    parts, dq, num_parts, num_queries,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dq [S, H, D] = sum of parts [num_parts, H, ROWS, D]``, PARTS at a time; always in the same order.

    TRANSPOSED: parts are ``[num_parts, H, D, ROWS]``. One program for BLOCK elements of a head.
    """
    head = tl.program_id(0) % H
    n = tl.program_id(0) // H * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_parts, PARTS):
        p = first + tl.arange(0, PARTS)
        elements = (p[:, None].to(tl.int64) * H + head) * (ROWS * D) + n[None, :]
        total += tl.sum(tl.load(parts + elements, mask=(p < num_parts)[:, None], other=0.0), 0)
    if TRANSPOSED:
        i, d = n % ROWS, n // ROWS
    else:
        i, d = n // D, n % D
    tl.store(dq + (i * H + head) * D + d, total.to(dq.dtype.element_ty), mask=i < num_queries)


def by_parts(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]], most: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *more: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``backward`` for ``most`` of the shared queries at a time: repeatable, at the price of K and V read each time."""
    dq = q.new_empty(q.shape)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for first in range(0, q.shape[0], most):
        rows = slice(first, first + most)
        dq[rows], dk_part, dv_part = backward(
            dout[:, rows], q[rows], k, v, out[:, rows].contiguous(), lse[:, rows].contiguous(), *more
        )
        dk += dk_part
        dv += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def split_chunks(max_tiles: int, heads: int, processors: int, most: int) -> tuple[int, int]:
    """CTAs of each head, and entries of a chunk: at most so many, and fewer where the whole table has few."""
    parts = max(processors // heads, 1)
    chunk_tiles = min(most, max(max_tiles // (4 * parts), 1))
    return min(parts, -(-max_tiles // chunk_tiles)), chunk_tiles
