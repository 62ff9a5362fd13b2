# mypy: allow-untyped-defs
"""dQ alone, bit-for-bit repeatable: keeps a tile of queries and streams the keys that it sees, in order.

``backward.backward_kv`` adds up dQ in whatever order its tiles end. Where that is not allowed, it leaves dQ to this
kernel, which computes the scores and dP once more: seven products where five would do.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import entry_of, first_block, masked
from .._jit.jagged import partner_rows, sequence_rows
from .._jit.rings import next_item, publish, ragged, receive, ring
from .._jit.scores import LOG2E, derivative, key_range, mask_kind
from .._jit.tlx import tlx


@triton.jit
def _keys(b, first_query, where, C: tl.constexpr):
    """Start and length of the keys' sequence; the first key, and the key tiles, maybe none, that the queries visit."""
    _, offsets_q, offsets_kv, num_sequences, total_q, total_kv = where
    start_kv, len_kv = partner_rows(offsets_kv, b, num_sequences, total_kv)
    begin = len_kv * 0
    end = len_kv
    if mask_kind(C.mask) != "full":
        _, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        begin, _ = key_range(first_query, len_q, len_kv, C.mask)
        begin = begin // C.keys * C.keys
        _, end = key_range(tl.minimum(first_query + C.rows, len_q) - 1, len_q, len_kv, C.mask)
    return start_kv.to(tl.int32), len_kv, begin, tl.maximum((end - begin + C.keys - 1) // C.keys, 0)


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, where, counter, items, hand_out, tiles, loads, C: tl.constexpr):
    """Hand out the items, and bring Q and dO of both groups, K and V of each."""
    table, offsets_q, _, num_sequences, total_q, _ = where
    q_tiles, do_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, v_full, keys_empty = loads
    HALF: tl.constexpr = C.rows // 2
    ROW_BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    count = 0
    turn = 0
    item = tl.program_id(0)
    b = item * 0 - 1
    first_query = item * 0
    if item < items:
        b, first_query = entry_of(table, item, C.heads)
    # The table ends with entries of -1.
    while b >= 0:
        publish(*hand_out, turn, (item,), 1)
        start_kv, len_kv, begin, n = _keys(b, first_query, where, C)
        start_q, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        head = item % C.heads
        item = next_item(counter)
        for g in tl.static_range(2):
            at = ragged(start_q, len_q, first_query + g * HALF, head * C.dim)
            tlx.barrier_wait(q_empty[g], (turn & 1) ^ 1)
            tlx.barrier_expect_bytes(q_full[g], 2 * HALF * ROW_BYTES)
            tlx.async_descriptor_load(desc_q, q_tiles[g], at, q_full[g])
            tlx.async_descriptor_load(desc_do, do_tiles[g], at, q_full[g])
        for trip in range(n):
            buf, phase = ring(count, C.stages)
            at = ragged(start_kv, len_kv, begin + trip * C.keys, head // C.group * C.dim)
            tlx.barrier_wait(keys_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[buf], C.keys * ROW_BYTES)
            tlx.async_descriptor_load(desc_k, k_tiles[buf], at, k_full[buf])
            tlx.barrier_expect_bytes(v_full[buf], C.keys * ROW_BYTES)
            tlx.async_descriptor_load(desc_v, v_tiles[buf], at, v_full[buf])
            count += 1
        turn += 1
        b = b * 0 - 1
        if item < items:
            b, first_query = entry_of(table, item, C.heads)
    publish(*hand_out, turn, (-1,), 1)


@triton.jit
def _sum(g: tl.constexpr, desc_dq, row_stats, where, scale, out_scale, hand_out, tiles, out_tiles, loads,
         C: tl.constexpr):  # fmt: skip
    """Group g's 64 queries."""
    table, offsets_q, _, num_sequences, total_q, _ = where
    q_tiles, do_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, v_full, keys_empty = loads
    HALF: tl.constexpr = C.rows // 2
    DTYPE: tl.constexpr = tlx.dtype_of(desc_dq)
    count = 0
    turn = 0
    item = receive(*hand_out, turn)
    while item >= 0:
        b, first_query = entry_of(table, item, C.heads)
        _, len_kv, begin, n = _keys(b, first_query, where, C)
        start_q, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        first_query += g * HALF
        rows = tl.arange(0, HALF)
        lse_row = tl.zeros([HALF], tl.float32)
        delta_row = lse_row
        if C.act == "softmax":
            # In a sequence's last tile, the block of group 1 may be that of another one: rows that are not stored.
            block = first_block(start_q, b, HALF) + first_query // HALF
            stats = row_stats + (block * C.heads + item % C.heads) * (2 * HALF) + rows
            lse_row = tl.load(stats)
            delta_row = tl.load(stats + HALF)
        key_lo = tl.zeros([HALF], tl.int32)
        key_hi = key_lo
        if mask_kind(C.mask) != "full":
            key_lo, key_hi = key_range(first_query + rows, len_q, len_kv, C.mask)
        dq = tl.zeros([HALF, C.dim], tl.float32)
        tlx.barrier_wait(q_full[g], turn & 1)
        for trip in tl.range(n):
            buf, phase = ring(count, C.stages)
            tlx.barrier_wait(k_full[buf], phase)
            s = tlx.async_dot(q_tiles[g], tlx.local_trans(k_tiles[buf]))
            tlx.barrier_wait(v_full[buf], phase)
            dp = tlx.async_dot(do_tiles[g], tlx.local_trans(v_tiles[buf]))
            s = tlx.async_dot_wait(1, s)
            # Keys past the end are zero rows: any finite gradient of their scores adds nothing.
            if C.act == "softmax":
                factor = tl.exp2(tl.minimum(s * (scale * LOG2E) - lse_row[:, None], 0.0))
            else:
                factor = derivative(s * scale, C.act, C.fast_tanh)
            if mask_kind(C.mask) != "full":
                factor = masked(factor, begin + trip * C.keys, key_lo, key_hi, 1, 0, C.keys, C.mask)
            dp = tlx.async_dot_wait(0, dp)
            ds = (factor * (dp - delta_row[:, None])).to(DTYPE)
            dq = tlx.async_dot(ds, k_tiles[buf], dq)
            dq = tlx.async_dot_wait(0, dq)
            tlx.barrier_arrive(keys_empty[buf], 1)
            count += 1
        tlx.barrier_arrive(q_empty[g], 1)
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(out_tiles[g], (dq * (scale * out_scale)).to(DTYPE))
        tlx.fence("async_shared")
        at = ragged(start_q, len_q, first_query, item % C.heads * C.dim)
        tlx.async_descriptor_store(desc_dq, out_tiles[g], at)
        turn += 1
        item = receive(*hand_out, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv", "items"])
def backward_q(desc_q, desc_k, desc_v, desc_do, desc_dq, row_stats, table, counter, slots, offsets_q, offsets_kv,
               num_sequences, total_q, total_kv, items, scale, out_scale, C: tl.constexpr):  # fmt: skip
    """dQ: persistent, a work item is a tile of queries of a head, half of it for each group.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full | 1 + bytes | load: Q and dO of one group | that group |
    | q_empty | 1 | that group, after its last product | load |
    | k_full, v_full | 1 + bytes | load | both groups |
    | keys_empty | 2 × 128 | both groups, after dQ, the last product of a tile of K and V | load |
    | item_full | 1 | load, when the slot holds an item | both groups |
    | item_empty | 2 | both groups, when they have read it | load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 2)
    do_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 2)
    k_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.stages)
    v_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.stages)
    out_tiles = tlx.local_alloc((C.rows // 2, C.dim), DTYPE, 2)
    q_full = tlx.alloc_barriers(2)
    q_empty = tlx.alloc_barriers(2)
    k_full = tlx.alloc_barriers(C.stages)
    keys_empty = tlx.alloc_warp_barrier(C.stages, 4, 2)
    v_full = tlx.alloc_barriers(C.stages)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 2)
    where = (table, offsets_q, offsets_kv, num_sequences, total_q, total_kv)
    hand_out = (slots, item_full, item_empty)
    tiles = (q_tiles, do_tiles, k_tiles, v_tiles)
    loads = (q_full, q_empty, k_full, v_full, keys_empty)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(desc_q, desc_k, desc_v, desc_do, where, counter, items, hand_out, tiles, loads, C)
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            _sum(tlx.async_task_replica_id(), desc_dq, row_stats, where, scale, out_scale, hand_out, tiles, out_tiles,
                 loads, C)  # fmt: skip
