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
def _keys(b, first_query, offsets_q, offsets_kv, num_sequences, total_q, total_kv, BM: tl.constexpr, BN: tl.constexpr,
          MASK: tl.constexpr):  # fmt: skip
    """Start and length of the keys' sequence; the first key, and the key tiles, maybe none, that the queries visit."""
    start_kv, len_kv = partner_rows(offsets_kv, b, num_sequences, total_kv)
    begin = len_kv * 0
    end = len_kv
    if mask_kind(MASK) != "full":
        _, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        begin, _ = key_range(first_query, len_q, len_kv, MASK)
        begin = begin // BN * BN
        _, end = key_range(tl.minimum(first_query + BM, len_q) - 1, len_q, len_kv, MASK)
    return start_kv.to(tl.int32), len_kv, begin, tl.maximum((end - begin + BN - 1) // BN, 0)


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, table, counter, slots, offsets_q, offsets_kv, num_sequences, total_q,
          total_kv, items, q_tiles, do_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
          item_full, item_empty, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = BM // 2
    BYTES: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    count = 0
    turn = 0
    item = tl.program_id(0)
    b = item * 0 - 1
    first_query = item * 0
    if item < items:
        b, first_query = entry_of(table, item, H)
    # The table ends with entries of -1.
    while b >= 0:
        publish(slots, item_full, item_empty, turn, (item,), 1)
        start_kv, len_kv, begin, tiles = _keys(
            b, first_query, offsets_q, offsets_kv, num_sequences, total_q, total_kv, BM, BN, MASK
        )
        start_q, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        head = item % H
        item = next_item(counter)
        for g in tl.static_range(2):
            q0, q1, q2, q3 = ragged(start_q, len_q, first_query + g * HALF, head * D)
            tlx.barrier_wait(q_empty[g], (turn & 1) ^ 1)
            tlx.barrier_expect_bytes(q_full[g], 2 * HALF * D * BYTES)
            tlx.async_descriptor_load(desc_q, q_tiles[g], [q0, q1, q2, q3], q_full[g])
            tlx.async_descriptor_load(desc_do, do_tiles[g], [q0, q1, q2, q3], q_full[g])
        for trip in range(tiles):
            buf, phase = ring(count, STAGES)
            k0, k1, k2, k3 = ragged(start_kv, len_kv, begin + trip * BN, head // GROUP * D)
            tlx.barrier_wait(k_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[buf], BN * D * BYTES)
            tlx.async_descriptor_load(desc_k, k_tiles[buf], [k0, k1, k2, k3], k_full[buf])
            tlx.barrier_wait(v_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(v_full[buf], BN * D * BYTES)
            tlx.async_descriptor_load(desc_v, v_tiles[buf], [k0, k1, k2, k3], v_full[buf])
            count += 1
        turn += 1
        b = b * 0 - 1
        if item < items:
            b, first_query = entry_of(table, item, H)
    publish(slots, item_full, item_empty, turn, (-1,), 1)


@triton.jit
def _sum(g: tl.constexpr, desc_dq, row_stats, table, slots, offsets_q, offsets_kv, num_sequences, total_q, total_kv,
         scale, out_scale, q_tiles, do_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, k_full, k_empty, v_full,
         v_empty, item_full, item_empty, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         STAGES: tl.constexpr, MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr):  # fmt: skip
    """Group g's 64 queries."""
    HALF: tl.constexpr = BM // 2
    DTYPE: tl.constexpr = tlx.dtype_of(desc_dq)
    count = 0
    turn = 0
    item = receive(slots, item_full, item_empty, turn)
    while item >= 0:
        b, first_query = entry_of(table, item, H)
        _, len_kv, begin, tiles = _keys(
            b, first_query, offsets_q, offsets_kv, num_sequences, total_q, total_kv, BM, BN, MASK
        )
        start_q, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        first_query += g * HALF
        rows = tl.arange(0, HALF)
        lse_row = tl.zeros([HALF], tl.float32)
        delta_row = lse_row
        if ACT == "softmax":
            # In a sequence's last tile, the block of group 1 may be that of another one: rows that are not stored.
            block = first_block(start_q, b, HALF) + first_query // HALF
            stats = row_stats + (block * H + item % H) * (2 * HALF) + rows
            lse_row = tl.load(stats)
            delta_row = tl.load(stats + HALF)
        key_lo = tl.zeros([HALF], tl.int32)
        key_hi = key_lo
        if mask_kind(MASK) != "full":
            key_lo, key_hi = key_range(first_query + rows, len_q, len_kv, MASK)
        dq = tl.zeros([HALF, D], tl.float32)
        tlx.barrier_wait(q_full[g], turn & 1)
        for trip in tl.range(tiles):
            buf, phase = ring(count, STAGES)
            tlx.barrier_wait(k_full[buf], phase)
            s = tlx.async_dot(q_tiles[g], tlx.local_trans(k_tiles[buf]))
            tlx.barrier_wait(v_full[buf], phase)
            dp = tlx.async_dot(do_tiles[g], tlx.local_trans(v_tiles[buf]))
            s = tlx.async_dot_wait(1, s)
            # Keys past the end are zero rows: any finite gradient of their scores adds nothing.
            if ACT == "softmax":
                factor = tl.exp2(tl.minimum(s * (scale * LOG2E) - lse_row[:, None], 0.0))
            else:
                factor = derivative(s * scale, ACT, FAST_TANH)
            if mask_kind(MASK) != "full":
                factor = masked(factor, begin + trip * BN, key_lo, key_hi, 1, 0, BN, MASK)
            dp = tlx.async_dot_wait(0, dp)
            tlx.barrier_arrive(v_empty[buf], 1)
            ds = (factor * (dp - delta_row[:, None])).to(DTYPE)
            dq = tlx.async_dot(ds, k_tiles[buf], dq)
            dq = tlx.async_dot_wait(0, dq)
            tlx.barrier_arrive(k_empty[buf], 1)
            count += 1
        tlx.barrier_arrive(q_empty[g], 1)
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(out_tiles[g], (dq * (scale * out_scale)).to(DTYPE))
        tlx.fence("async_shared")
        c0, c1, c2, c3 = ragged(start_q, len_q, first_query, item % H * D)
        tlx.async_descriptor_store(desc_dq, out_tiles[g], [c0, c1, c2, c3])
        turn += 1
        item = receive(slots, item_full, item_empty, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv", "items"])
def backward_q(desc_q, desc_k, desc_v, desc_do, desc_dq, row_stats, table, counter, slots, offsets_q, offsets_kv,
               num_sequences, total_q, total_kv, items, scale, out_scale, H: tl.constexpr, GROUP: tl.constexpr,
               D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr,
               ACT: tl.constexpr, FAST_TANH: tl.constexpr):  # fmt: skip
    """dQ: persistent, a work item is a tile of BM queries of a head, half of it for each group.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full | 1 + bytes | load: Q and dO of one group | that group |
    | q_empty | 1 | that group, after its last product | load |
    | k_full, v_full | 1 + bytes | load | both groups |
    | k_empty, v_empty | 2 | both groups, after dQ; after dP | load |
    | item_full | 1 | load, when the slot holds an item | both groups |
    | item_empty | 2 | both groups, when they have read it | load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tiles = tlx.local_alloc((BM // 2, D), DTYPE, 2)
    do_tiles = tlx.local_alloc((BM // 2, D), DTYPE, 2)
    k_tiles = tlx.local_alloc((BN, D), DTYPE, STAGES)
    v_tiles = tlx.local_alloc((BN, D), DTYPE, STAGES)
    out_tiles = tlx.local_alloc((BM // 2, D), DTYPE, 2)
    q_full = tlx.alloc_barriers(2)
    q_empty = tlx.alloc_barriers(2)
    k_full = tlx.alloc_barriers(STAGES)
    k_empty = tlx.alloc_barriers(STAGES, 2)
    v_full = tlx.alloc_barriers(STAGES)
    v_empty = tlx.alloc_barriers(STAGES, 2)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(desc_q, desc_k, desc_v, desc_do, table, counter, slots, offsets_q, offsets_kv, num_sequences, total_q,
                  total_kv, items, q_tiles, do_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full,
                  v_empty, item_full, item_empty, H, GROUP, D, BM, BN, STAGES, MASK)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            _sum(tlx.async_task_replica_id(), desc_dq, row_stats, table, slots, offsets_q, offsets_kv, num_sequences,
                 total_q, total_kv, scale, out_scale, q_tiles, do_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty,
                 k_full, k_empty, v_full, v_empty, item_full, item_empty, H, D, BM, BN, STAGES, MASK, ACT,
                 FAST_TANH)  # fmt: skip
