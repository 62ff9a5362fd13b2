"""A matmul by pairs of CTAs (sm_100): each loads half of A's rows and of B's columns, the tensor core reads both."""

import triton
import triton.language as tl

from jagged_attn.backends._jit.tlx import tlx


@triton.jit
def _slot(count, N: tl.constexpr):
    return count % N, (count // N) & 1


@triton.jit
def _load(desc_a, desc_b, a_tiles, b_tiles, full, empty, rank, pair, steps, BN: tl.constexpr, BK: tl.constexpr,
          STAGES: tl.constexpr):  # fmt: skip
    for k in range(steps):
        buf, phase = _slot(k, STAGES)
        tlx.barrier_wait(empty[buf], phase ^ 1)
        tlx.barrier_expect_bytes(full[buf], (128 * BK + BK * (BN // 2)) * 2)
        tlx.async_descriptor_load(desc_a, a_tiles[buf], [pair * 256 + rank * 128, k * BK], full[buf])
        tlx.async_descriptor_load(desc_b, b_tiles[buf], [k * BK, rank * (BN // 2)], full[buf])


@triton.jit
def _mma(a_tiles, b_tiles, acc, full, empty, both, done, rank, steps, STAGES: tl.constexpr):
    for k in range(steps):
        buf, phase = _slot(k, STAGES)
        tlx.barrier_wait(full[buf], phase)
        tlx.barrier_arrive(both[buf], 1, remote_cta_rank=0)
        tlx.barrier_wait(both[buf], phase, pred=rank == 0)
        tlx.async_dot(a_tiles[buf], b_tiles[buf], acc[0], use_acc=k > 0, mBarriers=[empty[buf]], two_ctas=True)
    tlx.tcgen05_commit(done[0], two_ctas=True)
    # The last products read both CTAs' tiles: neither leaves before they are complete.
    tlx.barrier_wait(done[0], 0)


@triton.jit
def _write(C, acc, done, rank, pair, BN: tl.constexpr):
    tlx.barrier_wait(done[0], 0)
    rows = pair * 256 + rank * 128 + tl.arange(0, 128)
    tl.store(C + rows[:, None] * BN + tl.arange(0, BN)[None, :], tlx.local_load(acc[0]))


@triton.jit
def pair_matmul(desc_a, desc_b, C, steps, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """C[256 rows a pair, BN] = A B in fp32.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | full | 1 + bytes | load of the same CTA | mma of the same CTA |
    | both | 2 | mma of both CTAs, at the leader | mma of the leader |
    | empty | 1 | the product, in both CTAs | load |
    | done | 1 | the last commit, in both CTAs | write, mma |
    """
    a_tiles = tlx.local_alloc((128, BK), tl.bfloat16, STAGES)
    b_tiles = tlx.local_alloc((BK, BN // 2), tl.bfloat16, STAGES)
    acc = tlx.local_alloc((128, BN), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_barriers(STAGES)
    both = tlx.alloc_barriers(STAGES, 2)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    pair = tl.program_id(0) // 2
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _write(C, acc, done, rank, pair, BN)
        with tlx.async_task(num_warps=1, registers=48):
            _load(desc_a, desc_b, a_tiles, b_tiles, full, empty, rank, pair, steps, BN, BK, STAGES)
        with tlx.async_task(num_warps=1, registers=48):
            _mma(a_tiles, b_tiles, acc, full, empty, both, done, rank, steps, STAGES)
