# mypy: allow-untyped-defs
"""dQ alone: keeps a tile of queries and streams the keys that it sees, in order.

It computes the scores and dP once more, seven products where ``backward.backward_kv`` with its sums needs five. But
there are no sums to be zeroed, added to and rounded: for few keys and narrow windows that is less work. And what it
computes is repeatable bit for bit, which sums in the order in which tiles end are not.

It runs before ``backward_kv`` and makes the row statistics of the softmax for both, as ``prepare_backward`` would: dO
is here anyway.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import entry_of, first_block, masked, receive_keys, receive_queries
from .._jit.jagged import partner_rows, sequence_rows
from .._jit.rings import ITEM_SLOT, next_item, publish, ragged, ring
from .._jit.scores import LOG2E, derivative, key_range, mask_kind
from .._jit.tlx import tlx

# Where a product leaves the elements of 64 rows: of a lane, of a warp, of a register. The sums of rows read like this
# are where those of the scores are.
_PRODUCT_64X64 = tl.constexpr(tlx.layout(shape=((4, 8, 4), (2, 2, 8)), stride=((2, 64, 1024), (1, 512, 8))))
_PRODUCT_64X128 = tl.constexpr(tlx.layout(shape=((4, 8, 4), (2, 2, 16)), stride=((2, 128, 2048), (1, 1024, 8))))


@triton.jit
def _query_item(item, items, where, C: tl.constexpr):
    """Where the rows of a work item are, and which keys its queries see.

    Returns:
        Head; start and rows of the queries; the first key that they see, and the tiles of keys from there on, the one
        count that all roles agree on: at least one, which may hold nothing, and none past the last item; start and rows
        of the keys; the first query of the tile; its block of the row statistics.
    """
    table, offsets_q, offsets_kv, num_sequences, total_q, total_kv = where
    b = item * 0 - 1
    first_query = item * 0
    if item < items:
        b, first_query = entry_of(table, item, C.heads)
    sequence = tl.maximum(b, 0)
    start_q, len_q = sequence_rows(offsets_q, sequence, num_sequences, total_q)
    start_kv, len_kv = partner_rows(offsets_kv, sequence, num_sequences, total_kv)
    begin = len_kv * 0
    end = len_kv
    if mask_kind(C.mask) != "full":
        begin, _ = key_range(first_query, len_q, len_kv, C.mask)
        _, end = key_range(tl.minimum(first_query + C.rows, len_q) - 1, len_q, len_kv, C.mask)
    # The table ends with entries of -1.
    tiles = tl.where(b < 0, 0, tl.maximum((end - begin + C.keys - 1) // C.keys, 1))
    block = first_block(start_q, sequence, C.rows // 2) + first_query // (C.rows // 2)
    return (
        item % C.heads, start_q.to(tl.int32), len_q, begin, tiles, start_kv.to(tl.int32), len_kv, first_query,
        block.to(tl.int32),
    )  # fmt: skip


@triton.jit
def _take(number, items, turn, hand_out, where, C: tl.constexpr):
    """Look an item up and hand it to the groups: in the place of the keys' start, its block of the row statistics."""
    slots, item_full, item_empty = hand_out
    item = _query_item(number, items, where, C)
    head, start_q, len_q, begin, n, _, len_kv, first_query, block = item
    handed = (head, start_q, len_q, begin, n, block, len_kv, first_query)
    publish(slots, item_full, item_empty, turn, handed, ITEM_SLOT)
    return item


@triton.jit
def _queries_at(item, g: tl.constexpr, C: tl.constexpr):
    """Where the 64 queries of a group are, for TMA. None without a key: what lies there may be NaN."""
    head, start_q, len_q, len_kv, first_query = item[0], item[1], item[2], item[6], item[7]
    return ragged(start_q, tl.where(len_kv > 0, len_q, 0), first_query + g * (C.rows // 2), head * C.dim)


@triton.jit
def _block_of(row_stats, head, block, g, C: tl.constexpr):
    """A group's block of the row statistics: 64 lse, then 64 delta."""
    return row_stats + (tl.cast(block + g, tl.int64) * C.heads + head) * C.rows


@triton.jit
def _load_lse(lse, item, C: tl.constexpr):
    """lse of an item's queries, as it is; +inf for rows without keys or past the end."""
    head, start_q, len_q, len_kv, first_query = item[0], item[1], item[2], item[6], item[7]
    own = tl.arange(0, C.rows)
    row = tl.cast(start_q + first_query, tl.int64) + own
    ok = (first_query + own < len_q) & (len_kv > 0)
    return tl.load(lse + row * C.heads + head, mask=ok, other=float("inf"))


@triton.jit
def _hand_lse(row_lse, row_stats, item, turn, lse_rows, q_full, C: tl.constexpr):
    """Hand lse, base 2, to the groups and to ``backward_kv``; +inf for rows that see no key, too."""
    head, len_q, first_query, block = item[0], item[2], item[7], item[8]
    HALF: tl.constexpr = C.rows // 2
    own = tl.arange(0, C.rows)
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
    tlx.local_store(lse_rows[turn % 2], row_lse)
    for g in tl.static_range(2):
        tlx.barrier_arrive(q_full[turn % 2 * 2 + g], 1)
    # Without a row, the block of group 1 is another sequence's.
    to = _block_of(row_stats, head, block, own // HALF, C) + own % HALF
    tl.store(to, row_lse, mask=(own < HALF) | (first_query + HALF < len_q))


@triton.jit
def _bring_queries(desc_q, desc_do, lse, row_stats, item, turn, tiles, rows, loads, C: tl.constexpr):
    """Load Q, dO and lse of this turn's item, 64 rows for each group."""
    q_tiles, do_tiles = tiles[0], tiles[1]
    q_full, q_empty = loads[0], loads[1]
    TILE_BYTES: tl.constexpr = C.rows // 2 * C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    if C.act == "softmax":
        row_lse = _load_lse(lse, item, C)
    for g in tl.static_range(2):
        buf, phase = turn % 2 * 2 + g, (turn // 2) & 1
        at = _queries_at(item, g, C)
        tlx.barrier_wait(q_empty[buf], phase ^ 1)
        tlx.barrier_expect_bytes(q_full[buf], 2 * TILE_BYTES)
        tlx.async_descriptor_load(desc_q, q_tiles[buf], at, q_full[buf])
        tlx.async_descriptor_load(desc_do, do_tiles[buf], at, q_full[buf])
    if C.act == "softmax":
        _hand_lse(row_lse, row_stats, item, turn, rows[0], q_full, C)


@triton.jit
def _bring_outputs(desc_o, item, count, tiles, loads, C: tl.constexpr):
    """Load O of both groups' queries, where a tile of K and V would be: 64 rows each."""
    buf, phase = ring(count, C.stages)
    TILE_BYTES: tl.constexpr = C.keys * C.dim * tlx.size_of(tlx.dtype_of(desc_o))
    tlx.barrier_wait(loads[4][buf], phase ^ 1)
    for g in tl.static_range(2):
        full = loads[2 + g][buf]
        tlx.barrier_expect_bytes(full, TILE_BYTES)
        tlx.async_descriptor_load(desc_o, tiles[2 + g][buf], _queries_at(item, g, C), full)


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, desc_o, lse, row_stats, where, counter, items, hand_out, tiles, rows,
          loads, C: tl.constexpr):  # fmt: skip
    """Hand out the items, each looked up and its queries brought while the one before it is loaded; bring the keys."""
    k_tiles, v_tiles = tiles[2], tiles[3]
    k_full, v_full, keys_empty = loads[2], loads[3], loads[4]
    TILE_BYTES: tl.constexpr = C.keys * C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    count = 0
    turn = 0
    item = _take(tl.program_id(0), items, turn, hand_out, where, C)
    if item[4] > 0:
        _bring_queries(desc_q, desc_do, lse, row_stats, item, turn, tiles, rows, loads, C)
    while item[4] > 0:
        head, begin, n, start_kv, len_kv = item[0], item[3], item[4], item[5], item[6]
        following = item
        if C.act == "softmax":
            _bring_outputs(desc_o, item, count, tiles, loads, C)
            count += 1
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
                    _bring_queries(desc_q, desc_do, lse, row_stats, following, turn + 1, tiles, rows, loads, C)
        turn += 1
        item = following


@triton.jit
def _release(g: tl.constexpr, turn, q_empty):
    """Free the queries of the item before, through whose tile its dQ has left by now."""
    if turn > 0:
        tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(q_empty[(turn + 1) % 2 * 2 + g], 1)


@triton.jit
def _make_delta(g: tl.constexpr, turn, count, stats, tiles, loads, C: tl.constexpr):
    """delta / out_scale of this group's queries, left in shared memory and for ``backward_kv``. O is let go."""
    lse_row, delta_row, delta_to, inverse_out_scale = stats
    LAYOUT: tl.constexpr = _PRODUCT_64X128 if C.dim == 128 else _PRODUCT_64X64
    buf, phase = ring(count, C.stages)
    tlx.barrier_wait(loads[2][buf], phase)
    tlx.barrier_wait(loads[3][buf], phase)
    do_tile = tlx.local_load(tiles[1][turn % 2 * 2 + g], layout=LAYOUT)
    out_tile = tlx.local_load(tiles[2 + g][buf], layout=LAYOUT)
    tlx.barrier_arrive(loads[4][buf], 1)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1) * inverse_out_scale
    delta = tl.where(lse_row < float("inf"), delta, 0.0)
    tlx.local_store(delta_row, delta)
    tl.store(delta_to + tl.arange(0, C.rows // 2), delta)


@triton.jit
def _tile(g: tl.constexpr, dq, trip, turn, count, first_key, seen, stats, scale, tiles, loads, DTYPE: tl.constexpr,
          C: tl.constexpr):  # fmt: skip
    """What a tile of keys adds to dQ."""
    q_tiles, do_tiles, k_tiles, v_tiles = tiles
    lse_row, delta_row = stats[0], stats[1]
    k_full, v_full, keys_empty = loads[2], loads[3], loads[4]
    q_buf = turn % 2 * 2 + g
    buf, phase = ring(count, C.stages)
    tlx.barrier_wait(k_full[buf], phase)
    s = tlx.async_dot(q_tiles[q_buf], tlx.local_trans(k_tiles[buf]))
    tlx.barrier_wait(v_full[buf], phase)
    dp = tlx.async_dot(do_tiles[q_buf], tlx.local_trans(v_tiles[buf]))
    if trip == 0:
        _release(g, turn, loads[1])
        if C.act == "softmax":
            _make_delta(g, turn, count - 1, stats, tiles, loads, C)
    s = tlx.async_dot_wait(1, s)
    # Keys past the end are zero rows: any finite gradient of their scores adds nothing.
    if C.act == "softmax":
        factor = tl.exp2(tl.minimum(s * (scale * LOG2E) - lse_row[:, None], 0.0))
    else:
        factor = derivative(s * scale, C.act, C.fast_tanh)
    if mask_kind(C.mask) != "full":
        factor = masked(factor, first_key, seen[0], seen[1], 1, 0, C.keys, C.mask)
    dp = tlx.async_dot_wait(0, dp)
    if C.act == "softmax":
        dp -= tlx.local_load(delta_row)[:, None]
    ds = (factor * dp).to(DTYPE)
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
def _tiles(g: tl.constexpr, turn, count, item, first_query, stats, scale, tiles, loads, DTYPE: tl.constexpr,
           C: tl.constexpr):  # fmt: skip
    """dQ of this group's queries of an item, from all tiles of keys that they see."""
    len_q, begin, n, len_kv = item
    HALF: tl.constexpr = C.rows // 2
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
                if C.act == "softmax":  # noqa: SIM102 - one is decided when this is compiled
                    if trip == 0:
                        _make_delta(g, turn, count - 1, stats, tiles, loads, C)
    return dq


@triton.jit
def _sum(g: tl.constexpr, desc_dq, row_stats, scale, out_scale, inverse_out_scale, hand_out, tiles, rows, loads,
         C: tl.constexpr):  # fmt: skip
    """Group g's 64 queries of each item. Their dQ leaves through their tile of Q, which is free by then."""
    slots, item_full, item_empty = hand_out
    lse_rows, delta_rows = rows
    HALF: tl.constexpr = C.rows // 2
    DTYPE: tl.constexpr = tlx.dtype_of(desc_dq)
    # Tiles of O, before those of K and V.
    OUTPUTS: tl.constexpr = 1 if C.act == "softmax" else 0
    count = 0
    turn = 0
    head, start_q, len_q, begin, n = receive_queries(slots, item_full, turn)
    while n > 0:
        block, len_kv, first_query = receive_keys(slots, turn)
        tlx.barrier_arrive(item_empty[turn % 2], 1)
        first_query += g * HALF
        tlx.barrier_wait(loads[0][turn % 2 * 2 + g], (turn // 2) & 1)
        # The first group has a row in every item.
        if g == 0 or first_query < len_q:
            lse_row = tl.zeros([HALF], tl.float32)
            if C.act == "softmax":
                lse_row = tlx.local_load(tlx.local_slice(lse_rows[turn % 2], [g * HALF], [HALF]))
            delta_to = _block_of(row_stats, head, block, g, C) + HALF
            stats = (lse_row, delta_rows[g], delta_to, inverse_out_scale)
            item = (len_q, begin, n, len_kv)
            dq = _tiles(g, turn, count + OUTPUTS, item, first_query, stats, scale, tiles, loads, DTYPE, C)
            out_tile = tiles[0][turn % 2 * 2 + g]
            tlx.local_store(out_tile, (dq * (scale * out_scale)).to(DTYPE))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(desc_dq, out_tile, ragged(start_q, len_q, first_query, head * C.dim))
        else:
            for trip in range(n + OUTPUTS):
                _pass_by(g, trip, turn, count + trip, loads, C)
        count += n + OUTPUTS
        turn += 1
        head, start_q, len_q, begin, n = receive_queries(slots, item_full, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv", "items"])
def backward_q(desc_q, desc_k, desc_v, desc_do, desc_o, desc_dq, row_stats, table, counter, slots, offsets_q,
               offsets_kv, lse, num_sequences, total_q, total_kv, items, scale, out_scale, inverse_out_scale,
               C: tl.constexpr):  # fmt: skip
    """dQ, and the row statistics: persistent, a work item is a tile of queries of a head, half of it for each group.

    For the softmax, the tile of O is the first of an item in the ring of K and V, in whose place it comes: group 0's
    half where K would be, group 1's where V would be. ``row_stats`` is laid out as by ``prepare_backward``; the blocks
    of no row are not written.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full | 1 + bytes; softmax 2 | load: Q and dO of one group; lse, which it stores itself | that group |
    | q_empty | 1 | that group, under the next item's first tile, when dQ has left | load |
    | k_full, v_full | 1 + bytes | load | both groups |
    | keys_empty | 2 × 128 | both groups, after dQ, the last product of a tile of K and V; when they have O | load |
    | item_full | 1 | load, when the slot holds an item | both groups |
    | item_empty | 2 | both groups, when they have read it | load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    # Two items' queries: two tiles of each group.
    q_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 4)
    do_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 4)
    k_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.stages)
    v_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.stages)
    lse_rows = tlx.local_alloc((C.rows,), tl.float32, 2)
    delta_rows = tlx.local_alloc((C.rows // 2,), tl.float32, 2)
    q_full = tlx.alloc_barriers(4, 2 if C.act == "softmax" else 1)
    q_empty = tlx.alloc_barriers(4)
    k_full = tlx.alloc_barriers(C.stages)
    v_full = tlx.alloc_barriers(C.stages)
    keys_empty = tlx.alloc_warp_barrier(C.stages, 4, 2)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 2)
    where = (table, offsets_q, offsets_kv, num_sequences, total_q, total_kv)
    hand_out = (slots, item_full, item_empty)
    tiles = (q_tiles, do_tiles, k_tiles, v_tiles)
    rows = (lse_rows, delta_rows)
    loads = (q_full, q_empty, k_full, v_full, keys_empty)
    for_load = (desc_q, desc_k, desc_v, desc_do, desc_o, lse, row_stats, where, counter, items)
    for_groups = (desc_dq, row_stats, scale, out_scale, inverse_out_scale)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(*for_load, hand_out, tiles, rows, loads, C)
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            _sum(tlx.async_task_replica_id(), *for_groups, hand_out, tiles, rows, loads, C)
