# mypy: allow-untyped-defs
"""dQ alone: keeps a tile of queries and streams the keys that it sees, in order.

It computes the scores and dP once more, seven products where ``backward.backward_kv`` with its sums needs five. But
there are no sums to be zeroed, added to and rounded: for few keys and narrow windows that is less work. And what it
computes is repeatable bit for bit, which sums in the order in which tiles end are not.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import entry_of, first_block, masked
from .._jit.jagged import partner_rows, sequence_rows
from .._jit.rings import (
    ITEM_SLOT,
    next_item,
    pass_on,
    ragged,
    read_numbers,
    receive_numbers,
    ring,
    tile_to_store,
)
from .._jit.scores import LOG2E, derivative, key_range, mask_kind
from .._jit.tlx import tlx


@triton.jit
def _query_item(item, items, where, C: tl.constexpr):
    """Where the rows of a work item are, and which keys its queries see.

    Returns:
        Head; start and rows of the queries; the first key that they see, and the tiles of keys from there on, the one
        count that all roles agree on: at least one, which may hold nothing, and none past the last item; start and rows
        of the keys; the first query of the tile; its block of the row statistics.
    """
    table, offsets_q, offsets_kv, num_sequences, total_q, total_kv = where
    b, first_query = entry_of(item, items, table, C.heads)
    sequence = tl.maximum(b, 0)
    start_q, len_q = sequence_rows(offsets_q, sequence, num_sequences, total_q)
    start_kv, len_kv = partner_rows(offsets_kv, sequence, num_sequences, total_kv)
    begin = len_kv * 0
    end = len_kv
    if mask_kind(C.mask) != "full":
        begin, _ = key_range(first_query, len_q, len_kv, C.mask)
        _, end = key_range(tl.minimum(first_query + C.rows, len_q) - 1, len_q, len_kv, C.mask)
    tiles = tl.where(b < 0, 0, tl.maximum((end - begin + C.keys - 1) // C.keys, 1))
    block = first_block(start_q, sequence, C.rows // 2) + first_query // (C.rows // 2)
    return (
        item % C.heads, start_q.to(tl.int32), len_q, begin, tiles, start_kv.to(tl.int32), len_kv, first_query,
        block.to(tl.int32),
    )  # fmt: skip


@triton.jit
def _take(number, items, turn, hand_out, where, C: tl.constexpr):
    """Look an item up and hand it to the groups; they need not know its block of the row statistics."""
    slots, item_full, item_empty = hand_out
    item = _query_item(number, items, where, C)
    pass_on(slots, item_full, item_empty, turn, item[:8])
    return item


@triton.jit
def _queries(turn, g):
    """Which tiles hold a group's queries of this turn's item, and the phase of their barriers."""
    buf, phase = ring(turn, 2)
    return buf * 2 + g, phase


@triton.jit
def _bring_queries(desc_q, desc_do, row_stats, item, turn, tiles, rows, loads, C: tl.constexpr):
    """Load Q, dO and the row statistics of this turn's item, 64 rows for each group."""
    head, start_q, len_q, len_kv, first_query, block = item[0], item[1], item[2], item[6], item[7], item[8]
    # Queries without a key are not loaded: what lies there may be NaN, and their gradients are 0.
    len_q = tl.where(len_kv > 0, len_q, 0)
    q_tiles, do_tiles = tiles[0], tiles[1]
    lse_rows, delta_rows = rows
    q_full, q_empty = loads[0], loads[1]
    HALF: tl.constexpr = C.rows // 2
    SOFTMAX: tl.constexpr = C.act == "softmax"
    ROW_BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    for g in tl.static_range(2):
        buf, phase = _queries(turn, g)
        at = ragged(start_q, len_q, first_query + g * HALF, head * C.dim)
        tlx.barrier_wait(q_empty[buf], phase ^ 1)
        tlx.barrier_expect_bytes(q_full[buf], 2 * HALF * (ROW_BYTES + (4 if SOFTMAX else 0)))
        tlx.async_descriptor_load(desc_q, q_tiles[buf], at, q_full[buf])
        tlx.async_descriptor_load(desc_do, do_tiles[buf], at, q_full[buf])
        if SOFTMAX:
            # In a sequence's last tile, the block of group 1 may be that of another one: rows that are not stored.
            stats = row_stats + (tl.cast(block + g, tl.int64) * C.heads + head) * (2 * HALF)
            tlx.async_load(stats, lse_rows[buf], bulk=True, barrier=q_full[buf])
            tlx.async_load(stats + HALF, delta_rows[buf], bulk=True, barrier=q_full[buf])


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, row_stats, where, counter, items, hand_out, tiles, rows, loads,
          C: tl.constexpr):  # fmt: skip
    """Hand out the items, each looked up and its queries brought while the one before it is loaded; bring the keys."""
    k_tiles, v_tiles = tiles[2], tiles[3]
    k_full, v_full, keys_empty = loads[2], loads[3], loads[4]
    TILE_BYTES: tl.constexpr = C.keys * C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    count = 0
    turn = 0
    item = _take(tl.program_id(0), items, turn, hand_out, where, C)
    if item[4] > 0:
        _bring_queries(desc_q, desc_do, row_stats, item, turn, tiles, rows, loads, C)
    while item[4] > 0:
        head, begin, n, start_kv, len_kv = item[0], item[3], item[4], item[5], item[6]
        following = item
        for trip in range(n):
            buf, phase = ring(count, C.stages)
            at = ragged(start_kv, len_kv, begin + trip * C.keys, head // C.group * C.dim)
            tlx.barrier_wait(keys_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[buf], TILE_BYTES)
            tlx.async_descriptor_load(desc_k, k_tiles[buf], at, k_full[buf])
            tlx.barrier_expect_bytes(v_full[buf], TILE_BYTES)
            tlx.async_descriptor_load(desc_v, v_tiles[buf], at, v_full[buf])
            count += 1
            if trip == tl.minimum(n, C.stages) - 1:
                # When as much is under way as the rings hold: the look-up takes longer than a tile.
                following = _take(next_item(counter), items, turn + 1, hand_out, where, C)
                if following[4] > 0:
                    _bring_queries(desc_q, desc_do, row_stats, following, turn + 1, tiles, rows, loads, C)
        turn += 1
        item = following


@triton.jit
def _release(g: tl.constexpr, turn, q_empty):
    """Free the queries of the item before, through whose tile its dQ has left by now."""
    if turn > 0:
        tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(q_empty[_queries(turn - 1, g)[0]], 1)


@triton.jit
def _tile(g: tl.constexpr, dq, trip, turn, count, first_key, seen, stats, scale, tiles, loads, DTYPE: tl.constexpr,
          C: tl.constexpr):  # fmt: skip
    """What a tile of keys adds to dQ."""
    q_tiles, do_tiles, k_tiles, v_tiles = tiles
    lse_row, delta_row = stats
    k_full, v_full, keys_empty = loads[2], loads[3], loads[4]
    q_buf = _queries(turn, g)[0]
    buf, phase = ring(count, C.stages)
    tlx.barrier_wait(k_full[buf], phase)
    s = tlx.async_dot(q_tiles[q_buf], tlx.local_trans(k_tiles[buf]))
    tlx.barrier_wait(v_full[buf], phase)
    dp = tlx.async_dot(do_tiles[q_buf], tlx.local_trans(v_tiles[buf]))
    if trip == 0:
        _release(g, turn, loads[1])
    s = tlx.async_dot_wait(1, s)
    # Keys past the end are zero rows: any finite gradient of their scores adds nothing.
    if C.act == "softmax":
        factor = tl.exp2(tl.minimum(s * (scale * LOG2E) - lse_row[:, None], 0.0))
    else:
        factor = derivative(s * scale, C.act, C.fast_tanh)
    if mask_kind(C.mask) != "full":
        factor = masked(factor, first_key, seen[0], seen[1], 1, 0, C.keys, C.mask)
    dp = tlx.async_dot_wait(0, dp)
    ds = (factor * (dp - delta_row[:, None])).to(DTYPE)
    dq = tlx.async_dot(ds, k_tiles[buf], dq)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(keys_empty[buf], 1)
    return dq


@triton.jit
def _pass_by(g: tl.constexpr, trip, turn, count, loads, C: tl.constexpr):
    """What ``_tile`` does for the other roles, by a group whose queries see none of these keys."""
    k_full, v_full, keys_empty = loads[2], loads[3], loads[4]
    buf, phase = ring(count, C.stages)
    tlx.barrier_wait(k_full[buf], phase)
    tlx.barrier_wait(v_full[buf], phase)
    if trip == 0:
        _release(g, turn, loads[1])
    tlx.barrier_arrive(keys_empty[buf], 1)


@triton.jit
def _tiles(g: tl.constexpr, turn, count, item, first_query, scale, tiles, rows, loads, DTYPE: tl.constexpr,
           C: tl.constexpr):  # fmt: skip
    """dQ of this group's queries of an item, from all tiles of keys that they see."""
    _, _, len_q, begin, n, len_kv = item
    lse_rows, delta_rows = rows
    HALF: tl.constexpr = C.rows // 2
    buf, phase = _queries(turn, g)
    tlx.barrier_wait(loads[0][buf], phase)
    lse_row = tl.zeros([HALF], tl.float32)
    delta_row = lse_row
    if C.act == "softmax":
        lse_row = tlx.local_load(lse_rows[buf])
        delta_row = tlx.local_load(delta_rows[buf])
    stats = (lse_row, delta_row)
    seen = (tl.zeros([HALF], tl.int32), tl.zeros([HALF], tl.int32))
    lo = begin * 0
    hi = begin * 0
    if mask_kind(C.mask) != "full":
        seen = key_range(first_query + tl.arange(0, HALF), len_q, len_kv, C.mask)
        lo, _ = key_range(first_query, len_q, len_kv, C.mask)
        _, hi = key_range(tl.minimum(first_query + HALF, len_q) - 1, len_q, len_kv, C.mask)
    dq = tl.zeros([HALF, C.dim], tl.float32)
    for trip in tl.range(n):
        first_key = begin + trip * C.keys
        if mask_kind(C.mask) == "full":
            dq = _tile(g, dq, trip, turn, count + trip, first_key, seen, stats, scale, tiles, loads, DTYPE, C)
        else:
            if (first_key < hi) & (first_key + C.keys > lo):
                dq = _tile(g, dq, trip, turn, count + trip, first_key, seen, stats, scale, tiles, loads, DTYPE, C)
            else:
                _pass_by(g, trip, turn, count + trip, loads, C)
    return dq


@triton.jit
def _sum(g: tl.constexpr, desc_dq, scale, out_scale, hand_out, tiles, rows, loads, C: tl.constexpr):
    """Group g's 64 queries of each item. Their dQ leaves through their tile of Q, which is free by then."""
    slots, item_full, item_empty = hand_out
    HALF: tl.constexpr = C.rows // 2
    DTYPE: tl.constexpr = tlx.dtype_of(desc_dq)
    count = 0
    turn = 0
    head, start_q, len_q, begin, n = receive_numbers(slots, item_full, turn, 0, 5)
    while n > 0:
        len_kv, first_query = read_numbers(slots, turn, 6, 8)
        tlx.barrier_arrive(item_empty[turn % 2], 1)
        first_query += g * HALF
        q_buf, q_phase = _queries(turn, g)
        # The first group has a row in every item.
        if g == 0 or first_query < len_q:
            item = (head, start_q, len_q, begin, n, len_kv)
            dq = _tiles(g, turn, count, item, first_query, scale, tiles, rows, loads, DTYPE, C)
            out_tile = tile_to_store(tiles[0], q_buf, g, 4, 2)
            tlx.local_store(out_tile, (dq * (scale * out_scale)).to(DTYPE))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(desc_dq, out_tile, ragged(start_q, len_q, first_query, head * C.dim))
        else:
            tlx.barrier_wait(loads[0][q_buf], q_phase)
            for trip in range(n):
                _pass_by(g, trip, turn, count + trip, loads, C)
        count += n
        turn += 1
        head, start_q, len_q, begin, n = receive_numbers(slots, item_full, turn, 0, 5)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv", "items"])
def backward_q(desc_q, desc_k, desc_v, desc_do, desc_dq, row_stats, table, counter, offsets_q, offsets_kv,
               num_sequences, total_q, total_kv, items, scale, out_scale, C: tl.constexpr):  # fmt: skip
    """dQ: persistent, a work item is a tile of queries of a head, half of it for each group.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full | 1 + bytes | load: Q, dO, lse and delta of one group | that group |
    | q_empty | 1 | that group, under the next item's first tile, when dQ has left | load |
    | k_full, v_full | 1 + bytes | load | both groups |
    | keys_empty | 2 × 128 | both groups, after dQ, the last product of a tile of K and V | load |
    | item_full | 1 | load, when the slot holds an item | both groups |
    | item_empty | 2 | both groups, when they have read it | load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    # Two items' queries: two tiles of each group.
    q_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 4)
    do_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 4)
    k_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.stages)
    v_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.stages)
    lse_rows = tlx.local_alloc((C.rows // 2,), tl.float32, 4)
    delta_rows = tlx.local_alloc((C.rows // 2,), tl.float32, 4)
    q_full = tlx.alloc_barriers(4)
    q_empty = tlx.alloc_barriers(4)
    k_full = tlx.alloc_barriers(C.stages)
    v_full = tlx.alloc_barriers(C.stages)
    keys_empty = tlx.alloc_warp_barrier(C.stages, 4, 2)
    slots = tlx.local_alloc((1,), tl.int32, 2 * ITEM_SLOT)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 2)
    where = (table, offsets_q, offsets_kv, num_sequences, total_q, total_kv)
    hand_out = (slots, item_full, item_empty)
    tiles = (q_tiles, do_tiles, k_tiles, v_tiles)
    rows = (lse_rows, delta_rows)
    loads = (q_full, q_empty, k_full, v_full, keys_empty)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(desc_q, desc_k, desc_v, desc_do, row_stats, where, counter, items, hand_out, tiles, rows, loads, C)
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            _sum(tlx.async_task_replica_id(), desc_dq, scale, out_scale, hand_out, tiles, rows, loads, C)
