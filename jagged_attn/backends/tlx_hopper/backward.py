# mypy: allow-untyped-defs
"""The backward kernel of self and cross attention for Hopper; ``_jit.backward_rows`` has what comes before and after.

``backward_kv`` keeps a tile of 128 keys, streams the queries that see it, and adds each query tile's share of dQ to an
fp32 sum in global memory. Which tile adds first is not repeatable: ``backward_queries`` is there for calls that must
be. The factor ``out_scale`` is left out of all scores' gradients until the end: the delta
handed in is divided by it, and dQ, dK and dV are multiplied by it once.

    dV = c P^T dO     dS = P (dO V^T - delta / c)     dK = c scale dS^T Q     dQ = c scale dS K     (c = out_scale)
"""

import triton
import triton.language as tl

from .._jit.backward_rows import (
    ITEM_SLOT,
    first_query_of,
    key_item,
    masked,
    query_head,
    query_ranges,
    receive_keys,
    receive_queries,
)  # fmt: skip
from .._jit.rings import next_item, publish, ragged, ring
from .._jit.scores import LOG2E, activate, derivative, mask_kind
from .._jit.tlx import tlx

# Where a product leaves the elements of a 64 x 64 tile: of a lane, of a warp, of a register.
_PRODUCT_64X64 = tl.constexpr(tlx.layout(shape=((4, 8, 4), (2, 2, 8)), stride=((2, 64, 1024), (1, 512, 8))))


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, row_stats, table, counter, slots, offsets_q, offsets_kv, num_sequences,
          total_q, total_kv, items, q_tiles, do_tiles, k_tile, v_tile, lse_rows, delta_rows, q_full, q_empty, do_full,
          do_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty, H: tl.constexpr, GROUP: tl.constexpr,
          D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr,
          SOFTMAX: tl.constexpr, REPLICAS: tl.constexpr):  # fmt: skip
    """Hand out the items, each looked up while the one before it is loaded, and bring their tiles."""
    KV_HEADS: tl.constexpr = H // GROUP
    BYTES: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    TILE_BYTES: tl.constexpr = BM * D * BYTES + (BM * 4 if SOFTMAX else 0)
    count = 0
    turn = 0
    kv_head, start_q, len_q, begin, tiles, start_kv, len_kv, first_key, block = key_item(
        tl.program_id(0), items, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv, KV_HEADS, BM, BN, MASK
    )  # fmt: skip
    publish(
        slots, item_full, item_empty, turn,
        (kv_head, start_q, len_q, begin, tiles, start_kv, len_kv, first_key), ITEM_SLOT,
    )  # fmt: skip
    while tiles > 0:
        next_head, next_q, next_len_q, next_begin, next_tiles, next_kv, next_len_kv, next_key, next_block = (
            kv_head, start_q, len_q, begin, tiles, start_kv, len_kv, first_key, block,
        )  # fmt: skip
        # Keys that no query sees are not loaded: what lies there may be NaN, and their gradients are 0.
        rows_kv = tl.where(len_q > 0, len_kv, 0)
        # Shared queries are not at their sequence's place, but the first rows of all.
        rows_q = start_q * 0 if REPLICAS else start_q
        for trip in range(GROUP * tiles):
            head = kv_head
            tile = trip
            if GROUP > 1:
                head = kv_head * GROUP + trip // tiles
                tile = trip % tiles
            buf, phase = ring(count, STAGES)
            q0, q1, q2, q3 = ragged(rows_q, len_q, begin + tile * BM, head * D)
            rows = row_stats + (tl.cast(block + tile, tl.int64) * H + head) * (2 * BM)
            tlx.barrier_wait(q_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(q_full[buf], TILE_BYTES)
            tlx.async_descriptor_load(desc_q, q_tiles[buf], [q0, q1, q2, q3], q_full[buf])
            if SOFTMAX:
                tlx.async_load(rows, lse_rows[buf], bulk=True, barrier=q_full[buf])
            if trip == 0:
                k0, k1, k2, k3 = ragged(start_kv, rows_kv, first_key, kv_head * D)
                tlx.barrier_wait(k_empty[0], (turn & 1) ^ 1)
                tlx.barrier_expect_bytes(k_full[0], BN * D * BYTES)
                tlx.async_descriptor_load(desc_k, k_tile[0], [k0, k1, k2, k3], k_full[0])
            o0, o1, o2, o3 = ragged(start_q, len_q, begin + tile * BM, head * D)
            tlx.barrier_wait(do_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(do_full[buf], TILE_BYTES)
            tlx.async_descriptor_load(desc_do, do_tiles[buf], [o0, o1, o2, o3], do_full[buf])
            if SOFTMAX:
                tlx.async_load(rows + BM, delta_rows[buf], bulk=True, barrier=do_full[buf])
            if trip == 0:
                v0, v1, v2, v3 = ragged(start_kv, rows_kv, first_key, kv_head * D)
                tlx.barrier_wait(v_empty[0], (turn & 1) ^ 1)
                tlx.barrier_expect_bytes(v_full[0], BN * D * BYTES)
                tlx.async_descriptor_load(desc_v, v_tile[0], [v0, v1, v2, v3], v_full[0])
                (
                    next_head, next_q, next_len_q, next_begin, next_tiles, next_kv, next_len_kv, next_key, next_block,
                ) = key_item(
                    next_item(counter), items, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv,
                    KV_HEADS, BM, BN, MASK,
                )  # fmt: skip
                publish(
                    slots, item_full, item_empty, turn + 1,
                    (next_head, next_q, next_len_q, next_begin, next_tiles, next_kv, next_len_kv, next_key), ITEM_SLOT,
                )  # fmt: skip
            count += 1
        turn += 1
        kv_head, start_q, len_q, begin, tiles, start_kv, len_kv, first_key, block = (
            next_head, next_q, next_len_q, next_begin, next_tiles, next_kv, next_len_kv, next_key, next_block,
        )  # fmt: skip


@triton.jit
def _weights(s, lse_row, first_query, query_lo, query_hi, all_lo, all_hi, scale, DTYPE: tl.constexpr,
             BM: tl.constexpr, MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr):  # fmt: skip
    """From scores ``[keys, queries]``: the activated scores, and the factor of dP in their gradient; both rounded.

    They are rounded here, not where they are used, for the registers. Keys and queries past the end are not masked:
    they are rows of zeros, whose scores of 0 give finite numbers, to be multiplied by such a row or not to be stored.
    """
    if ACT == "softmax":
        # The score of a row of zeros may exceed the lse by far: the minimum keeps it finite.
        p = tl.exp2(tl.minimum(s * (scale * LOG2E) - lse_row[None, :], 0.0))
        if mask_kind(MASK) != "full":  # noqa: SIM102 - one is decided when this is compiled
            if (first_query < all_lo) | (first_query + BM > all_hi):
                p = masked(p, first_query, query_lo, query_hi, 1, 1, BM, MASK)
        p = p.to(DTYPE)
        return p, p
    else:
        x = s * scale
        p = activate(x, ACT, FAST_TANH)
        factor = derivative(x, ACT, FAST_TANH)
        # Masked without a branch, which would cost registers here.
        if mask_kind(MASK) != "full":
            p = masked(p, first_query, query_lo, query_hi, 1, 1, BM, MASK)
            factor = masked(factor, first_query, query_lo, query_hi, 1, 1, BM, MASK)
        return p.to(DTYPE), factor.to(DTYPE)


@triton.jit
def _reduce_dq(desc_sum, dq_tiles, dq, start_q, len_q, head, first_query, g: tl.constexpr, D: tl.constexpr,
               REDUCE: tl.constexpr):  # fmt: skip
    """Add this group's columns of a query tile's dQ to the sum in global memory, or begin the sum with them."""
    tlx.local_store(dq_tiles[g], dq)
    tlx.fence("async_shared")
    c0, c1, c2, c3 = ragged(start_q, len_q, first_query, head * D + g * (D // 2))
    tlx.async_descriptor_store(desc_sum, dq_tiles[g], [c0, c1, c2, c3], store_reduce=REDUCE)


@triton.jit
def _gradients(g: tl.constexpr, desc_sum, desc_dk, desc_dv, slots, scale, out_scale, q_tiles, do_tiles, k_tile,
               v_tile, lse_rows, delta_rows, ds_tiles, dq_tiles, out_tiles, q_full, q_empty, do_full, do_empty,
               k_full, k_empty, v_full, v_empty, ds_full, ds_empty, item_full, item_empty, H: tl.constexpr,
               GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
               DS_STAGES: tl.constexpr, MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr,
               DQ: tl.constexpr, REPLICAS: tl.constexpr):  # fmt: skip
    """Group g's 64 keys: their dK and dV, and columns ``[g D/2, (g + 1) D/2)`` of the dQ of all 128, if it is made.

    The groups meet only in the ring of dS. The dQ of a query tile is made one tile late, under the next tile's
    exponentials, so that neither waits for the other's dS.
    """
    HALF: tl.constexpr = BN // 2
    COLUMNS: tl.constexpr = D // 2
    DTYPE: tl.constexpr = tlx.dtype_of(desc_dk)
    # The factor of dP waits for it in this group's part of the dS tile where registers would not hold it as well.
    PARK: tl.constexpr = ACT != "softmax" and D == 128
    count = 0
    turn = 0
    kv_head, start_q, len_q, begin, tiles = receive_queries(slots, item_full, turn)
    while tiles > 0:
        rows_dq = tl.program_id(0) % REPLICAS * len_q if REPLICAS else start_q
        query_lo, query_hi, all_lo, all_hi = tl.zeros([HALF], tl.int32), tl.zeros([HALF], tl.int32), 0, 0
        if mask_kind(MASK) != "full":
            _, len_kv, first_key = receive_keys(slots, turn)
            query_lo, query_hi, all_lo, all_hi = query_ranges(first_key + g * HALF, len_q, len_kv, HALF, MASK)
        dk = tl.zeros([HALF, D], tl.float32)
        dv = tl.zeros([HALF, D], tl.float32)
        tlx.barrier_wait(k_full[0], turn & 1)
        tlx.barrier_wait(v_full[0], turn & 1)
        for trip in tl.range(0, GROUP * tiles, disable_licm=True):
            buf, phase = ring(count, STAGES)
            ds_buf, ds_phase = ring(count, DS_STAGES)
            # At the first query tile this is a dS of before. The product is made and dropped: a first iteration of
            # its own costs the compiler 750 bytes of spills and all overlap.
            last_buf = (count + DS_STAGES - 1) % DS_STAGES
            first_query = first_query_of(trip, begin, tiles, GROUP, BM)
            tlx.barrier_wait(q_full[buf], phase)
            s = tlx.async_dot(tlx.local_slice(k_tile[0], [g * HALF, 0], [HALF, D]), tlx.local_trans(q_tiles[buf]))
            if DQ != "none":
                if trip > 0:
                    tlx.barrier_wait(ds_full[last_buf], ((count - 1) // DS_STAGES) & 1)
                dq = tlx.async_dot(
                    tlx.local_trans(ds_tiles[last_buf]), tlx.local_slice(k_tile[0], [0, g * COLUMNS], [BN, COLUMNS])
                )
                s = tlx.async_dot_wait(1, s)
            else:
                s = tlx.async_dot_wait(0, s)
            if ACT == "softmax":
                lse_row = tlx.local_load(lse_rows[buf])
            else:
                lse_row = tl.zeros([BM], tl.float32)
            p, factor = _weights(
                s, lse_row, first_query, query_lo, query_hi, all_lo, all_hi, scale, DTYPE, BM, MASK, ACT, FAST_TANH
            )
            own_ds = tlx.local_slice(ds_tiles[ds_buf], [g * HALF, 0], [HALF, BM])
            if PARK:
                if DQ != "none":
                    tlx.barrier_wait(ds_empty[ds_buf], ds_phase ^ 1)
                tlx.local_store(own_ds, factor)
            tlx.barrier_wait(do_full[buf], phase)
            dp = tlx.async_dot(tlx.local_slice(v_tile[0], [g * HALF, 0], [HALF, D]), tlx.local_trans(do_tiles[buf]))
            if DQ != "none":
                tlx.async_descriptor_store_wait(0)
                dq = tlx.async_dot_wait(1, dq)
                if trip > 0:
                    tlx.barrier_arrive(ds_empty[last_buf], 1)
                    _reduce_dq(
                        desc_sum, dq_tiles, dq, rows_dq, len_q, query_head(trip - 1, kv_head, tiles, GROUP),
                        first_query_of(trip - 1, begin, tiles, GROUP, BM), g, D, DQ,
                    )  # fmt: skip
            dv = tlx.async_dot(p, do_tiles[buf], dv)
            dp = tlx.async_dot_wait(1, dp)
            if ACT == "softmax":
                dp -= tlx.local_load(delta_rows[buf])[None, :]
            if PARK:
                factor = tlx.local_load(own_ds, layout=_PRODUCT_64X64)
            ds = (factor.to(tl.float32) * dp).to(DTYPE)
            if DQ != "none":
                if not PARK:
                    tlx.barrier_wait(ds_empty[ds_buf], ds_phase ^ 1)
                tlx.local_store(own_ds, ds)
                tlx.fence("async_shared")
                tlx.barrier_arrive(ds_full[ds_buf], 1)
            dk = tlx.async_dot(ds, q_tiles[buf], dk)
            dv = tlx.async_dot_wait(1, dv)
            tlx.barrier_arrive(do_empty[buf], 1)
            dk = tlx.async_dot_wait(0, dk)
            tlx.barrier_arrive(q_empty[buf], 1)
            count += 1
        tlx.barrier_arrive(v_empty[0], 1)

        # Where the keys are is read now: kept from the start, it would cost registers in the loop above.
        start_kv, len_kv, first_key = receive_keys(slots, turn)
        if DQ != "none":
            last_buf, last_phase = ring(count - 1, DS_STAGES)
            tlx.barrier_wait(ds_full[last_buf], last_phase)
            dq_end = tlx.async_dot(
                tlx.local_trans(ds_tiles[last_buf]), tlx.local_slice(k_tile[0], [0, g * COLUMNS], [BN, COLUMNS])
            )
            tlx.async_descriptor_store_wait(0)
            dq_end = tlx.async_dot_wait(0, dq_end)
            tlx.barrier_arrive(ds_empty[last_buf], 1)
            tlx.barrier_arrive(k_empty[0], 1)
            _reduce_dq(
                desc_sum, dq_tiles, dq_end, rows_dq, len_q, query_head(GROUP * tiles - 1, kv_head, tiles, GROUP),
                begin + (tiles - 1) * BM, g, D, DQ,
            )  # fmt: skip
        else:
            tlx.barrier_arrive(k_empty[0], 1)
            tlx.async_descriptor_store_wait(0)

        # The next item arrives under the stores of this one, whose slot is free.
        tlx.barrier_arrive(item_empty[turn % 2], 1)
        turn += 1
        next_head, next_q, next_len_q, next_begin, next_tiles = receive_queries(slots, item_full, turn)
        # The dK of the item before left this buffer before the reductions since then left theirs.
        tlx.local_store(out_tiles[g], (dv * out_scale).to(DTYPE))
        tlx.fence("async_shared")
        c0, c1, c2, c3 = ragged(start_kv, len_kv, first_key + g * HALF, kv_head * D)
        tlx.async_descriptor_store(desc_dv, out_tiles[g], [c0, c1, c2, c3])
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(out_tiles[g], (dk * (scale * out_scale)).to(DTYPE))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(desc_dk, out_tiles[g], [c0, c1, c2, c3])
        kv_head, start_q, len_q, begin, tiles = next_head, next_q, next_len_q, next_begin, next_tiles
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv", "items"])
def backward_kv(desc_q, desc_k, desc_v, desc_do, desc_sum, desc_dk, desc_dv, row_stats, table, counter, slots,
                offsets_q, offsets_kv, num_sequences, total_q, total_kv, items, scale, out_scale, H: tl.constexpr,
                GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
                DS_STAGES: tl.constexpr, MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr,
                DQ: tl.constexpr, REPLICAS: tl.constexpr):  # fmt: skip
    """dK and dV: persistent, a work item is a key tile of a key head. DQ says what becomes of dQ / (scale out_scale).

    It is added to a sum (``"add"``); begins the sum (``""``: the first key tile of each sequence, in a launch before
    that of the others); or is not made (``"none"``). With REPLICAS the queries are shared by all sequences:
    ``offsets_q`` are those of dO, and dQ is added to one of that many sums, so that few CTAs add to the same rows.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, do_full | 1 + bytes | load: Q and lse; dO and delta | both gradient groups |
    | k_full, v_full | 1 + bytes | load, once an item | both gradient groups |
    | q_empty, do_empty | 2 | both groups, after dK; after dV | load |
    | k_empty, v_empty | 2 | both groups, after the item's last dQ; after its last dP | load |
    | ds_full | 2 | both groups, each with its half of the keys | both groups, before dQ |
    | ds_empty | 2 | both groups, after dQ | both groups, before they store the next dS |
    | item_full | 1 | load, when the slot holds an item | both groups |
    | item_empty | 2 | both groups, when the item's last product is done | load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    k_tile = tlx.local_alloc((BN, D), DTYPE, 1)
    v_tile = tlx.local_alloc((BN, D), DTYPE, 1)
    q_tiles = tlx.local_alloc((BM, D), DTYPE, STAGES)
    do_tiles = tlx.local_alloc((BM, D), DTYPE, STAGES)
    ds_tiles = tlx.local_alloc((BN, BM), DTYPE, DS_STAGES)
    dq_tiles = tlx.local_alloc((BM, D // 2), tl.float32, 2)
    out_tiles = tlx.local_alloc((BN // 2, D), DTYPE, 2)
    lse_rows = tlx.local_alloc((BM,), tl.float32, STAGES)
    delta_rows = tlx.local_alloc((BM,), tl.float32, STAGES)
    q_full = tlx.alloc_barriers(STAGES)
    q_empty = tlx.alloc_barriers(STAGES, 2)
    do_full = tlx.alloc_barriers(STAGES)
    do_empty = tlx.alloc_barriers(STAGES, 2)
    k_full = tlx.alloc_barriers(1)
    k_empty = tlx.alloc_barriers(1, 2)
    v_full = tlx.alloc_barriers(1)
    v_empty = tlx.alloc_barriers(1, 2)
    ds_full = tlx.alloc_barriers(DS_STAGES, 2)
    ds_empty = tlx.alloc_barriers(DS_STAGES, 2)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 2)
    # The first dQ of all, which is dropped, reads the last buffer.
    tlx.local_store(ds_tiles[DS_STAGES - 1], tl.zeros([BN, BM], DTYPE))
    tlx.fence("async_shared")
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(desc_q, desc_k, desc_v, desc_do, row_stats, table, counter, slots, offsets_q, offsets_kv,
                  num_sequences, total_q, total_kv, items, q_tiles, do_tiles, k_tile, v_tile, lse_rows, delta_rows,
                  q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty, H,
                  GROUP, D, BM, BN, STAGES, MASK, ACT == "softmax", REPLICAS)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            _gradients(tlx.async_task_replica_id(), desc_sum, desc_dk, desc_dv, slots, scale, out_scale, q_tiles,
                       do_tiles, k_tile, v_tile, lse_rows, delta_rows, ds_tiles, dq_tiles, out_tiles, q_full, q_empty,
                       do_full, do_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty, item_full, item_empty,
                       H, GROUP, D, BM, BN, STAGES, DS_STAGES, MASK, ACT, FAST_TANH, DQ, REPLICAS)  # fmt: skip
