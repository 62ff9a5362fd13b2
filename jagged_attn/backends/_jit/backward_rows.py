# mypy: allow-untyped-defs
"""What the TLX backwards share: row statistics, the sum of dQ, work items of key tiles, and the masks of their tiles.

``prepare_backward`` lays out what the softmax needs a query row; ``finish_dq`` rounds the fp32 sum of dQ. ``key_item``
counts the tiles of a work item for all roles of a kernel between them.
"""

import triton
import triton.language as tl

from .jagged import partner_rows, sequence_rows
from .scores import LOG2E, mask_kind, mask_opens, query_range


@triton.jit
def first_block(start, b, BLOCK: tl.constexpr):
    """Number of the first row block of sequence ``b`` in the row statistics.

    Sequences are padded to whole blocks, so that a block is one aligned copy. This leaves each sequence, empty ones
    too, at least one block more than its whole blocks; blocks in between are padding.
    """
    return (start.to(tl.int64) + b.to(tl.int64) * BLOCK) // BLOCK


@triton.jit
def _sequence_of_block(block, offsets_q, num_sequences, total_q, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr = 128):
    """The sequence, or B for the rows of none, to which a block of the row statistics belongs.

    AT_ONCE sequences are tried together: reads that wait for one another took longer than all else in the kernel.
    """
    first = num_sequences * 0
    number = num_sequences + 1
    while number > 1:
        step = (number + AT_ONCE - 1) // AT_ONCE
        b = first + tl.arange(0, AT_ONCE) * step
        ok = b < first + number
        start = tl.load(offsets_q + b, mask=ok, other=0).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), total_q)
        before = tl.sum((ok & (first_block(start, b, BLOCK) <= block)).to(tl.int32), 0)
        steps = tl.maximum(before - 1, 0) * step
        first += steps
        number = tl.minimum(number - steps, step)
    return first


@triton.jit(do_not_specialize=["num_sequences", "total_q"])
def prepare_backward(dout, out, lse, stats, counters, offsets_q, num_sequences, total_q, dout_row, inverse_out_scale,
                     H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, COUNTERS: tl.constexpr):  # fmt: skip
    """Zero the counters; write each query row's lse (base 2) and delta / out_scale, for the softmax.

    One program for each block and head of ``stats [blocks, H, 2, BM]``. Rows past the end of a sequence, and rows that
    see no key, get lse = +inf and delta = 0: their scores' exponentials are 0 whatever the score.
    """
    head = tl.program_id(0) % H
    block = tl.program_id(0) // H
    if tl.program_id(0) == 0:
        tl.store(counters + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    b = _sequence_of_block(block, offsets_q, num_sequences, total_q, BM)
    start, length = sequence_rows(offsets_q, b, num_sequences, total_q)
    in_sequence = (block - first_block(start, b, BM)) * BM + tl.arange(0, BM)
    # Rows of no sequence have no keys.
    row_ok = (in_sequence >= 0) & (in_sequence < length) & (b < num_sequences)
    rows = start + in_sequence
    columns = tl.arange(0, D)[None, :]
    dout_tile = tl.load(dout + (rows * dout_row + head * D)[:, None] + columns, mask=row_ok[:, None], other=0.0)
    out_tile = tl.load(out + ((rows * H + head) * D)[:, None] + columns, mask=row_ok[:, None], other=0.0)
    delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1) * inverse_out_scale
    row_lse = tl.load(lse + rows * H + head, mask=row_ok, other=float("inf")) * LOG2E
    seen = row_lse != float("-inf")
    to = stats + (block.to(tl.int64) * H + head) * (2 * BM) + tl.arange(0, BM)
    tl.store(to, tl.where(seen, row_lse, float("inf")))
    tl.store(to + BM, tl.where(seen, delta, 0.0))


@triton.jit(do_not_specialize=["total_q"])
def finish_dq(dq_sum, dq, total_q, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """dQ from its fp32 sum; both have ``total_q`` rows of WIDTH numbers."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = index < tl.cast(total_q, tl.int64) * WIDTH
    total = tl.load(dq_sum + index, mask=ok, other=0.0)
    tl.store(dq + index, (total * factor).to(dq.dtype.element_ty), mask=ok)


@triton.jit
def entry_of(item, items, table, HEADS: tl.constexpr):
    """Sequence and first row of a work item; the sequence is -1 past the last, where the table's entries are, too."""
    entry = table + 2 * (item // HEADS)
    named = item < items
    return tl.load(entry, mask=named, other=-1), tl.load(entry + 1, mask=named, other=0)


@triton.jit
def key_item(item, items, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv, KV_HEADS: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Where the rows of a work item are, and which queries see its keys.

    Returns:
        Key head; start and rows of the queries, the first that the keys visit, and the tiles of them a head, which is
        the one count that all roles agree on; start and rows of the keys, and the first of the tile. There is at least
        one tile, which may hold nothing: sums of no tiles would need branches around products in flight. Past the last
        item there is none.
    """
    b, first_key = entry_of(item, items, table, KV_HEADS)
    sequence = tl.maximum(b, 0)
    start_q, len_q = partner_rows(offsets_q, sequence, num_sequences, total_q)
    start_kv, len_kv = sequence_rows(offsets_kv, sequence, num_sequences, total_kv)
    begin = len_q * 0
    end = len_q
    if mask_kind(MASK) != "full":
        begin, _ = query_range(first_key, len_q, len_kv, MASK)
        begin = begin // BM * BM
        _, end = query_range(tl.minimum(first_key + BN, len_kv) - 1, len_q, len_kv, MASK)
    tiles = tl.where(b < 0, 0, tl.maximum((end - begin + BM - 1) // BM, 1))
    # The block of the row statistics, too: it needs the sequence's number.
    block = first_block(start_q, sequence, BM) + begin // BM
    return (
        item % KV_HEADS, start_q.to(tl.int32), len_q, begin, tiles, start_kv.to(tl.int32), len_kv, first_key,
        block.to(tl.int32),
    )  # fmt: skip


@triton.jit
def query_ranges(first_key, len_q, len_kv, KEYS: tl.constexpr, MASK: tl.constexpr):
    """The queries ``[lo, hi)`` that see each of some keys, and ``[all_lo, all_hi)``, which see all of them."""
    lo, hi = query_range(first_key + tl.arange(0, KEYS), len_q, len_kv, MASK)
    all_lo, _ = query_range(first_key + (KEYS - 1), len_q, len_kv, MASK)
    _, all_hi = query_range(first_key, len_q, len_kv, MASK)
    return lo, hi, all_lo, all_hi


@triton.jit
def masked(x, first, lo, hi, AXIS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """``x``, 0 where an index on one side, ``first`` and the BLOCK - 1 next along AXIS, is not in a range ``[lo, hi)``.

    SIDE 0: ranges of keys; 1: of queries. Ends that are the sequence's need no test.
    """
    i = tl.expand_dims(first + tl.arange(0, BLOCK), 1 - AXIS)
    if not mask_opens(MASK, SIDE):
        x = tl.where(i >= tl.expand_dims(lo, AXIS), x, 0.0)
    if not mask_opens(MASK, 1 - SIDE):
        x = tl.where(i < tl.expand_dims(hi, AXIS), x, 0.0)
    return x


@triton.jit
def query_head(trip, kv_head, tiles, GROUP: tl.constexpr):
    """Query head of the ``trip``-th query tile of a work item: head by head, each from its first tile on."""
    if GROUP == 1:
        return kv_head
    else:
        return kv_head * GROUP + trip // tiles


@triton.jit
def first_query_of(trip, begin, tiles, GROUP: tl.constexpr, BM: tl.constexpr):
    """First row of the ``trip``-th query tile."""
    if GROUP == 1:
        return begin + trip * BM
    else:
        return begin + trip % tiles * BM
