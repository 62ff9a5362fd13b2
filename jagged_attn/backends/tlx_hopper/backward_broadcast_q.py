# mypy: allow-untyped-defs
"""Hopper kernels of the broadcast-Q backward: K and V are streamed once, and dQ stays in registers till the end.

The shared queries of a head stay in shared memory. A CTA has one head for its whole life, so what its tiles give to dQ
adds up in registers; it leaves once, to a workspace that ``reduce_parts`` adds up in a fixed order. A CTA takes its
key tiles in chunks: runs of entries of the tile table. Multiprocessors do not get equal bandwidth, so the chunks are
handed out by a counter for each head, or dealt out in turn if dQ has to repeat bit for bit.

Two kernels: up to 64 queries are one operand, and the two consumer groups take whole key tiles in turn; up to 128 are
two halves, one a group, which meet in shared memory for dK and dV.

Nothing is masked. Loads are clipped to the sequence, so what lies past its end, and dO of the rows that belong to no
sequence, is 0 and gives 0 to every product: every activation of 0 is 0, and softmax takes ``lse = inf`` for queries
that do not exist. Keys that do not exist have a P that is not 0, but finite; it meets K = 0 in dQ, and its rows of dK
and dV are not stored. So a mask would have to be added for other masks than ``Full``; grouped heads would need sums
over the heads of a group, which sit in other CTAs.

``C`` is a ``Constants``: heads, dim, act, fast_tanh; rows of queries (32, 64 or 128) and halves of them (1 or 2);
stages and do_stages of the rings; dv_first, whether dV is issued before dS is there; dynamic, whether the counter
hands out the chunks; scales_out, whether ``out_scale`` is other than 1.
"""

import triton
import triton.language as tl

from .._jit.backward_shared import following_chunk, key_run, publish_chunk, statistics, weights
from .._jit.rings import ragged, receive, ring
from .._jit.tlx import tlx

# Rows of a key tile.
KEYS = tl.constexpr(64)
# Rows of a query tile, where the queries are two halves.
_HALF = tl.constexpr(64)
# bf16 or fp16.
_ITEM_BYTES = tl.constexpr(2)


@triton.jit
def _load_keys(desc, tiles, buf, at, full, empty, phase, C: tl.constexpr):
    tlx.barrier_wait(empty[buf], phase ^ 1)
    tlx.barrier_expect_bytes(full[buf], KEYS * C.dim * _ITEM_BYTES)
    tlx.async_descriptor_load(desc, tiles[buf], at, full[buf])


@triton.jit
def _load_tile(desc_k, desc_v, count, at, tiles, loads, C: tl.constexpr):
    """One tile of K and V: first the one whose buffer comes free first, or that is needed first."""
    _, _, k_tiles, v_tiles = tiles
    _, _, _, k_full, k_empty, v_full, v_empty = loads
    buf, phase = ring(count, C.stages)
    if C.halves == 2:
        _load_keys(desc_v, v_tiles, buf, at, v_full, v_empty, phase, C)
        _load_keys(desc_k, k_tiles, buf, at, k_full, k_empty, phase, C)
    else:
        _load_keys(desc_k, k_tiles, buf, at, k_full, k_empty, phase, C)
        _load_keys(desc_v, v_tiles, buf, at, v_full, v_empty, phase, C)


@triton.jit
def _load_queries(desc_do, buf, start, queries, column, do_tiles, do_full, C: tl.constexpr):
    """dO of a sequence: as many halves as the queries have."""
    tlx.barrier_expect_bytes(do_full[buf], C.rows * C.dim * _ITEM_BYTES)
    for half in tl.static_range(C.halves):
        at = ragged(start, queries, half * _HALF, column)
        tlx.async_descriptor_load(desc_do, do_tiles[C.halves * buf + half], at, do_full[buf])


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, where, num_queries, chunk_tiles, control, hand_out, tiles, loads,
          C: tl.constexpr):  # fmt: skip
    """Hand out the chunks, and bring Q once, dO of each sequence, K and V of each tile."""
    table, offsets, num_sequences, total_kv = where
    chunk_full, chunk_empty = hand_out
    q_tiles, do_tiles = tiles[0], tiles[1]
    q_full, do_full, do_empty = loads[0], loads[1], loads[2]
    column = tl.program_id(0) % C.heads * C.dim
    tlx.barrier_expect_bytes(q_full[0], C.rows * C.dim * _ITEM_BYTES)
    for half in tl.static_range(C.halves):
        tlx.async_descriptor_load(desc_q, q_tiles[half], [half * _HALF, column], q_full[0])
    runs = 0
    count = 0
    if C.halves == 2:
        # A tile of no rows, all zeros, comes before the first, so that every tile has one before it.
        _load_queries(desc_do, 0, column * 0, 0, column, do_tiles, do_full, C)
        _load_tile(desc_k, desc_v, 0, ragged(column * 0, 0, 0, column), tiles, loads, C)
        runs = 1
        count = 1
    entries = tl.load(control + C.heads)
    # The first chunk of each CTA is its own number among the CTAs of its head.
    chunk = tl.program_id(0) // C.heads
    turn = 0
    tile, end = publish_chunk(control, chunk_full, chunk_empty, turn, chunk, entries, chunk_tiles, C.heads)
    run = key_run(table, offsets, tile, end, num_sequences, total_kv, KEYS)
    while run[5] > 0:
        b, start, _, keys, first, n_tiles = run
        do_buf, do_phase = ring(runs, C.do_stages)
        tlx.barrier_wait(do_empty[do_buf], do_phase ^ 1)
        queries = tl.where(b < num_sequences, num_queries, 0)
        _load_queries(desc_do, do_buf, b * num_queries, queries, column, do_tiles, do_full, C)
        early = tl.maximum(n_tiles - 1, 1)
        for n in range(early):
            _load_tile(desc_k, desc_v, count + n, ragged(start, keys, first + n * KEYS, column), tiles, loads, C)
        # Counter, table and offsets answer one after the other: ask before the wait for the last tile's buffers. Not
        # earlier, because who takes a chunk early may keep the others waiting at the end.
        turn, chunk, tile, end = following_chunk(
            control, chunk_full, chunk_empty, turn, chunk, tile + n_tiles, end, entries, chunk_tiles, C.heads, C.dynamic
        )  # fmt: skip
        run = key_run(table, offsets, tile, end, num_sequences, total_kv, KEYS)
        for n in range(early, n_tiles):
            _load_tile(desc_k, desc_v, count + n, ragged(start, keys, first + n * KEYS, column), tiles, loads, C)
        runs += 1
        count += n_tiles


@triton.jit
def _gradient_of_scores(slope, dp, row_delta, grad_scale, C: tl.constexpr):
    if C.act == "softmax":
        return slope * (dp * grad_scale - row_delta)
    else:
        return slope * (dp * grad_scale)


# --- Up to 64 queries ---


@triton.jit
def _store(desc, tile, value, at, name: tl.constexpr):
    """Registers to shared memory to global memory, by one group; ``name`` is its named barrier."""
    tlx.local_store(tile, value)
    tlx.fence("async_shared")
    tlx.named_barrier_wait(name, 128)
    tlx.async_descriptor_store(desc, tile, at)


@triton.jit
def _take_turns(g: tl.constexpr, desc_dk, desc_dv, desc_parts, stats, where, chunk_tiles, scales, control, hand_out,
                tiles, ds_tiles, dq_tiles, loads, C: tl.constexpr):  # fmt: skip
    """S^T, dP^T, dV, dK and a share of dQ of every second tile: rows are keys, columns are queries."""
    dtype: tl.constexpr = tlx.dtype_of(desc_dk)
    table, offsets, num_sequences, total_kv = where
    chunk_full, chunk_empty = hand_out
    q_tiles, do_tiles, k_tiles, v_tiles = tiles
    q_full, do_full, do_empty, k_full, kv_empty, v_full, kv_empty = loads
    score_scale, grad_scale, out_scale = scales
    head = tl.program_id(0) % C.heads
    column = head * C.dim
    i = tl.arange(0, C.rows)
    slots = control + C.heads + 1
    entries = tl.load(control + C.heads)
    # wgmma has no tile of 32 rows: dQ of 32 queries is made transposed.
    if C.rows < 64:
        dq = tl.zeros((C.dim, C.rows), tl.float32)
    else:
        dq = tl.zeros((C.rows, C.dim), tl.float32)
    runs = 0
    count = 0
    last = -1
    turn = 0
    tlx.barrier_wait(q_full[0], 0)
    chunk = receive(slots, chunk_full, chunk_empty, turn)
    while chunk >= 0:
        tile = chunk * chunk_tiles
        end = tl.minimum(tile + chunk_tiles, entries)
        while tile < end:
            b, start, rows, _, first, n_tiles = key_run(table, offsets, tile, end, num_sequences, total_kv, KEYS)
            row_stats = statistics(stats, b, head, C.heads, C.rows)
            do_buf, do_phase = ring(runs, C.do_stages)
            tlx.barrier_wait(do_full[do_buf], do_phase)
            # The tiles of a CTA alternate between the groups, across runs and chunks.
            for n in range((count + g) % 2, n_tiles, 2):
                buf, phase = ring(count + n, C.stages)
                row_lse = 0.0
                row_delta = 0.0
                if C.act == "softmax":
                    # Loaded for each tile, from the L1 cache: they would take 64 registers.
                    row_lse = tl.load(row_stats + i)[None, :]
                    row_delta = tl.load(row_stats + C.rows + i)[None, :]
                tlx.barrier_wait(k_full[buf], phase)
                s = tlx.async_dot(k_tiles[buf], tlx.local_trans(q_tiles[0]))
                tlx.barrier_wait(v_full[buf], phase)
                dp = tlx.async_dot(v_tiles[buf], tlx.local_trans(do_tiles[do_buf]))
                s = tlx.async_dot_wait(1, s)
                # By now the stores of this group's last tile have read its buffers.
                tlx.async_descriptor_store_wait(0)
                if last >= 0:
                    tlx.barrier_arrive(kv_empty[last], 1)
                p, slope = weights(s, row_lse, score_scale, C.act, C.fast_tanh)
                p_half = p.to(dtype)
                if C.dv_first:
                    dv = tlx.async_dot(p_half, do_tiles[do_buf])
                    dp = tlx.async_dot_wait(1, dp)
                else:
                    dp = tlx.async_dot_wait(0, dp)
                ds = _gradient_of_scores(slope, dp, row_delta, grad_scale, C).to(dtype)
                tlx.local_store(ds_tiles[g], ds)
                tlx.fence("async_shared")
                tlx.named_barrier_wait(9 + g, 128)
                if not C.dv_first:
                    dv = tlx.async_dot(p_half, do_tiles[do_buf])
                if C.rows < 64:
                    dq = tlx.async_dot(tlx.local_trans(k_tiles[buf]), ds_tiles[g], dq)
                else:
                    dq = tlx.async_dot(tlx.local_trans(ds_tiles[g]), k_tiles[buf], dq)
                # dV takes V's buffer, which dP has read; dK takes K's once dQ has read it.
                dv = tlx.async_dot_wait(1, dv)
                if C.scales_out:
                    dv *= out_scale
                at = ragged(start, rows, first + n * KEYS, column)
                _store(desc_dv, v_tiles[buf], dv.to(dtype), at, 9 + g)
                dk = tlx.async_dot(ds, q_tiles[0])
                dq = tlx.async_dot_wait(1, dq)
                dk = tlx.async_dot_wait(0, dk)
                _store(desc_dk, k_tiles[buf], dk.to(dtype), at, 9 + g)
                last = buf
            tlx.barrier_arrive(do_empty[do_buf], 1)
            count += n_tiles
            runs += 1
            tile += n_tiles
        turn += 1
        chunk = receive(slots, chunk_full, chunk_empty, turn)
    tlx.async_descriptor_store_wait(0)
    # dQ lies over K: the other group has to be done with it too.
    tlx.named_barrier_wait(12, 256)
    part = (tl.program_id(0) // C.heads * 2 + g) * C.heads + head
    _store(desc_parts, dq_tiles[g], dq, [part * (C.dim if C.rows < 64 else C.rows), 0], 9 + g)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "total_kv", "chunk_tiles"])
def backward_64(desc_q, desc_k, desc_v, desc_do, desc_dk, desc_dv, desc_parts, stats, table, offsets, control,
                num_sequences, num_queries, total_kv, chunk_tiles, score_scale, grad_scale, out_scale,
                C: tl.constexpr):  # fmt: skip
    """dK, dV and partial dQ of up to 32 or 64 queries. Grid: a multiple of H.

    ``desc_parts``: the workspace ``[CTAs / H, 2, H, rows, D]`` as rows; ``[..., D, rows]`` for 32 rows.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, do_full, k_full, v_full | 1 + bytes | load | groups (q, dO: both; K, V: the one whose turn it is) |
    | chunk_full | 1 | load | both groups |
    | chunk_empty, do_empty | 2, 2 × 128 | both groups | load |
    | kv_empty | 128 | the group whose turn it was, when dK and dV have left | load |
    | named 9, 10 | 128 threads | group 0, group 1 | the same: what its threads wrote is there |
    | named 12 | 256 threads | both groups | both: K's buffers are free for dQ |
    """
    dtype: tl.constexpr = tlx.dtype_of(desc_k)
    q_tiles = tlx.local_alloc((C.rows, C.dim), dtype, 1)
    do_tiles = tlx.local_alloc((C.rows, C.dim), dtype, C.do_stages)
    # A group that never waits for a buffer's other phases could take the one before for its own.
    tl.static_assert(C.stages % 2 == 0, "a buffer always goes to the same group")
    tl.static_assert(C.stages >= 4, "a group keeps the buffers of its last tile until its next tile is there")
    # dQ of both groups lies over K.
    k_or_dq = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    k_tiles = tlx.local_alloc((KEYS, C.dim), dtype, C.stages, reuse=k_or_dq)
    if C.rows < 64:
        dq_tiles = tlx.local_alloc((C.dim, C.rows), tl.float32, 2, reuse=k_or_dq)
    else:
        dq_tiles = tlx.local_alloc((C.rows, C.dim), tl.float32, 2, reuse=k_or_dq)
    v_tiles = tlx.local_alloc((KEYS, C.dim), dtype, C.stages)
    ds_tiles = tlx.local_alloc((KEYS, C.rows), dtype, 2)
    q_full = tlx.alloc_barriers(1)
    chunk_full = tlx.alloc_barriers(2)
    chunk_empty = tlx.alloc_barriers(2, 2)
    do_full = tlx.alloc_barriers(C.do_stages)
    do_empty = tlx.alloc_warp_barrier(C.do_stages, 4, 2)
    k_full = tlx.alloc_barriers(C.stages)
    v_full = tlx.alloc_barriers(C.stages)
    kv_empty = tlx.alloc_warp_barrier(C.stages, 4)
    where = (table, offsets, num_sequences, total_kv)
    hand_out = (chunk_full, chunk_empty)
    tiles = (q_tiles, do_tiles, k_tiles, v_tiles)
    loads = (q_full, do_full, do_empty, k_full, kv_empty, v_full, kv_empty)
    for_groups = (desc_dk, desc_dv, desc_parts, stats, where, chunk_tiles, (score_scale, grad_scale, out_scale),
                  control, hand_out, tiles, ds_tiles, dq_tiles, loads)  # fmt: skip
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _take_turns(0, *for_groups, C)
        with tlx.async_task(num_warps=4, registers=240):
            _take_turns(1, *for_groups, C)
        with tlx.async_task(num_warps=1, registers=24):
            _load(desc_q, desc_k, desc_v, desc_do, where, num_queries, chunk_tiles, control, hand_out, tiles, loads, C)


# --- Up to 128 queries ---


@triton.jit
def _keys_gradient(p_tiles, ds_tiles, do_tiles, q_tiles, do_buf, g: tl.constexpr):
    """Group 0: dV = P^T dO; group 1: dK = dS^T Q; over both halves of the queries. Two products in flight."""
    if g == 0:
        x = tlx.async_dot(tlx.local_trans(p_tiles[0]), do_tiles[2 * do_buf])
        x = tlx.async_dot(tlx.local_trans(p_tiles[1]), do_tiles[2 * do_buf + 1], x)
    else:
        x = tlx.async_dot(tlx.local_trans(ds_tiles[0]), q_tiles[0])
        x = tlx.async_dot(tlx.local_trans(ds_tiles[1]), q_tiles[1], x)
    return x


@triton.jit
def _store_keys_gradient(desc_dk, desc_dv, x_tiles, at, g: tl.constexpr):
    if g == 0:
        tlx.async_descriptor_store(desc_dv, x_tiles[g], at)
    else:
        tlx.async_descriptor_store(desc_dk, x_tiles[g], at)


@triton.jit
def _take_halves(g: tl.constexpr, desc_dk, desc_dv, desc_parts, stats, where, chunk_tiles, scales, control, hand_out,
                 tiles, made, loads, C: tl.constexpr):  # fmt: skip
    """S, dP and dQ of one half of the queries, and dV (group 0) or dK (group 1): rows are queries, columns are keys.

    S and dP of a tile are issued before dQ, dV and dK of the tile before it, which hide the softmax.
    """
    dtype: tl.constexpr = tlx.dtype_of(desc_dk)
    table, offsets, num_sequences, total_kv = where
    chunk_full, chunk_empty = hand_out
    q_tiles, do_tiles, k_tiles, v_tiles = tiles
    p_tiles, ds_tiles, x_tiles, dq_tiles = made
    q_full, do_full, do_empty, k_full, k_empty, v_full, v_empty = loads
    score_scale, grad_scale, out_scale = scales
    head = tl.program_id(0) % C.heads
    column = head * C.dim
    i = g * _HALF + tl.arange(0, _HALF)
    slots = control + C.heads + 1
    entries = tl.load(control + C.heads)
    dq = tl.zeros((_HALF, C.dim), tl.float32)
    # The tile of no rows: its P and dS.
    tlx.local_store(p_tiles[g], tl.zeros((_HALF, KEYS), dtype))
    tlx.local_store(ds_tiles[g], tl.zeros((_HALF, KEYS), dtype))
    tlx.fence("async_shared")
    tlx.named_barrier_wait(11, 256)
    tlx.barrier_wait(q_full[0], 0)
    tlx.barrier_wait(do_full[0], 0)
    tlx.barrier_wait(k_full[0], 0)
    tlx.barrier_wait(v_full[0], 0)
    tlx.barrier_arrive(v_empty[0], 1)
    last_buf = 0
    last_do = 0
    # Where dK and dV of the tile before go: nowhere, for the tile of no rows.
    at = ragged(column * 0, 0, 0, column)
    runs = 1
    count = 1
    turn = 0
    chunk = receive(slots, chunk_full, chunk_empty, turn)
    while chunk >= 0:
        tile = chunk * chunk_tiles
        end = tl.minimum(tile + chunk_tiles, entries)
        while tile < end:
            b, start, rows, _, first, n_tiles = key_run(table, offsets, tile, end, num_sequences, total_kv, KEYS)
            do_buf, do_phase = ring(runs, C.do_stages)
            row_lse = 0.0
            row_delta = 0.0
            if C.act == "softmax":
                row_stats = statistics(stats, b, head, C.heads, 2 * _HALF)
                row_lse = tl.load(row_stats + i)[:, None]
                row_delta = tl.load(row_stats + 2 * _HALF + i)[:, None]
            for n in range(n_tiles):
                buf, phase = ring(count, C.stages)
                tlx.barrier_wait(k_full[buf], phase)
                s = tlx.async_dot(q_tiles[g], tlx.local_trans(k_tiles[buf]))
                if n == 0:
                    tlx.barrier_wait(do_full[do_buf], do_phase)
                tlx.barrier_wait(v_full[buf], phase)
                dq = tlx.async_dot(ds_tiles[g], k_tiles[last_buf], dq)
                dp = tlx.async_dot(do_tiles[2 * do_buf + g], tlx.local_trans(v_tiles[buf]))
                x = _keys_gradient(p_tiles, ds_tiles, do_tiles, q_tiles, last_do, g)
                s = tlx.async_dot_wait(4, s)
                p, slope = weights(s, row_lse, score_scale, C.act, C.fast_tanh)
                dq = tlx.async_dot_wait(3, dq)
                tlx.barrier_arrive(k_empty[last_buf], 1)
                dp = tlx.async_dot_wait(2, dp)
                tlx.barrier_arrive(v_empty[buf], 1)
                ds = _gradient_of_scores(slope, dp, row_delta, grad_scale, C).to(dtype)
                p_half = p.to(dtype)
                x = tlx.async_dot_wait(0, x)
                if C.scales_out and g == 0:
                    x *= out_scale
                tlx.async_descriptor_store_wait(0)
                # Both groups are done with P, dS and dO of the tile before.
                tlx.named_barrier_wait(12, 256)
                if n == 0:
                    tlx.barrier_arrive(do_empty[last_do], 1)
                tlx.local_store(p_tiles[g], p_half)
                tlx.local_store(ds_tiles[g], ds)
                tlx.local_store(x_tiles[g], x.to(dtype))
                tlx.fence("async_shared")
                tlx.named_barrier_wait(11, 256)
                _store_keys_gradient(desc_dk, desc_dv, x_tiles, at, g)
                last_buf = buf
                last_do = do_buf
                at = ragged(start, rows, first + n * KEYS, column)
                count += 1
            runs += 1
            tile += n_tiles
        turn += 1
        chunk = receive(slots, chunk_full, chunk_empty, turn)
    dq = tlx.async_dot(ds_tiles[g], k_tiles[last_buf], dq)
    x = _keys_gradient(p_tiles, ds_tiles, do_tiles, q_tiles, last_do, g)
    dq = tlx.async_dot_wait(2, dq)
    x = tlx.async_dot_wait(0, x)
    if C.scales_out and g == 0:
        x *= out_scale
    tlx.async_descriptor_store_wait(0)
    # dQ lies over dO: the other group has to be done with it too.
    tlx.named_barrier_wait(12, 256)
    tlx.local_store(x_tiles[g], x.to(dtype))
    tlx.local_store(dq_tiles[g], dq)
    tlx.fence("async_shared")
    tlx.named_barrier_wait(9 + g, 128)
    _store_keys_gradient(desc_dk, desc_dv, x_tiles, at, g)
    part = tl.program_id(0) // C.heads * C.heads + head
    tlx.async_descriptor_store(desc_parts, dq_tiles[g], [(part * 2 + g) * _HALF, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "total_kv", "chunk_tiles"])
def backward_128(desc_q, desc_k, desc_v, desc_do, desc_dk, desc_dv, desc_parts, stats, table, offsets, control,
                 num_sequences, num_queries, total_kv, chunk_tiles, score_scale, grad_scale, out_scale,
                 C: tl.constexpr):  # fmt: skip
    """dK, dV and partial dQ of 65 to 128 queries. Grid: a multiple of H.

    ``desc_parts``: the workspace ``[CTAs / H, H, 128, D]`` as rows. Every buffer of dO is two halves.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, do_full, k_full, v_full | 1 + bytes | load | both groups |
    | chunk_full | 1 | load | both groups |
    | chunk_empty | 2 | both groups | load |
    | do_empty, k_empty, v_empty | 2 × 128 | both groups | load |
    | named 9, 10 | 128 threads | group 0, group 1 | the same: what its threads wrote is there |
    | named 11 | 256 threads | both groups | both: P, dS, dK and dV of a tile are there |
    | named 12 | 256 threads | both groups | both: the tile's P, dS and dO are read |
    """
    dtype: tl.constexpr = tlx.dtype_of(desc_k)
    q_tiles = tlx.local_alloc((_HALF, C.dim), dtype, 2)
    do_tiles = tlx.local_alloc((_HALF, C.dim), dtype, 2 * C.do_stages)
    p_tiles = tlx.local_alloc((_HALF, KEYS), dtype, 2)
    ds_tiles = tlx.local_alloc((_HALF, KEYS), dtype, 2)
    k_tiles = tlx.local_alloc((KEYS, C.dim), dtype, C.stages)
    v_tiles = tlx.local_alloc((KEYS, C.dim), dtype, C.stages)
    # dV of group 0, dK of group 1: buffers of their own let K and V go as soon as the products have read them.
    x_tiles = tlx.local_alloc((KEYS, C.dim), dtype, 2)
    dq_tiles = tlx.local_alloc((_HALF, C.dim), tl.float32, 2, reuse=do_tiles)
    q_full = tlx.alloc_barriers(1)
    chunk_full = tlx.alloc_barriers(2)
    chunk_empty = tlx.alloc_barriers(2, 2)
    do_full = tlx.alloc_barriers(C.do_stages)
    do_empty = tlx.alloc_warp_barrier(C.do_stages, 4, 2)
    k_full = tlx.alloc_barriers(C.stages)
    k_empty = tlx.alloc_warp_barrier(C.stages, 4, 2)
    v_full = tlx.alloc_barriers(C.stages)
    v_empty = tlx.alloc_warp_barrier(C.stages, 4, 2)
    where = (table, offsets, num_sequences, total_kv)
    hand_out = (chunk_full, chunk_empty)
    tiles = (q_tiles, do_tiles, k_tiles, v_tiles)
    made = (p_tiles, ds_tiles, x_tiles, dq_tiles)
    loads = (q_full, do_full, do_empty, k_full, k_empty, v_full, v_empty)
    for_groups = (desc_dk, desc_dv, desc_parts, stats, where, chunk_tiles, (score_scale, grad_scale, out_scale),
                  control, hand_out, tiles, made, loads)  # fmt: skip
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _take_halves(0, *for_groups, C)
        with tlx.async_task(num_warps=4, registers=240):
            _take_halves(1, *for_groups, C)
        with tlx.async_task(num_warps=1, registers=24):
            _load(desc_q, desc_k, desc_v, desc_do, where, num_queries, chunk_tiles, control, hand_out, tiles, loads, C)
