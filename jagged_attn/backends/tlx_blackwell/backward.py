# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The backward kernel for Blackwell: one side of the attention stays on chip, the other passes by.

Self and cross attention: a CTA keeps a tile of 128 keys, and the queries that see it pass by; dK
and dV add up in tensor memory, and each query tile's dQ is added to an fp32 sum in global memory.
Shared queries (``C.shared``; up to 128 of them): a CTA keeps the queries of one head for its whole
life, and the keys of all sequences pass by, once; dQ adds up in tensor memory and leaves at the
end, and the dK and dV of a tile are complete at once. Either way there are five products a tile:

    S^T = K Q^T    dP^T = V dO^T    dV (+)= P^T dO    dK (+)= dS^T Q    dQ (+)= dS K

Scores stand transposed, keys in the 128 lanes of tensor memory, so that P and dS are at once what
the products with dO and Q want on their left. As on Hopper, ``out_scale`` is left out until the
end: delta comes divided by it, and dV, dK and dQ are multiplied by it once.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import first_query_of, key_item, masked, query_head, query_ranges
from .._jit.backward_shared import key_run, statistics
from .._jit.rings import ITEM_SLOT, bulk_groups_done, next_item, publish, ragged, read_item, ring
from .._jit.scores import LOG2E, activate, derivative, key_range, mask_kind
from .._jit.tlx import tlx
from .pairs import arrive

# Columns of tensor memory that a thread, which owns a lane, takes at a time: a row vector such as
# lse costs it a register a column.
CHUNK = tl.constexpr(32)
# Columns of dK and dV that leave together: a row of 128 bytes, like 32 columns of the fp32 dQ.
OUT_CHUNK = tl.constexpr(64)


@triton.jit
def bring(desc, tile, full, empty, phase, start, length, row, column, rank, BYTES: tl.constexpr,
          C: tl.constexpr):  # fmt: skip
    """Load a tile by TMA once its buffer is free; what lies past the end of the rows is 0.

    Of a pair of CTAs, each loads a part, and BYTES, of both, arrive at the barrier of the first.
    """
    c0, c1, c2, c3 = ragged(start, length, row, column)
    tlx.barrier_wait(empty, phase ^ 1)
    if C.two_ctas:
        tlx.barrier_expect_bytes(full, BYTES, pred=rank == 0)
    else:
        tlx.barrier_expect_bytes(full, BYTES)
    tlx.async_descriptor_load(desc, tile, [c0, c1, c2, c3], full, two_ctas=C.two_ctas)


@triton.jit
def bring_statistics(at, stat, full, empty, phase, BYTES: tl.constexpr):
    """Load lse and delta of a query tile."""
    tlx.barrier_wait(empty, phase ^ 1)
    tlx.barrier_expect_bytes(full, BYTES)
    tlx.async_load(at, stat, bulk=True, barrier=full)


@triton.jit
def _load(maps, row_stats, table, counter, rows, items, tiles, loads, hand, C: tl.constexpr):
    """Hand out key tiles, each looked up while the one before is loaded; bring K, V, Q, dO."""
    desc_q, desc_k, desc_v, desc_do = maps
    q_tiles, do_tiles, k_tiles, v_tiles, stats, _ = tiles
    q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, st_full, st_empty = loads
    slots, item_full, item_empty = hand
    KV_HEADS: tl.constexpr = C.heads // C.group
    BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    count = 0
    turn = 0
    item = key_item(tl.program_id(0), items, table, *rows, KV_HEADS, C.rows, C.keys, C.mask)
    publish(slots, item_full, item_empty, turn, item[:8], ITEM_SLOT)
    while item[4] > 0:
        kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key, block = item
        next = item
        # Keys that no query sees are not loaded: NaN may lie there, and their gradients are 0.
        keys = tl.where(len_q > 0, len_kv, 0)
        # Shared queries are not at their sequence's place, but the first rows of all.
        rows_q = start_q * 0 if C.replicas else start_q
        kv, kv_phase = ring(turn, C.kv_stages)
        for trip in range(C.group * n):
            head = query_head(trip, kv_head, n, C.group)
            first = first_query_of(trip, begin, n, C.group, C.rows)
            if trip == 0:
                bring(desc_k, k_tiles[kv], k_full[kv], k_empty[kv], kv_phase, start_kv, keys,
                      first_key, kv_head * C.dim, 0, C.keys * BYTES, C)  # fmt: skip
            buf, phase = ring(count, C.q_stages)
            bring(desc_q, q_tiles[buf], q_full[buf], q_empty[buf], phase, rows_q, len_q, first,
                  head * C.dim, 0, C.rows * BYTES, C)  # fmt: skip
            if C.softmax:
                at = tl.cast(block + (first - begin) // C.rows, tl.int64) * C.heads + head
                bring_statistics(row_stats + at * (2 * C.rows), stats[buf], st_full[buf],
                                 st_empty[buf], phase, 8 * C.rows)  # fmt: skip
            if trip == 0:
                bring(desc_v, v_tiles[kv], v_full[kv], v_empty[kv], kv_phase, start_kv, keys,
                      first_key, kv_head * C.dim, 0, C.keys * BYTES, C)  # fmt: skip
            buf, phase = ring(count, C.do_stages)
            bring(desc_do, do_tiles[buf], do_full[buf], do_empty[buf], phase, start_q, len_q,
                  first, head * C.dim, 0, C.rows * BYTES, C)  # fmt: skip
            # When two tiles are under way: the look-up takes as long as one.
            if trip == tl.minimum(C.group * n - 1, 1):
                new = next_item(counter)
                next = key_item(new, items, table, *rows, KV_HEADS, C.rows, C.keys, C.mask)
                publish(slots, item_full, item_empty, turn + 1, next[:8], ITEM_SLOT)
            count += 1
        turn += 1
        item = next


@triton.jit
def _load_keys(maps, row_stats, table, counters, rows, chunk_tiles, tiles, loads, hand,
               C: tl.constexpr):  # fmt: skip
    """Take chunks of the tile table, hand out their runs of one sequence; bring Q, K, V, dO.

    A chunk comes from the head's counter, or, for a dQ that repeats bit for bit, by turns.
    """
    desc_q, desc_k, desc_v, desc_do = maps
    q_tiles, do_tiles, k_tiles, v_tiles, stats, _ = tiles
    q_full, _, do_full, do_empty, k_full, k_empty, v_full, v_empty, st_full, st_empty = loads
    slots, item_full, item_empty = hand
    offsets, num_sequences, num_queries, total_kv = rows
    BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    head = tl.program_id(0) % C.heads
    column = head * C.dim
    entries = tl.load(counters + C.heads)
    # The first chunk of each CTA is its own number among the CTAs of its head.
    chunk = tl.program_id(0) // C.heads
    tile = chunk * chunk_tiles
    end = tl.minimum(tile + chunk_tiles, entries)
    count = 0
    turn = 0
    b, start, length, keys, first, n = key_run(
        table, offsets, tile, end, num_sequences, total_kv, C.keys
    )  # fmt: skip
    publish(slots, item_full, item_empty, turn, (head, 0, 0, 0, n, start, length, first), ITEM_SLOT)
    if n > 0:
        tlx.barrier_expect_bytes(q_full[0], C.rows * BYTES)
        tlx.async_descriptor_load(desc_q, q_tiles[0], [0, column], q_full[0])
    while n > 0:
        for trip in range(n):
            buf, phase = ring(count, C.kv_stages)
            # V first: its buffer comes free before K's.
            bring(desc_v, v_tiles[buf], v_full[buf], v_empty[buf], phase, start, keys,
                  first + trip * C.keys, column, 0, C.keys * BYTES, C)  # fmt: skip
            bring(desc_k, k_tiles[buf], k_full[buf], k_empty[buf], phase, start, keys,
                  first + trip * C.keys, column, 0, C.keys * BYTES, C)  # fmt: skip
            if trip == 0:
                # After K and V, which need not wait for the run before.
                buf, phase = ring(turn, C.do_stages)
                bring(desc_do, do_tiles[buf], do_full[buf], do_empty[buf], phase, b * num_queries,
                      tl.where(b < num_sequences, num_queries, 0), 0, column, 0,
                      C.rows * BYTES, C)  # fmt: skip
                if C.softmax:
                    bring_statistics(statistics(row_stats, b, head, C.heads, C.rows), stats[buf],
                                     st_full[buf], st_empty[buf], phase, 8 * C.rows)  # fmt: skip
            count += 1
        tile += n
        if tile >= end:
            chunk += tl.num_programs(0) // C.heads
            if C.dynamic:
                chunk = tl.num_programs(0) // C.heads + tl.atomic_add(counters + head, 1)
            tile = chunk * chunk_tiles
            end = tl.minimum(tile + chunk_tiles, entries)
        turn += 1
        b, start, length, keys, first, n = key_run(
            table, offsets, tile, end, num_sequences, total_kv, C.keys
        )  # fmt: skip
        publish(slots, item_full, item_empty, turn, (head, 0, 0, 0, n, start, length, first),
                ITEM_SLOT)  # fmt: skip


@triton.jit
def receive(hand, turn, rank, C: tl.constexpr):
    """The item of this turn: key head; queries, first, tiles; keys, first. No tiles: the end.

    Of a pair of CTAs, the first key is that of this CTA.
    """
    slots, item_full, item_empty = hand
    kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key = read_item(
        slots, item_full, turn)  # fmt: skip
    arrive(item_empty[turn % 2], C)
    return kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key + rank * C.keys


@triton.jit
def _p_index(g: tl.constexpr, C: tl.constexpr):
    """Which tile of P is group g's: its own, or the first half of the columns of its scores."""
    return g if C.own_p else 2 * g


@triton.jit
def _scores(count, k_tile, q_tile, k_full, k_phase, q_full, q_phase, s_tile, s_full, s_empty,
            C: tl.constexpr):  # fmt: skip
    """S^T of a tile. Where P lies over S, the queue has read it by now."""
    tlx.barrier_wait(k_full, k_phase)
    tlx.barrier_wait(q_full, q_phase)
    if C.own_p:
        tlx.barrier_wait(s_empty[0], (count & 1) ^ 1)
    tlx.async_dot(k_tile, tlx.local_trans(q_tile), s_tile[0], use_acc=False, mBarriers=[s_full[0]])


@triton.jit
def _mma(tiles, tensor, loads, scores, outs, hand, C: tl.constexpr):
    """Issue S and dP of a tile, and the other products of the tile before it."""
    q_tiles, do_tiles, k_tiles, v_tiles, _, ds_tile = tiles
    s_tile, p_tiles, dp_tile, dv_tile, dk_tile, dq_tile = tensor
    q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, _, _ = loads
    s_full, s_empty, p_full, p_empty, dp_full, ds_full, _ = scores
    dq_full, dq_empty, dv_full, dv_empty, dk_full, dk_empty = outs
    HALF: tl.constexpr = C.rows // 2
    count = 0
    turn = 0
    _, _, _, _, n, _, _, _ = receive(hand, turn, 0, C)
    while n > 0:
        trips = C.group * n
        for trip in range(trips + 1):
            q, q_phase = ring(0 if C.shared else count, C.q_stages)
            do, do_phase = ring(turn if C.shared else count, C.do_stages)
            kv, kv_phase = ring(count if C.shared else turn, C.kv_stages)
            last = count - 1
            if C.scores == "first" and trip < trips:
                _scores(count, k_tiles[kv], q_tiles[q], k_full[kv], kv_phase, q_full[q], q_phase,
                        s_tile, s_full, s_empty, C)  # fmt: skip
            if trip > 0:
                last_do = do if C.shared else last % C.do_stages
                fill = last if C.shared else turn
                tlx.barrier_wait(p_full[0], last & 1)
                tlx.barrier_wait(dv_empty[0], (fill & 1) ^ 1)
                # In two halves: each group's queries have a tile of P.
                low = tlx.local_slice(do_tiles[last_do], [0, 0], [HALF, C.dim])
                high = tlx.local_slice(do_tiles[last_do], [HALF, 0], [HALF, C.dim])
                more = False if C.shared else trip > 1
                tlx.async_dot(p_tiles[_p_index(0, C)], low, dv_tile[0], use_acc=more,
                              force_async=True)  # fmt: skip
                tlx.async_dot(p_tiles[_p_index(1, C)], high, dv_tile[0], use_acc=True,
                              force_async=True)  # fmt: skip
                if C.own_p:
                    tlx.tcgen05_commit(p_empty[0])
                if not C.shared or trip == trips:
                    tlx.tcgen05_commit(do_empty[last_do])
                if C.shared or trip == trips:
                    tlx.tcgen05_commit(dv_full[0])
            if C.scores == "middle" and trip < trips:
                _scores(count, k_tiles[kv], q_tiles[q], k_full[kv], kv_phase, q_full[q], q_phase,
                        s_tile, s_full, s_empty, C)  # fmt: skip
            if trip > 0:
                last_q = 0 if C.shared else last % C.q_stages
                last_kv = last % C.kv_stages if C.shared else kv
                fill = last if C.shared else turn
                tlx.barrier_wait(ds_full[0], last & 1)
                if not C.shared and C.over_dp == "none":
                    tlx.barrier_wait(dq_empty[0], (last & 1) ^ 1)
                more = last > 0 if C.shared else False
                tlx.async_dot(tlx.local_trans(ds_tile[0]), k_tiles[last_kv], dq_tile[0],
                              use_acc=more, force_async=True)  # fmt: skip
                if not C.shared:
                    tlx.tcgen05_commit(dq_full[0])
                tlx.barrier_wait(dk_empty[0], (fill & 1) ^ 1)
                more = False if C.shared else trip > 1
                tlx.async_dot(ds_tile[0], q_tiles[last_q], dk_tile[0], use_acc=more,
                              force_async=True)  # fmt: skip
                if not C.shared:
                    tlx.tcgen05_commit(q_empty[last_q])
                    if trip == trips:
                        tlx.tcgen05_commit(k_empty[kv])
                if C.shared or trip == trips:
                    tlx.tcgen05_commit(dk_full[0])
            if C.scores == "last" and trip < trips:
                _scores(count, k_tiles[kv], q_tiles[q], k_full[kv], kv_phase, q_full[q], q_phase,
                        s_tile, s_full, s_empty, C)  # fmt: skip
            if trip < trips:
                tlx.barrier_wait(v_full[kv], kv_phase)
                tlx.barrier_wait(do_full[do], do_phase)
                # Where dQ or dK of the tile before lay over dP, it has to be read.
                if C.over_dp == "dq":
                    tlx.barrier_wait(dq_empty[0], (count & 1) ^ 1)
                if C.over_dp == "dk":
                    tlx.barrier_wait(dk_empty[0], (count & 1) ^ 1)
                tlx.async_dot(v_tiles[kv], tlx.local_trans(do_tiles[do]), dp_tile[0], use_acc=False,
                              mBarriers=[dp_full[0]])  # fmt: skip
                if not C.shared and trip + 1 == trips:
                    tlx.tcgen05_commit(v_empty[kv])
                count += 1
        turn += 1
        _, _, _, _, n, _, _, _ = receive(hand, turn, 0, C)


@triton.jit
def _weights(s, lse, partial, first_query, query_lo, query_hi, scale, DTYPE: tl.constexpr,
             C: tl.constexpr):  # fmt: skip
    """From scores ``[keys, CHUNK queries]``: P, and the factor of dP in their gradient; rounded.

    Rows past the end of a sequence are zeros, with scores of 0, and are not masked: what they give
    is finite and meets such a row again, or is not stored.
    """
    if C.softmax:
        # The score of a row of zeros may exceed the lse by far: the minimum keeps it finite.
        p = tl.math.exp2(tl.minimum(s * (scale * LOG2E) - lse[None, :], 0.0))
        factor = p
    else:
        p = activate(s * scale, C.activation, C.fast_tanh)
        factor = derivative(s * scale, C.activation, C.fast_tanh)
    if mask_kind(C.mask) != "full":  # noqa: SIM102 - one is decided when this is compiled
        if partial:
            p = masked(p, first_query, query_lo, query_hi, 1, 1, CHUNK, C.mask)
            factor = masked(factor, first_query, query_lo, query_hi, 1, 1, CHUNK, C.mask)
    return p.to(DTYPE), factor.to(DTYPE)


@triton.jit
def gradients(g: tl.constexpr, rank, scale, tiles, tensor, loads, scores, hand,
              DTYPE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """P and dS of half of each tile's queries: out of tensor memory, rounded, and back on chip.

    Only tiles that an end of the mask's ranges crosses go through the mask: a few at the ends of an
    item. The others are its unmasked main part.

    Of a pair of CTAs, dS goes to tensor memory, for dK, and to the CTA that has these queries' dQ.
    """
    stats, ds_tiles = tiles
    s_tile, p_tiles, dp_tile, ds_columns = tensor
    st_full, st_empty = loads
    s_full, s_empty, p_full, p_empty, dp_full, ds_full, ds_whole = scores
    OWN: tl.constexpr = g * (C.rows // 2)
    DELTA: tl.constexpr = C.rows + OWN
    CHUNKS: tl.constexpr = C.rows // 2 // CHUNK
    count = 0
    turn = 0
    _, _, len_q, begin, n, _, len_kv, first_key = receive(hand, turn, rank, C)
    while n > 0:
        lo, hi, all_lo, all_hi = 0, 0, 0, 0
        if mask_kind(C.mask) != "full":
            lo, hi, all_lo, all_hi = query_ranges(first_key, len_q, len_kv, C.keys, C.mask)
        for trip in tl.range(0, C.group * n, disable_licm=True):
            buf, st_phase = ring(turn if C.shared else count, C.st_stages)
            stat = stats[buf]
            phase = count & 1
            first = first_query_of(trip, begin, n, C.group, C.rows) + OWN
            partial = (first < all_lo) | (first + C.rows // 2 > all_hi)
            if C.softmax:
                tlx.barrier_wait(st_full[buf], st_phase)
            tlx.barrier_wait(s_full[0], phase)
            early = ()
            if C.own_p:
                for k in tl.static_range(CHUNKS):
                    s = tlx.local_load(tlx.subslice(s_tile[0], OWN + k * CHUNK, CHUNK))
                    early = early + (s,)
                tlx.barrier_arrive(s_empty[0], 1)
                tlx.barrier_wait(p_empty[0], phase ^ 1)
            factors = ()
            for k in tl.static_range(CHUNKS):
                lse = 0.0
                if C.softmax:
                    lse = tlx.local_load(tlx.local_slice(stat, [OWN + k * CHUNK], [CHUNK]))
                if C.own_p:
                    s = early[k]
                else:
                    s = tlx.local_load(tlx.subslice(s_tile[0], OWN + k * CHUNK, CHUNK))
                p, factor = _weights(s, lse, partial, first + k * CHUNK, lo, hi, scale, DTYPE, C)
                # Over the scores, a chunk of P takes half the columns of one that has been read.
                tlx.local_store(tlx.subslice(p_tiles[_p_index(g, C)], k * CHUNK, CHUNK), p)
                factors = factors + (factor,)
            arrive(p_full[0], C)
            tlx.barrier_wait(dp_full[0], phase)
            for k in tl.static_range(CHUNKS):
                ds = tlx.local_load(tlx.subslice(dp_tile[0], OWN + k * CHUNK, CHUNK))
                if C.softmax:
                    delta = tlx.local_load(tlx.local_slice(stat, [DELTA + k * CHUNK], [CHUNK]))
                    ds = ds - delta[None, :]
                rounded = (factors[k].to(tl.float32) * ds).to(DTYPE)
                if C.two_ctas:
                    # Over dP as P is over S.
                    tlx.local_store(tlx.subslice(ds_columns[2 * g], k * CHUNK, CHUNK), rounded)
                    part = tlx.local_slice(ds_tiles[rank], [0, k * CHUNK], [C.keys, CHUNK])
                    tlx.async_remote_shmem_store(part, rounded, g, ds_whole[0])
                else:
                    part = tlx.local_slice(ds_tiles[0], [0, OWN + k * CHUNK], [C.keys, CHUNK])
                    tlx.local_store(part, rounded)
            if not C.two_ctas:
                tlx.fence("async_shared")
            arrive(ds_full[0], C)
            if C.softmax:  # noqa: SIM102
                if not C.shared or trip + 1 == n:
                    tlx.barrier_arrive(st_empty[buf], 1)
            count += 1
        turn += 1
        _, _, len_q, begin, n, _, len_kv, first_key = receive(hand, turn, rank, C)


@triton.jit
def _round(tile, accumulator, first: tl.constexpr, factor, DTYPE: tl.constexpr,
           COLUMNS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Columns of dK or dV to shared memory."""
    for k in tl.static_range(COLUMNS // CHUNK):
        x = tlx.local_load(tlx.subslice(accumulator[0], first + k * CHUNK, CHUNK)) * factor
        tlx.local_store(tlx.local_slice(tile, [0, k * CHUNK], [C.keys, CHUNK]), x.to(DTYPE))


@triton.jit
def _leave(desc, tile, start, length, row, column, WIDTH: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr, REDUCE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Send a tile; one of a pair in two halves, of which the second goes ROWS and COLUMNS on."""
    HEIGHT: tl.constexpr = C.keys // C.ctas
    for h in tl.static_range(C.ctas):
        c0, c1, c2, c3 = ragged(start, length, row + h * ROWS, column + h * COLUMNS)
        part = tlx.local_slice(tile, [h * HEIGHT, 0], [HEIGHT, WIDTH])
        tlx.async_descriptor_store(desc, part, [c0, c1, c2, c3], store_reduce=REDUCE)


@triton.jit
def _epilogue(desc, accumulator, out_tiles, full, empty, phase, sent, start_kv, len_kv, first_key,
              column, factor, C: tl.constexpr):  # fmt: skip
    """Store dV or dK, and free its columns for the next item as soon as they have been read."""
    DTYPE: tl.constexpr = tlx.dtype_of(desc)
    tlx.barrier_wait(full[0], phase)
    for j in tl.static_range(C.dim // OUT_CHUNK):
        tlx.async_descriptor_store_wait(C.ctas * (C.dq_stages - 1))
        buf = (sent + j) % C.dq_stages
        _round(out_tiles[buf], accumulator, j * OUT_CHUNK, factor, DTYPE, OUT_CHUNK, C)
        tlx.fence("async_shared")
        _leave(desc, out_tiles[buf], start_kv, len_kv, first_key, column + j * OUT_CHUNK, OUT_CHUNK,
               C.keys // C.ctas, 0, "", C)  # fmt: skip
    arrive(empty[0], C)
    return sent + C.dim // OUT_CHUNK


@triton.jit
def _await_turn(flag, first_query, own, first_key, len_q, len_kv, C: tl.constexpr):
    """Wait until all key tiles before this one have added to a query tile; return its own number.

    Key tiles are handed out in order, so the first of those that wait never waits itself. Below 0,
    or past the last query, are tiles that see nothing and add zeros to what is not theirs. Of two
    CTAs of a pair, each takes its turns for its ``own`` queries.
    """
    lowest, _ = key_range(first_query, len_q, len_kv, C.mask)
    number = first_key // (C.ctas * C.keys) - lowest // (C.ctas * C.keys)
    number = tl.where(own < len_q, number, -1)
    if number > 0:
        while tl.load(flag, volatile=True) < number:
            pass
        tlx.fence("gpu")
    return number


@triton.jit
def _pass_turn(flag, number):
    """Let the next key tile add: the sums of this one are complete, not only their buffers read."""
    bulk_groups_done()
    # The thread that waited for them may not be the one that says so.
    tlx.named_barrier_wait(9, 128)
    if number >= 0:
        tl.atomic_add(flag, 1, sem="release")


@triton.jit
def reduce_dq(maps, turns, rank, scale, out_scale, tensor, dq_tiles, out_tiles, outs, hand,
              C: tl.constexpr):  # fmt: skip
    """What leaves tensor memory: dQ of each tile, to be added by TMA; dV and dK of each item.

    All of it goes through one ring of buffers, whose copies are in flight together. The columns of
    dQ are free as soon as they have been read, long before the sum has them. Unless ``C.dynamic``,
    key tiles add to a query tile one after the other, in order: see ``_await_turn``.

    Of a pair of CTAs, each has 64 queries' dQ: columns of its left half in the lanes below 64, of
    its right half in those above.
    """
    desc_sum, desc_dk, desc_dv = maps
    dv_tile, dk_tile, dq_tile = tensor
    dq_full, dq_empty, dv_full, dv_empty, dk_full, dk_empty = outs
    COLUMNS: tl.constexpr = C.dim // C.ctas
    count = 0
    sent = 0
    turn = 0
    kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key = receive(hand, turn, rank, C)
    while n > 0:
        rows_dq = tl.program_id(0) % C.replicas * len_q if C.replicas else start_q
        for trip in range(C.group * n):
            head = query_head(trip, kv_head, n, C.group)
            first = first_query_of(trip, begin, n, C.group, C.rows)
            own = first + rank * (C.rows // C.ctas)
            flag = turns + (tl.cast(start_q, tl.int64) + own) * C.heads + head
            if trip + 1 == C.group * n:
                # Complete before the last dQ.
                sent = _epilogue(desc_dv, dv_tile, out_tiles, dv_full, dv_empty, turn & 1, sent,
                                 start_kv, len_kv, first_key, kv_head * C.dim, out_scale,
                                 C)  # fmt: skip
            tlx.barrier_wait(dq_full[0], count & 1)
            if not C.dynamic:
                number = _await_turn(flag, first, own, first_key, len_q, len_kv, C)
            for k in tl.static_range(COLUMNS // CHUNK):
                x = tlx.local_load(tlx.subslice(dq_tile[0], k * CHUNK, CHUNK))
                if (k + 1) * CHUNK == COLUMNS:
                    arrive(dq_empty[0], C)
                tlx.async_descriptor_store_wait(C.ctas * (C.dq_stages - 1))
                tlx.local_store(dq_tiles[sent % C.dq_stages], x)
                tlx.fence("async_shared")
                _leave(desc_sum, dq_tiles[sent % C.dq_stages], rows_dq, len_q, own,
                       head * C.dim + k * CHUNK, CHUNK, 0, COLUMNS, "add", C)  # fmt: skip
                sent += 1
            if not C.dynamic:
                _pass_turn(flag, number)
            count += 1
        sent = _epilogue(desc_dk, dk_tile, out_tiles, dk_full, dk_empty, turn & 1, sent, start_kv,
                         len_kv, first_key, kv_head * C.dim, scale * out_scale, C)  # fmt: skip
        turn += 1
        kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key = receive(
            hand, turn, rank, C)  # fmt: skip
    tlx.async_descriptor_store_wait(0)


@triton.jit
def _send(desc, tile, accumulator, full, empty, free, phase, start, length, row, column, factor,
          C: tl.constexpr):  # fmt: skip
    """dV or dK, from the buffer that V or K came into, which is then free for the next one."""
    tlx.barrier_wait(full[0], phase)
    _round(tile, accumulator, 0, factor, tlx.dtype_of(desc), C.dim, C)
    tlx.barrier_arrive(empty[0], 1)
    tlx.fence("async_shared")
    c0, c1, c2, c3 = ragged(start, length, row, column)
    tlx.async_descriptor_store(desc, tile, [c0, c1, c2, c3])
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(free, 1)


@triton.jit
def _send_keys(maps, scale, out_scale, tiles, tensor, dq_tiles, loads, outs, hand,
               C: tl.constexpr):  # fmt: skip
    """What leaves tensor memory: dV and dK of each tile, and at the end dQ, as this CTA's part."""
    desc_parts, desc_dk, desc_dv = maps
    _, _, k_tiles, v_tiles, _, _ = tiles
    _, _, _, dv_tile, dk_tile, dq_tile = tensor
    _, _, _, _, _, k_empty, _, v_empty, _, _ = loads
    _, _, dv_full, dv_empty, dk_full, dk_empty = outs
    count = 0
    turn = 0
    head, _, _, _, n, start, length, first = receive(hand, turn, 0, C)
    while n > 0:
        for trip in range(n):
            buf, phase = count % C.kv_stages, count & 1
            _send(desc_dv, v_tiles[buf], dv_tile, dv_full, dv_empty, v_empty[buf], phase, start,
                  length, first + trip * C.keys, head * C.dim, out_scale, C)  # fmt: skip
            _send(desc_dk, k_tiles[buf], dk_tile, dk_full, dk_empty, k_empty[buf], phase, start,
                  length, first + trip * C.keys, head * C.dim, scale * out_scale, C)  # fmt: skip
            count += 1
        turn += 1
        head, _, _, _, n, start, length, first = receive(hand, turn, 0, C)
    row = (tl.program_id(0) // C.heads * C.heads + tl.program_id(0) % C.heads) * C.rows
    # The last dK came after the last dQ in the queue: it is complete.
    for k in tl.static_range(C.dim // CHUNK):
        if count > 0:
            x = tlx.local_load(tlx.subslice(dq_tile[0], k * CHUNK, CHUNK)) * (scale * out_scale)
        else:
            x = tl.zeros([C.rows, CHUNK], tl.float32)
        # dQ lies over dS, which the products before it have read.
        tlx.async_descriptor_store_wait(C.dq_stages - 1)
        tlx.local_store(dq_tiles[k % C.dq_stages], x)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(desc_parts, dq_tiles[k % C.dq_stages], [row, k * CHUNK])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "rows_q", "total_kv", "work"])
def backward_kv(desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, row_stats, table,
                counters, turns, slots, offsets_q, offsets_kv, num_sequences, rows_q, total_kv,
                work, scale, out_scale, C: tl.constexpr):  # fmt: skip
    """dK, dV, and the sum of dQ / (scale out_scale) or, if ``C.shared``, this CTA's part of dQ.

    Persistent. An item is a key tile of a key head; if shared, a run of key tiles of one sequence.
    ``work``: the number of items; if shared, entries of the tile table in a chunk. ``rows_q``: rows
    of dO; if shared, S. With ``C.replicas`` the queries are shared, more than fit a tile:
    ``offsets_q`` are those of dO, and dQ is added to one of that many sums, so that few CTAs add to
    one. ``C.dynamic``: work goes to whoever is free, and the sum's order with it; else the results
    repeat bit for bit, by ``turns``: a zero for each row of dQ and head.

    ``C.scores`` says when the scores of the next tile are issued, among the products of a tile:
    ``"first"`` as soon as the scores before have been read (P has columns of its own: ``C.own_p``),
    ``"middle"`` between dV and dQ, ``"last"``: no product then waits for a K that is on its way.
    ``C.over_dp``: what lies over dP in tensor memory: ``"dq"``, ``"dk"`` or ``"none"``.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, do_full, k_full, v_full | 1 + bytes | load | mma |
    | q_empty, do_empty | 1 | mma: the last dK, dV with it is complete | load |
    | k_empty, v_empty | 1 | mma: last dQ, dP is complete; if shared: dK, dV has left | load |
    | st_full | 1 + bytes | load: lse and delta, for a softmax | both gradient groups |
    | st_empty | 2 | both groups have read them for the last time | load |
    | s_full, dp_full | 1 | mma: S, dP is complete | both groups |
    | s_empty | 2 | both groups have read S, if P has its own columns | mma |
    | p_full, ds_full | 2 | both groups: P, dS is written | mma |
    | p_empty | 1 | mma: dV has read P, if P has its own columns | both groups |
    | dq_full | 1 | mma: dQ is complete; not if shared | reduce_dq |
    | dq_empty | 1 | reduce_dq has read it; not if shared | mma |
    | dv_full, dk_full | 1 | mma: complete for the item; if shared, tile | reduce_dq |
    | dv_empty, dk_empty | 1 | reduce_dq has read it | mma |
    | item_full | 1 | load, when the slot holds an item | mma, both groups, reduce_dq |
    | item_empty | 4 | all of these, when they have read it | load |

    dS needs no barrier to say that it has been read: dQ and dK come before the next dP in the
    queue. Neither does P over S: its dV comes before the next S. If shared, ``send_keys`` stands
    for reduce_dq, and ``load_keys`` for load.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tiles = tlx.local_alloc((C.rows, C.dim), DTYPE, C.q_stages)
    do_tiles = tlx.local_alloc((C.rows, C.dim), DTYPE, C.do_stages)
    k_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.kv_stages)
    v_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, C.kv_stages)
    stats = tlx.local_alloc((2 * C.rows,), tl.float32, C.st_stages)
    staging = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    dq_tiles = tlx.local_alloc((C.rows, CHUNK), tl.float32, C.dq_stages, reuse=staging)
    if C.shared:
        ds_tile = tlx.local_alloc((C.keys, C.rows), DTYPE, 1, reuse=staging)
    else:
        ds_tile = tlx.local_alloc((C.keys, C.rows), DTYPE, 1)
        out_tiles = tlx.local_alloc((C.keys, OUT_CHUNK), DTYPE, C.dq_stages, reuse=staging)
    s_tile = tlx.local_alloc((C.keys, C.rows), tl.float32, 1, tlx.storage_kind.tmem)
    dp_tile = tlx.local_alloc((C.keys, C.rows), tl.float32, 1, tlx.storage_kind.tmem)
    dv_tile = tlx.local_alloc((C.keys, C.dim), tl.float32, 1, tlx.storage_kind.tmem)
    over_s = None if C.own_p else s_tile
    over_dk = dp_tile if C.over_dp == "dk" else None
    over_dq = dp_tile if C.over_dp == "dq" else None
    p_count: tl.constexpr = 2 if C.own_p else 4
    half: tl.constexpr = C.rows // 2
    p_tiles = tlx.local_alloc((C.keys, half), DTYPE, p_count, tlx.storage_kind.tmem, reuse=over_s)
    dk_tile = tlx.local_alloc((C.keys, C.dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=over_dk)
    dq_tile = tlx.local_alloc((C.rows, C.dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=over_dq)
    q_full, q_empty = tlx.alloc_barriers(C.q_stages), tlx.alloc_barriers(C.q_stages)
    do_full, do_empty = tlx.alloc_barriers(C.do_stages), tlx.alloc_barriers(C.do_stages)
    k_full, k_empty = tlx.alloc_barriers(C.kv_stages), tlx.alloc_barriers(C.kv_stages)
    v_full, v_empty = tlx.alloc_barriers(C.kv_stages), tlx.alloc_barriers(C.kv_stages)
    st_full, st_empty = tlx.alloc_barriers(C.st_stages), tlx.alloc_barriers(C.st_stages, 2)
    s_full, s_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1, 2)
    p_full, p_empty = tlx.alloc_barriers(1, 2), tlx.alloc_barriers(1)
    dp_full, ds_full = tlx.alloc_barriers(1), tlx.alloc_barriers(1, 2)
    dq_full, dq_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    dv_full, dv_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    dk_full, dk_empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    item_full, item_empty = tlx.alloc_barriers(2), tlx.alloc_barriers(2, 4)
    tiles = (q_tiles, do_tiles, k_tiles, v_tiles, stats, ds_tile)
    tensor = (s_tile, p_tiles, dp_tile, dv_tile, dk_tile, dq_tile)
    loads = (q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, st_full,
             st_empty)  # fmt: skip
    scores = (s_full, s_empty, p_full, p_empty, dp_full, ds_full, None)
    outs = (dq_full, dq_empty, dv_full, dv_empty, dk_full, dk_empty)
    hand = (slots, item_full, item_empty)
    rows = (offsets_q, offsets_kv, num_sequences, rows_q, total_kv)
    keys = (offsets_kv, num_sequences, rows_q, total_kv)
    maps_in, maps_out = (desc_q, desc_k, desc_v, desc_do), (desc_dq, desc_dk, desc_dv)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if C.shared:
                _send_keys(maps_out, scale, out_scale, tiles, tensor, dq_tiles, loads, outs, hand,
                           C)  # fmt: skip
            else:
                reduce_dq(maps_out, turns, 0, scale, out_scale, (dv_tile, dk_tile, dq_tile),
                          dq_tiles, out_tiles, outs, hand, C)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=C.registers, replicate=2):
            gradients(tlx.async_task_replica_id(), 0, scale, (stats, ds_tile),
                      (s_tile, p_tiles, dp_tile, None), (st_full, st_empty), scores, hand, DTYPE,
                      C)  # fmt: skip
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            _mma(tiles, tensor, loads, scores, outs, hand, C)
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            if C.shared:
                _load_keys(maps_in, row_stats, table, counters, keys, work, tiles, loads, hand, C)
            else:
                _load(maps_in, row_stats, table, counters, rows, work, tiles, loads, hand, C)
