"""A persistent Hopper forward attention over jagged sequences, with two consumer groups that take turns."""
# ruff: noqa: E741, SIM113 - l is the row sums' usual name; Triton has no enumerate

import triton
import triton.language as tl

from jagged_attn.backends._jit.tlx import tlx

_LN2 = tl.constexpr(0.6931471805599453)


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
def _load(desc_q, desc_k, desc_v, table, offsets, items, H, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
          v_full, v_empty, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    item = 0
    count = 0
    for t in range(tl.program_id(0), items, tl.num_programs(0)):
        h, start, length, row, n = _work(table, offsets, t, H, BN)
        for g in tl.static_range(2):
            tlx.barrier_wait(q_empty[g], (item & 1) ^ 1)
            tlx.barrier_expect_bytes(q_full[g], BM * D * 2)
            c0, c1, c2, c3 = _ragged(start, length, row + g * BM, h * D)
            tlx.async_descriptor_load(desc_q, q_tiles[g], [c0, c1, c2, c3], q_full[g])
        for i in range(n):
            buf, phase = _slot(count, STAGES)
            # From the end of the sequence: only the first tile needs a mask.
            c0, c1, c2, c3 = _ragged(start, length, (n - 1 - i) * BN, h * D)
            tlx.barrier_wait(k_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[buf], BN * D * 2)
            tlx.async_descriptor_load(desc_k, k_tiles[buf], [c0, c1, c2, c3], k_full[buf])
            tlx.barrier_wait(v_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(v_full[buf], BN * D * 2)
            tlx.async_descriptor_load(desc_v, v_tiles[buf], [c0, c1, c2, c3], v_full[buf])
            count += 1
        item += 1


@triton.jit
def _softmax(s, m, l, scale):
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(s * scale - m_new[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _attend(g: tl.constexpr, desc_o, lse, total, table, offsets, items, H, scale, q_tiles, k_tiles, v_tiles, o_tiles,
            q_full, q_empty, k_full, k_empty, v_full, v_empty, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            STAGES: tl.constexpr):  # fmt: skip
    item = 0
    count = 0
    # Group 0 has the first turn.
    if g == 1:
        tlx.named_barrier_arrive(9, 256)
    for t in range(tl.program_id(0), items, tl.num_programs(0)):
        h, start, length, row, n = _work(table, offsets, t, H, BN)
        m = tl.zeros((BM,), tl.float32) - float("inf")
        l = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)
        buf, phase = _slot(count, STAGES)
        tlx.barrier_wait(q_full[g], item & 1)
        tlx.barrier_wait(k_full[buf], phase)
        tlx.named_barrier_wait(9 + g, 256)
        s = tlx.async_dot(q_tiles[g], tlx.local_trans(k_tiles[buf]))
        tlx.named_barrier_arrive(10 - g, 256)
        s = tlx.async_dot_wait(0, s)
        tlx.barrier_arrive(k_empty[buf], 1)
        s = tl.where((tl.arange(0, BN) < length - (n - 1) * BN)[None, :], s, -float("inf"))
        p, alpha, m, l = _softmax(s, m, l, scale)
        for _i in range(1, n):
            last, last_phase = _slot(count, STAGES)
            count += 1
            buf, phase = _slot(count, STAGES)
            tlx.barrier_wait(k_full[buf], phase)
            tlx.named_barrier_wait(9 + g, 256)
            s = tlx.async_dot(q_tiles[g], tlx.local_trans(k_tiles[buf]))
            tlx.named_barrier_arrive(10 - g, 256)
            tlx.barrier_wait(v_full[last], last_phase)
            acc = tlx.async_dot(p.to(tl.bfloat16), v_tiles[last], acc)
            s = tlx.async_dot_wait(1, s)
            tlx.barrier_arrive(k_empty[buf], 1)
            p, alpha, m, l = _softmax(s, m, l, scale)
            acc = tlx.async_dot_wait(0, acc)
            tlx.barrier_arrive(v_empty[last], 1)
            acc = acc * alpha[:, None]
        tlx.barrier_arrive(q_empty[g], 1)
        last, last_phase = _slot(count, STAGES)
        tlx.barrier_wait(v_full[last], last_phase)
        acc = tlx.async_dot(p.to(tl.bfloat16), v_tiles[last], acc)
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_empty[last], 1)
        count += 1
        item += 1
        rows = row + g * BM + tl.arange(0, BM)
        tl.store(lse + h * total + start + rows, (m + tl.math.log2(l)) * _LN2, mask=rows < length)
        # The store of the item before has to have read the staging buffer.
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(o_tiles[g], (acc / l[:, None]).to(tl.bfloat16))
        tlx.fence("async_shared")
        c0, c1, c2, c3 = _ragged(start, length, row + g * BM, h * D)
        tlx.async_descriptor_store(desc_o, o_tiles[g], [c0, c1, c2, c3])
    tlx.async_descriptor_store_wait(0)


@triton.jit
def hopper_attention(desc_q, desc_k, desc_v, desc_o, lse, total, table, offsets, items, H, scale, D: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """O = softmax(scale / log2(e) Q K^T) V per sequence, and its natural-log lse ``[H, total]``.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, k_full, v_full | 1 + bytes | load | attend (q: one group each; k, v: both) |
    | q_empty | 1 | its attend group | load |
    | k_empty, v_empty | 2 | both attend groups | load |
    | named 9, 10 | 256 threads | the other group, after issuing S | group 0, group 1, before issuing S |
    """
    q_tiles = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    k_tiles = tlx.local_alloc((BN, D), tl.bfloat16, STAGES)
    v_tiles = tlx.local_alloc((BN, D), tl.bfloat16, STAGES)
    o_tiles = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    q_full = tlx.alloc_barriers(2)
    q_empty = tlx.alloc_barriers(2)
    k_full = tlx.alloc_barriers(STAGES)
    k_empty = tlx.alloc_barriers(STAGES, 2)
    v_full = tlx.alloc_barriers(STAGES)
    v_empty = tlx.alloc_barriers(STAGES, 2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(desc_q, desc_k, desc_v, table, offsets, items, H, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full,
                  k_empty, v_full, v_empty, D, BM, BN, STAGES)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=232, replicate=2):
            _attend(tlx.async_task_replica_id(), desc_o, lse, total, table, offsets, items, H, scale, q_tiles, k_tiles,
                    v_tiles, o_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, D, BM, BN, STAGES)  # fmt: skip
