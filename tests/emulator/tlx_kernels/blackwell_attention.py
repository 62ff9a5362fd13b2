"""A persistent Blackwell forward attention over jagged sequences: scores, probabilities and output in tensor memory.

One tile of 128 query rows at a time. S is double-buffered, so the product S(i + 1) runs while softmax works on S(i);
P has columns of its own, so S is free as soon as it has been read.
"""
# ruff: noqa: E741, SIM113 - l is the row sums' usual name; Triton has no enumerate

import triton
import triton.language as tl

from jagged_attn.backends._jit.tlx import tlx

_LN2 = tl.constexpr(0.6931471805599453)
_BM = tl.constexpr(128)


@triton.jit
def _slot(count, N: tl.constexpr):
    return count % N, (count // N) & 1


@triton.jit
def _ragged(start, length, row, column):
    # The coordinates at which a ragged descriptor clips to one sequence.
    return 1073741824, start + length, 1073741824 - length + row, column


@triton.jit
def _work(table, offsets, t, H, BN: tl.constexpr):
    """Head, sequence start and length, first query row and key tiles of work item ``t``, counted here only."""
    sequence = tl.load(table + 2 * (t // H))
    row = tl.load(table + 2 * (t // H) + 1)
    start = tl.load(offsets + sequence)
    length = tl.load(offsets + sequence + 1) - start
    return t % H, start, length, row, tl.cdiv(length, BN)


@triton.jit
def _load(desc_q, desc_k, desc_v, table, offsets, items, H, q_tile, kv_tiles, q_full, q_empty, kv_full, kv_empty,
          D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    item = 0
    count = 0
    for t in range(tl.program_id(0), items, tl.num_programs(0)):
        h, start, length, row, n = _work(table, offsets, t, H, BN)
        tlx.barrier_wait(q_empty[0], (item & 1) ^ 1)
        tlx.barrier_expect_bytes(q_full[0], _BM * D * 2)
        c0, c1, c2, c3 = _ragged(start, length, row, h * D)
        tlx.async_descriptor_load(desc_q, q_tile[0], [c0, c1, c2, c3], q_full[0])
        # One ring for both, in the order of use: K(0), K(1), V(0), K(2), V(1), ..., V(n - 1).
        for i in range(n + 1):
            if i < n:
                buf, phase = _slot(count, STAGES)
                c0, c1, c2, c3 = _ragged(start, length, (n - 1 - i) * BN, h * D)
                tlx.barrier_wait(kv_empty[buf], phase ^ 1)
                tlx.barrier_expect_bytes(kv_full[buf], BN * D * 2)
                tlx.async_descriptor_load(desc_k, kv_tiles[buf], [c0, c1, c2, c3], kv_full[buf])
                count += 1
            if i > 0:
                buf, phase = _slot(count, STAGES)
                c0, c1, c2, c3 = _ragged(start, length, (n - i) * BN, h * D)
                tlx.barrier_wait(kv_empty[buf], phase ^ 1)
                tlx.barrier_expect_bytes(kv_full[buf], BN * D * 2)
                tlx.async_descriptor_load(desc_v, kv_tiles[buf], [c0, c1, c2, c3], kv_full[buf])
                count += 1
        item += 1


@triton.jit
def _mma(table, offsets, items, H, q_tile, kv_tiles, s_tiles, p_tile, o_tile, q_full, q_empty, kv_full, kv_empty,
         s_full,
         s_empty, p_full, p_empty, o_full, o_empty, BN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    item = 0
    count = 0
    tile = 0
    for t in range(tl.program_id(0), items, tl.num_programs(0)):
        _h, _start, _length, _row, n = _work(table, offsets, t, H, BN)
        tlx.barrier_wait(q_full[0], item & 1)
        for i in range(n + 1):
            if i < n:
                buf, phase = _slot(count, STAGES)
                s_buf, s_phase = _slot(tile + i, 2)
                tlx.barrier_wait(kv_full[buf], phase)
                tlx.barrier_wait(s_empty[s_buf], s_phase ^ 1)
                tlx.async_dot(q_tile[0], tlx.local_trans(kv_tiles[buf]), s_tiles[s_buf], use_acc=False,
                              mBarriers=[s_full[s_buf], kv_empty[buf]])  # fmt: skip
                count += 1
            if i == n - 1:
                tlx.tcgen05_commit(q_empty[0])
            if i > 0:
                buf, phase = _slot(count, STAGES)
                tlx.barrier_wait(kv_full[buf], phase)
                if i == 1:
                    tlx.barrier_wait(o_empty[0], (item & 1) ^ 1)
                tlx.barrier_wait(p_full[0], (tile + i - 1) & 1)
                tlx.async_dot(p_tile[0], kv_tiles[buf], o_tile[0], use_acc=i > 1, mBarriers=[p_empty[0], kv_empty[buf]])
                count += 1
        tlx.tcgen05_commit(o_full[0])
        tile += n
        item += 1


@triton.jit
def _softmax(lse, total, table, offsets, items, H, scale, s_tiles, p_tile, o_tile, a_tile, s_full, s_empty, p_full,
             p_empty,
             a_full, a_empty, D: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    tile = 0
    for t in range(tl.program_id(0), items, tl.num_programs(0)):
        h, start, length, row, n = _work(table, offsets, t, H, BN)
        m = tl.zeros((_BM,), tl.float32) - float("inf")
        l = tl.zeros((_BM,), tl.float32)
        for i in range(n):
            s_buf, s_phase = _slot(tile + i, 2)
            tlx.barrier_wait(s_full[s_buf], s_phase)
            s = tlx.local_load(s_tiles[s_buf])
            tlx.barrier_arrive(s_empty[s_buf], 1)
            # Tile 0 is the end of the sequence; the others are whole.
            s = tl.where((tl.arange(0, BN) < length - (n - 1 - i) * BN)[None, :], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            alpha = tl.math.exp2(m - m_new)
            p = tl.math.exp2(s * scale - m_new[:, None])
            l = l * alpha + tl.sum(p, 1)
            m = m_new
            # The product before has read P and written O.
            tlx.barrier_wait(p_empty[0], ((tile + i) & 1) ^ 1)
            if i > 0:
                tlx.local_store(o_tile[0], tlx.local_load(o_tile[0]) * alpha[:, None])
            tlx.local_store(p_tile[0], p.to(tl.bfloat16))
            tlx.barrier_arrive(p_full[0], 1)
        tile += n
        rows = row + tl.arange(0, _BM)
        tl.store(lse + h * total + start + rows, (m + tl.math.log2(l)) * _LN2, mask=rows < length)
        item = (t - tl.program_id(0)) // tl.num_programs(0)
        tlx.barrier_wait(a_empty[0], (item & 1) ^ 1)
        tlx.local_store(a_tile[0], 1.0 / l)
        tlx.barrier_arrive(a_full[0], 1)


@triton.jit
def _correct(table, offsets, items, H, o_tile, a_tile, c_tile, o_full, o_empty, a_full, a_empty, c_full, c_empty,
             D: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    item = 0
    for _t in range(tl.program_id(0), items, tl.num_programs(0)):
        tlx.barrier_wait(a_full[0], item & 1)
        w = tlx.local_load(a_tile[0])
        tlx.barrier_arrive(a_empty[0], 1)
        tlx.barrier_wait(o_full[0], item & 1)
        tlx.barrier_wait(c_empty[0], (item & 1) ^ 1)
        for k in tl.static_range(D // 32):
            o = tlx.local_load(tlx.subslice(o_tile[0], k * 32, 32)) * w[:, None]
            tlx.local_store(tlx.local_slice(c_tile[0], [0, k * 32], [_BM, 32]), o.to(tl.bfloat16))
        tlx.barrier_arrive(o_empty[0], 1)
        tlx.fence("async_shared")
        tlx.barrier_arrive(c_full[0], 1)
        item += 1


@triton.jit
def _store(desc_o, table, offsets, items, H, c_tile, c_full, c_empty, D: tl.constexpr, BN: tl.constexpr):
    item = 0
    for t in range(tl.program_id(0), items, tl.num_programs(0)):
        h, start, length, row, _n = _work(table, offsets, t, H, BN)
        tlx.barrier_wait(c_full[0], item & 1)
        c0, c1, c2, c3 = _ragged(start, length, row, h * D)
        tlx.async_descriptor_store(desc_o, c_tile[0], [c0, c1, c2, c3])
        tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(c_empty[0], 1)
        item += 1


@triton.jit
def blackwell_attention(desc_q, desc_k, desc_v, desc_o, lse, total, table, offsets, items, H, scale, D: tl.constexpr,
                        BN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """O = softmax(scale / log2(e) Q K^T) V per sequence, and its natural-log lse ``[H, total]``.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, kv_full | 1 + bytes | load | mma |
    | q_empty, kv_empty | 1 | mma, when its products are complete | load |
    | s_full[2] | 1 | mma: S is complete | softmax |
    | s_empty[2] | 1 | softmax: S has been read | mma |
    | p_full | 1 | softmax: P is written, O rescaled | mma |
    | p_empty | 1 | mma: P is read, O complete so far | softmax |
    | a_full, a_empty | 1 | softmax, correct: 1 / l | correct, softmax |
    | o_full | 1 | mma: the last product of an item | correct |
    | o_empty | 1 | correct: O has been read | mma |
    | c_full, c_empty | 1 | correct, store: the staged tile | store, correct |
    """
    q_tile = tlx.local_alloc((_BM, D), tl.bfloat16, 1)
    kv_tiles = tlx.local_alloc((BN, D), tl.bfloat16, STAGES)
    c_tile = tlx.local_alloc((_BM, D), tl.bfloat16, 1)
    a_tile = tlx.local_alloc((_BM,), tl.float32, 1)
    s_tiles = tlx.local_alloc((_BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((_BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    o_tile = tlx.local_alloc((_BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    q_empty = tlx.alloc_barriers(1)
    kv_full = tlx.alloc_barriers(STAGES)
    kv_empty = tlx.alloc_barriers(STAGES)
    s_full = tlx.alloc_barriers(2)
    s_empty = tlx.alloc_barriers(2)
    p_full = tlx.alloc_barriers(1)
    p_empty = tlx.alloc_barriers(1)
    a_full = tlx.alloc_barriers(1)
    a_empty = tlx.alloc_barriers(1)
    o_full = tlx.alloc_barriers(1)
    o_empty = tlx.alloc_barriers(1)
    c_full = tlx.alloc_barriers(1)
    c_empty = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _correct(table, offsets, items, H, o_tile, a_tile, c_tile, o_full, o_empty, a_full, a_empty, c_full,
                     c_empty,
                     D, BN)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=192):
            _softmax(lse, total, table, offsets, items, H, scale, s_tiles, p_tile, o_tile, a_tile, s_full, s_empty,
                     p_full,
                     p_empty, a_full, a_empty, D, BN)  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            _mma(table, offsets, items, H, q_tile, kv_tiles, s_tiles, p_tile, o_tile, q_full, q_empty, kv_full,
                 kv_empty,
                 s_full, s_empty, p_full, p_empty, o_full, o_empty, BN, STAGES)  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            _load(desc_q, desc_k, desc_v, table, offsets, items, H, q_tile, kv_tiles, q_full, q_empty, kv_full,
                  kv_empty, D,
                  BN, STAGES)  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            _store(desc_o, table, offsets, items, H, c_tile, c_full, c_empty, D, BN)
