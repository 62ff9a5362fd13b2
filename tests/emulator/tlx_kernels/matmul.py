"""A persistent Hopper matmul: TMA ring, wgmma consumers, one TMA store of what the consumers staged together."""

import triton
import triton.language as tl

from jagged_attn.backends._jit.tlx import tlx


@triton.jit
def _slot(count, N: tl.constexpr):
    return count % N, (count // N) & 1


@triton.jit
def _tile(t, n_tiles, BM: tl.constexpr, BN: tl.constexpr):
    return (t // n_tiles) * BM, (t % n_tiles) * BN


@triton.jit
def _load(desc_a, desc_b, a_tiles, b_tiles, full, empty, tiles, n_tiles, steps, BM: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, STAGES: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    count = 0
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m, n = _tile(t, n_tiles, BM * GROUPS, BN)
        for k in range(steps):
            buf, phase = _slot(count, STAGES)
            tlx.barrier_wait(empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(full[buf], (GROUPS * BM + BN) * BK * 2)
            for g in tl.static_range(GROUPS):
                tlx.async_descriptor_load(desc_a, a_tiles[buf * GROUPS + g], [m + g * BM, k * BK], full[buf])
            tlx.async_descriptor_load(desc_b, b_tiles[buf], [k * BK, n], full[buf])
            count += 1


@triton.jit
def _mma(g: tl.constexpr, desc_c, a_tiles, b_tiles, c_tile, full, empty, tiles, n_tiles, steps, BM: tl.constexpr,
         BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    count = 0
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m, n = _tile(t, n_tiles, BM * GROUPS, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(steps):
            buf, phase = _slot(count, STAGES)
            tlx.barrier_wait(full[buf], phase)
            acc = tlx.async_dot(a_tiles[buf * GROUPS + g], b_tiles[buf], acc)
            # One product stays in flight: the one before has read its tiles.
            acc = tlx.async_dot_wait(1, acc)
            if k > 0:
                last, _ = _slot(count - 1, STAGES)
                tlx.barrier_arrive(empty[last], 1)
            count += 1
        acc = tlx.async_dot_wait(0, acc)
        last, _ = _slot(count - 1, STAGES)
        tlx.barrier_arrive(empty[last], 1)
        # Group 0 stores for all: its store of the tile before has to have read the staging buffer.
        if g == 0:
            tlx.async_descriptor_store_wait(0)
        tlx.named_barrier_wait(9, 128 * GROUPS)
        tlx.local_store(tlx.local_slice(c_tile[0], [g * BM, 0], [BM, BN]), acc.to(tl.bfloat16))
        tlx.fence("async_shared")
        tlx.named_barrier_wait(10, 128 * GROUPS)
        if g == 0:
            tlx.async_descriptor_store(desc_c, c_tile[0], [m, n])
    if g == 0:
        tlx.async_descriptor_store_wait(0)


@triton.jit
def matmul(desc_a, desc_b, desc_c, m_tiles, n_tiles, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           STAGES: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """C = A B in bf16. Each of GROUPS consumers takes BM rows.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | full | 1 + bytes | load | mma |
    | empty | GROUPS | each mma group | load |
    | named 9 | 128 GROUPS threads | group 0 after its store has read the staging buffer, the others | all |
    | named 10 | 128 GROUPS threads | each group, its rows staged | all |
    """
    a_tiles = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES * GROUPS)
    b_tiles = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    c_tile = tlx.local_alloc((BM * GROUPS, BN), tl.bfloat16, 1)
    full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_barriers(STAGES, GROUPS)
    tiles = m_tiles * n_tiles
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(desc_a, desc_b, a_tiles, b_tiles, full, empty, tiles, n_tiles, steps, BM, BN, BK, STAGES, GROUPS)
        with tlx.async_task(num_warps=4, registers=232, replicate=GROUPS):
            _mma(tlx.async_task_replica_id(), desc_c, a_tiles, b_tiles, c_tile, full, empty, tiles, n_tiles, steps,
                 BM, BN, BK, STAGES, GROUPS)  # fmt: skip
