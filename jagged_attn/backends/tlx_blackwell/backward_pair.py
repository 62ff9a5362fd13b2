# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The backward kernel of pairs of CTAs, where the keys stay: 128 of them in each CTA of a cluster.

The five products of ``backward``, each of both CTAs at once, so that each loads, and reads from
shared memory, half of what stands on the right. S^T, dP^T, dV and dK come out where their keys are:

    S^T = K Q^T    dP^T = V dO^T    half of the rows of Q, dO in each CTA
    dV += P^T dO    dK += dS^T Q    half of their columns; P and dS in tensor memory
    dQ = dS K                       half of the columns of all 256 keys; each CTA 64 rows of queries

dQ is the one that sums over the keys of both. Each group of ``gradients`` makes the dS of 64
queries, and sends all of it to the CTA that has their dQ, its own or the other. dK, whose dS is in
tensor memory, comes before dQ in the queue, and hides the way.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import first_query_of, key_item, query_head
from .._jit.rings import ITEM_SLOT, open_slot, ragged, ring, slot_of
from .._jit.tlx import tlx
from .backward import CHUNK, OUT_CHUNK, bring, bring_statistics, gradients, receive, reduce_dq


@triton.jit
def _publish(item, turn, hand):
    """Hand an item to the roles of both CTAs; the load role needs a number more than the others."""
    slots, item_full, item_empty = hand
    buf, phase = ring(turn, 2)
    tlx.barrier_wait(item_empty[buf], phase ^ 1)
    slot = slot_of(slots, buf, ITEM_SLOT)
    for i in tl.static_range(8):
        tl.store(slot + i, item[i])
    # In the other CTA's slots, which are not used.
    tl.store(slot + 2 * ITEM_SLOT, item[8])
    # An arrival in the other CTA does not wait for stores to reach the memory of both.
    tlx.fence("gpu")
    tlx.barrier_arrive(item_full[buf], 1)
    tlx.barrier_arrive(item_full[buf], 1, remote_cta_rank=1)


@triton.jit
def _take(number, turn, rank, work, table, rows, hand, C: tl.constexpr):
    """The item of this turn, which the first CTA looks up."""
    if rank == 0:
        item = key_item(number, work, table, *rows, C.heads // C.group, C.rows, 2 * C.keys, C.mask)
        _publish(item, turn, hand)
    else:
        slot = open_slot(hand[0], hand[1], turn, ITEM_SLOT)
        block = tl.load(slot + 2 * ITEM_SLOT, volatile=True)
        item = receive(hand, turn, 0, C) + (block,)
    return item


@triton.jit
def _load_pair(maps, row_stats, table, counter, rows, work, rank, tiles, loads, hand,
               C: tl.constexpr):  # fmt: skip
    """Hand out pairs of key tiles, each looked up while the one before is loaded; load both sides.

    A query tile comes twice, by halves of its rows for the scores and of its columns for the sums,
    in the order in which buffers come free; so do the keys, for dQ.
    """
    desc_q, desc_k, desc_v, desc_do, desc_qc, desc_kc, desc_doc = maps
    q_rows, q_cols, do_rows, do_cols, k_tile, k_cols, v_tile, stats = tiles
    q_full, q_empty, qc_full, qc_empty, do_full, do_empty, doc_full, doc_empty = loads[:8]
    k_full, k_empty, kc_full, kc_empty, v_full, v_empty, st_full, st_empty = loads[8:]
    # A tile of queries, and of the keys of one CTA.
    BYTES: tl.constexpr = C.rows * C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    count = 0
    turn = 0
    item = _take(tl.program_id(0) // 2, turn, rank, work, table, rows, hand, C)
    while item[4] > 0:
        kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key, block = item
        next = item
        # Keys that no query sees are not loaded: NaN may lie there, and their gradients are 0.
        keys = tl.where(len_q > 0, len_kv, 0)
        # Shared queries are not at their sequence's place, but the first rows of all.
        rows_q = start_q * 0 if C.replicas else start_q
        own_key = first_key + rank * C.keys
        kv_column = kv_head * C.dim
        own_column = kv_column + rank * (C.dim // 2)
        kv_phase = turn & 1
        for trip in range(C.group * n):
            head = query_head(trip, kv_head, n, C.group)
            column = head * C.dim
            first = first_query_of(trip, begin, n, C.group, C.rows)
            own = first + rank * (C.rows // 2)
            phase = count & 1
            if trip == 0:
                bring(desc_k, k_tile[0], k_full[0], k_empty[0], kv_phase, start_kv, keys, own_key,
                      kv_column, rank, 2 * BYTES, C)  # fmt: skip
            bring(desc_q, q_rows[0], q_full[0], q_empty[0], phase, rows_q, len_q, own, column, rank,
                  BYTES, C)  # fmt: skip
            if C.softmax:
                at = tl.cast(block + (first - begin) // C.rows, tl.int64) * C.heads + head
                bring_statistics(row_stats + at * (2 * C.rows), stats[0], st_full[0], st_empty[0],
                                 phase, 8 * C.rows)  # fmt: skip
            if trip == 0:
                bring(desc_v, v_tile[0], v_full[0], v_empty[0], kv_phase, start_kv, keys, own_key,
                      kv_column, rank, 2 * BYTES, C)  # fmt: skip
            bring(desc_do, do_rows[0], do_full[0], do_empty[0], phase, start_q, len_q, own, column,
                  rank, BYTES, C)  # fmt: skip
            column += rank * (C.dim // 2)
            bring(desc_doc, do_cols[0], doc_full[0], doc_empty[0], phase, start_q, len_q, first,
                  column, rank, BYTES, C)  # fmt: skip
            bring(desc_qc, q_cols[0], qc_full[0], qc_empty[0], phase, rows_q, len_q, first, column,
                  rank, BYTES, C)  # fmt: skip
            if trip == 0:
                bring(desc_kc, k_cols[0], kc_full[0], kc_empty[0], kv_phase, start_kv, keys,
                      first_key, own_column, rank, 2 * BYTES, C)  # fmt: skip
                corner = ragged(start_kv, keys, first_key + C.keys, own_column)
                tlx.async_descriptor_load(desc_kc, k_cols[1], corner, kc_full[0], two_ctas=True)
            # When two tiles are under way: the look-up takes as long as one.
            if trip == tl.minimum(C.group * n - 1, 1):
                number = 0
                if rank == 0:
                    number = tl.num_programs(0) // 2 + tl.atomic_add(counter, 1)
                next = _take(number, turn + 1, rank, work, table, rows, hand, C)
            count += 1
        turn += 1
        item = next


@triton.jit
def _mma_pair(tiles, tensor, loads, scores, outs, hand, C: tl.constexpr):
    """Issue S and dP of a tile, and the other products of the tile before it, for both CTAs."""
    q_rows, q_cols, do_rows, do_cols, k_tile, k_cols, v_tile, ds_tiles = tiles
    s_tile, p_tiles, dp_tile, ds_columns, dv_tile, dk_tile, dq_tile = tensor
    q_full, q_empty, qc_full, qc_empty, do_full, do_empty, doc_full, doc_empty = loads[:8]
    k_full, k_empty, kc_full, kc_empty, v_full, v_empty = loads[8:14]
    s_full, _, p_full, _, dp_full, ds_full, ds_whole, ds_passed = scores
    dq_full, dq_empty, dv_full, dv_empty, dk_full, dk_empty = outs
    HALF: tl.constexpr = C.rows // 2
    count = 0
    turn = 0
    _, _, _, _, n, _, _, _ = receive(hand, turn, 0, C)
    while n > 0:
        trips = C.group * n
        kv_phase = turn & 1
        for trip in range(trips + 1):
            phase = count & 1
            last = phase ^ 1
            if trip > 0:
                tlx.barrier_wait(doc_full[0], last)
                tlx.barrier_wait(p_full[0], last)
                tlx.barrier_wait(dv_empty[0], kv_phase ^ 1)
                for g in tl.static_range(2):
                    part = tlx.local_slice(do_cols[0], [g * HALF, 0], [HALF, C.dim // 2])
                    tlx.async_dot(p_tiles[2 * g], part, dv_tile[0], use_acc=(trip > 1) | (g > 0),
                                  two_ctas=True, force_async=True)  # fmt: skip
                tlx.tcgen05_commit(doc_empty[0], two_ctas=True)
                if trip == trips:
                    tlx.tcgen05_commit(dv_full[0], two_ctas=True)
            if trip < trips:
                tlx.barrier_wait(k_full[0], kv_phase)
                tlx.barrier_wait(q_full[0], phase)
                tlx.async_dot(k_tile[0], tlx.local_trans(q_rows[0]), s_tile[0], use_acc=False,
                              mBarriers=[s_full[0], q_empty[0]], two_ctas=True)  # fmt: skip
                if trip + 1 == trips:
                    tlx.tcgen05_commit(k_empty[0], two_ctas=True)
            if trip > 0:
                tlx.barrier_wait(qc_full[0], last)
                tlx.barrier_wait(ds_full[0], last)
                tlx.barrier_wait(dk_empty[0], kv_phase ^ 1)
                for g in tl.static_range(2):
                    part = tlx.local_slice(q_cols[0], [g * HALF, 0], [HALF, C.dim // 2])
                    tlx.async_dot(ds_columns[2 * g], part, dk_tile[0], use_acc=(trip > 1) | (g > 0),
                                  two_ctas=True, force_async=True)  # fmt: skip
                tlx.tcgen05_commit(qc_empty[0], two_ctas=True)
                if trip == trips:
                    tlx.tcgen05_commit(dk_full[0], two_ctas=True)
                tlx.barrier_wait(kc_full[0], kv_phase)
                _await_ds(ds_whole, last, C)
                tlx.barrier_wait(ds_passed[0], last)
                # Over dS in tensor memory, which dK has read.
                for h in tl.static_range(2):
                    tlx.async_dot(tlx.local_trans(ds_tiles[h]), k_cols[h], dq_tile[0],
                                  use_acc=h > 0, two_ctas=True, force_async=True)  # fmt: skip
                if trip == trips:
                    tlx.tcgen05_commit(kc_empty[0], two_ctas=True)
                tlx.tcgen05_commit(dq_full[0], two_ctas=True)
            if trip < trips:
                tlx.barrier_wait(v_full[0], kv_phase)
                tlx.barrier_wait(do_full[0], phase)
                tlx.barrier_wait(dq_empty[0], last)
                tlx.async_dot(v_tile[0], tlx.local_trans(do_rows[0]), dp_tile[0], use_acc=False,
                              mBarriers=[dp_full[0], do_empty[0]], two_ctas=True)  # fmt: skip
                if trip + 1 == trips:
                    tlx.tcgen05_commit(v_empty[0], two_ctas=True)
                count += 1
        turn += 1
        _, _, _, _, n, _, _, _ = receive(hand, turn, 0, C)


@triton.jit
def _await_ds(ds_whole, phase, C: tl.constexpr):
    """Wait until both CTAs have sent what this one's dQ takes, and show it to the tensor core."""
    tlx.barrier_expect_bytes(ds_whole[0], 2 * C.rows * C.keys)
    tlx.barrier_wait(ds_whole[0], phase)
    tlx.fence("async_shared")


@triton.jit
def _relay(ds_whole, ds_passed, hand, C: tl.constexpr):
    """Tell the first CTA, which cannot wait for a barrier of the second, that dS has come there."""
    count = 0
    turn = 0
    _, _, _, _, n, _, _, _ = receive(hand, turn, 0, C)
    while n > 0:
        for _trip in range(C.group * n):
            _await_ds(ds_whole, count & 1, C)
            tlx.barrier_arrive(ds_passed[0], 1, remote_cta_rank=0)
            count += 1
        turn += 1
        _, _, _, _, n, _, _, _ = receive(hand, turn, 0, C)


@triton.jit(do_not_specialize=["num_sequences", "rows_q", "total_kv", "work"])
def backward_pair(desc_q, desc_k, desc_v, desc_do, desc_qc, desc_kc, desc_doc, desc_dq, desc_dk,
                  desc_dv, row_stats, table, counters, turns, slots, offsets_q, offsets_kv,
                  num_sequences, rows_q, total_kv, work, scale, out_scale,
                  C: tl.constexpr):  # fmt: skip
    """As ``backward_kv`` with keys that stay; an item is a pair of key tiles, ``table`` of those.

    The first CTA hands out the items and issues the products of both. Its barriers marked * take as
    many arrivals, or as many bytes, from each CTA; products and commits arrive in both.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, do_full, qc_full, doc_full, k_full, kc_full, v_full | 1 + bytes * | load | mma |
    | q_empty, do_empty | 1 | mma: S, dP is complete | load |
    | qc_empty, doc_empty | 1 | mma: dK, dV with it is complete | load |
    | k_empty, kc_empty, v_empty | 1 | mma: the item's last S, dQ, dP is complete | load |
    | st_full | 1 + bytes | load: lse and delta, for a softmax | both gradient groups |
    | st_empty | 2 | both groups have read them | load |
    | s_full, dp_full | 1 | mma: S, dP is complete | both groups |
    | p_full, ds_full | 2 * | both groups: P, dS is written to tensor memory | mma |
    | ds_whole | 1 + bytes | mma or relay, which expects them; both CTAs' group of it | mma, relay |
    | ds_passed | 1 | relay, of the second CTA: its ds_whole | mma |
    | dq_full | 1 | mma: dQ is complete | reduce_dq |
    | dq_empty | 1 * | reduce_dq has read it | mma |
    | dv_full, dk_full | 1 | mma: complete for the item | reduce_dq |
    | dv_empty, dk_empty | 1 * | reduce_dq has read it | mma |
    | item_full | 1 | load of the first CTA, when the slot holds an item | all other roles |
    | item_empty | 9 | mma or relay, both groups, reduce_dq, and load of the second CTA | load |

    The queue of products is in order, and what is complete is complete in both CTAs: so dP of a
    tile says that dS, here and there and in tensor memory, has been read, and its bytes that come
    next count for the next phase of ds_whole. P over S and dQ over dS need no barrier either.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    half: tl.constexpr = C.rows // 2
    width: tl.constexpr = C.dim // 2
    q_rows = tlx.local_alloc((half, C.dim), DTYPE, 1)
    q_cols = tlx.local_alloc((C.rows, width), DTYPE, 1)
    do_rows = tlx.local_alloc((half, C.dim), DTYPE, 1)
    do_cols = tlx.local_alloc((C.rows, width), DTYPE, 1)
    k_tile = tlx.local_alloc((C.keys, C.dim), DTYPE, 1)
    k_cols = tlx.local_alloc((C.keys, width), DTYPE, 2)
    v_tile = tlx.local_alloc((C.keys, C.dim), DTYPE, 1)
    ds_tiles = tlx.local_alloc((C.keys, half), DTYPE, 2)
    stats = tlx.local_alloc((2 * C.rows,), tl.float32, 1)
    staging = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    dq_tiles = tlx.local_alloc((C.rows, CHUNK), tl.float32, C.dq_stages, reuse=staging)
    out_tiles = tlx.local_alloc((C.keys, OUT_CHUNK), DTYPE, C.dq_stages, reuse=staging)
    s_tile = tlx.local_alloc((C.keys, C.rows), tl.float32, 1, tlx.storage_kind.tmem)
    p_tiles = tlx.local_alloc((C.keys, half), DTYPE, 4, tlx.storage_kind.tmem, reuse=s_tile)
    over_dp = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    dp_tile = tlx.local_alloc((C.keys, C.rows), tl.float32, 1, tlx.storage_kind.tmem, reuse=over_dp)
    ds_columns = tlx.local_alloc((C.keys, half), DTYPE, 4, tlx.storage_kind.tmem, reuse=over_dp)
    # dQ as the product has it, and as it lies there.
    dq_tile = tlx.local_alloc((half, C.dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=over_dp)
    dq_lanes = tlx.local_alloc((C.rows, width), tl.float32, 1, tlx.storage_kind.tmem, reuse=over_dp)
    dv_tile = tlx.local_alloc((C.keys, C.dim), tl.float32, 1, tlx.storage_kind.tmem)
    dk_tile = tlx.local_alloc((C.keys, C.dim), tl.float32, 1, tlx.storage_kind.tmem)
    q_full, q_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    qc_full, qc_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    do_full, do_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    doc_full, doc_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    k_full, k_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    kc_full, kc_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    v_full, v_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    st_full, st_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1, 2)
    s_full, dp_full = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    p_full, ds_full = tlx.alloc_barriers(1, 4), tlx.alloc_barriers(1, 4)
    ds_whole, ds_passed = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    dq_full, dq_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1, 2)
    dv_full, dv_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1, 2)
    dk_full, dk_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1, 2)
    item_full, item_empty = tlx.alloc_barriers(2), tlx.alloc_barriers(2, 9)
    rank = tlx.cluster_cta_rank()
    tiles = (q_rows, q_cols, do_rows, do_cols, k_tile, k_cols, v_tile)
    tensor = (s_tile, p_tiles, dp_tile, ds_columns)
    loads = (q_full, q_empty, qc_full, qc_empty, do_full, do_empty, doc_full, doc_empty,
             k_full, k_empty, kc_full, kc_empty, v_full, v_empty, st_full, st_empty)  # fmt: skip
    scores = (s_full, None, p_full, None, dp_full, ds_full, ds_whole)
    outs = (dq_full, dq_empty, dv_full, dv_empty, dk_full, dk_empty)
    # The slots of the first CTA serve both.
    hand = (slots - rank * 2 * ITEM_SLOT, item_full, item_empty)
    rows = (offsets_q, offsets_kv, num_sequences, rows_q, total_kv)
    maps_in = (desc_q, desc_k, desc_v, desc_do, desc_qc, desc_kc, desc_doc)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            reduce_dq((desc_dq, desc_dk, desc_dv), turns, rank, scale, out_scale,
                      (dv_tile, dk_tile, dq_lanes), dq_tiles, out_tiles, outs, hand, C)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=C.registers, replicate=2):
            gradients(tlx.async_task_replica_id(), rank, scale, (stats, ds_tiles), tensor,
                      (st_full, st_empty), scores, hand, DTYPE, C)  # fmt: skip
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            if rank == 0:
                _mma_pair(tiles + (ds_tiles,), tensor + (dv_tile, dk_tile, dq_tile), loads,
                     scores + (ds_passed,), outs, hand, C)  # fmt: skip
            else:
                _relay(ds_whole, ds_passed, hand, C)
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            _load_pair(maps_in, row_stats, table, counters, rows, work, rank, tiles + (stats,),
                       loads, hand, C)  # fmt: skip
