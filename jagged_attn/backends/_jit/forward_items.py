# mypy: allow-untyped-defs
"""What the TLX forwards share: the look-up of a work item, its hand-over, and its division by the mask."""

import triton
import triton.language as tl

from .jagged import partner_rows, sequence_rows
from .scores import key_range


@triton.jit
def _entry_and_head(item, where, H: tl.constexpr, RUN: tl.constexpr):
    """Which entry of the table and which head an item is.

    Items are numbered by RUN entries of the table that follow one another, in these by head and tile of the shared
    queries, then by entry.
    """
    query_tiles = where[7]
    return item // (H * query_tiles * RUN) * RUN + item % RUN, item // (query_tiles * RUN) % H


@triton.jit
def run_goes_on(item, where, H: tl.constexpr, RUN: tl.constexpr):
    """Whether another item follows in an item's run; the entries of -1, the table's last, are none."""
    if RUN == 1:
        return False
    else:
        table, max_entries = where[0], where[3]
        entry, _ = _entry_and_head(item + 1, where, H, RUN)
        named = ((item + 1) % RUN != 0) & (entry < max_entries)
        return tl.load(table + 2 * entry, mask=named, other=-1) >= 0


@triton.jit
def find_tile(item, where, H: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
              BROADCAST_Q: tl.constexpr, RUN: tl.constexpr = 1):  # fmt: skip
    """Where the rows of a work item are, and which keys it sees.

    Args:
        item: its number.
        where: table, offsets of the queries and of the keys, entries of the table, B, T_q (or S with BROADCAST_Q),
            T_kv, and the items of a head and entry.
        H: heads.
        BN: keys of a block.
        ROWS: query rows of an item.
        MASK: code of the mask.
        BROADCAST_Q: whether all sequences share the queries.
        RUN: entries of the table that follow one another for one head before the next; 1 with BROADCAST_Q.

    Returns:
        Head; start in out (and in q, but with BROADCAST_Q, where that is 0), rows and first row of the queries; start
        and rows of the keys; first key seen and number of blocks of BN keys from there on: the one count that all roles
        agree on, at least 1 for an item and 0 past the last.
    """
    table, offsets_q, offsets_kv, max_entries, num_sequences, num_queries, total_kv, query_tiles = where
    entry, head = _entry_and_head(item, where, H, RUN)
    named = entry < max_entries
    b = tl.load(table + 2 * entry, mask=named, other=-1)
    first_row = tl.load(table + 2 * entry + 1, mask=named, other=0)
    sequence = tl.maximum(b, 0)
    if BROADCAST_Q:
        start_kv, len_kv = sequence_rows(offsets_kv, sequence, num_sequences, total_kv)
        start_out = b * num_queries
        len_q = num_queries
        first_row = item % query_tiles * ROWS
        # The keys of no sequence are no one's to attend to; their entry is the last.
        ended = (b < 0) | (b >= num_sequences)
    else:
        start, len_q = sequence_rows(offsets_q, sequence, num_sequences, num_queries)
        start_kv, len_kv = partner_rows(offsets_kv, sequence, num_sequences, total_kv)
        start_out = start.to(tl.int32)
        ended = b < 0
    lo, _ = key_range(first_row, len_q, len_kv, MASK)
    _, hi = key_range(tl.minimum(first_row + ROWS, len_q) - 1, len_q, len_kv, MASK)
    blocks = tl.where(ended, 0, tl.maximum(tl.cdiv(hi - lo, BN), 1))
    return head, start_out, len_q, first_row, start_kv.to(tl.int32), len_kv, lo, blocks


@triton.jit
def unmasked_blocks(first_row, len_q, len_kv, lo, blocks,
                    BN: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """The blocks ``[begin, end)`` before the last one that all rows of the tile see as a whole."""
    _, hi_first = key_range(first_row, len_q, len_kv, MASK)
    lo_last, _ = key_range(tl.minimum(first_row + ROWS, len_q) - 1, len_q, len_kv, MASK)
    end = tl.minimum(tl.maximum((hi_first - lo) // BN, 0), blocks - 1)
    begin = tl.minimum(tl.cdiv(lo_last - lo, BN), end)
    return begin, end


@triton.jit
def write_empty(out, lse, where, g: tl.constexpr, H: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
                ROWS: tl.constexpr, SOFTMAX: tl.constexpr):  # fmt: skip
    """Output 0 and log-sum-exp -inf of the sequences without keys, which a table of key tiles does not name."""
    offsets_kv, num_sequences, num_queries, total_kv = where[2], where[4], where[5], where[6]
    for b in range(tl.program_id(0), num_sequences, tl.num_programs(0)):
        _, len_kv = sequence_rows(offsets_kv, b, num_sequences, total_kv)
        if len_kv == 0:
            for first in range(g * ROWS, num_queries * H, GROUPS * ROWS):
                rows = first + tl.arange(0, ROWS)
                at = tl.cast(b, tl.int64) * num_queries * H + rows
                ok = rows < num_queries * H
                zeros = tl.zeros((ROWS, D), tl.float32).to(out.dtype.element_ty)
                tl.store(out + at[:, None] * D + tl.arange(0, D)[None, :], zeros, mask=ok[:, None])
                if SOFTMAX:
                    tl.store(lse + at, tl.full((ROWS,), float("-inf"), tl.float32), mask=ok)
