"""One small kernel for each thing the emulator models or checks. ``FAULT`` picks what is wrong; empty is right."""

import triton
import triton.language as tl

from jagged_attn.backends._jit.tlx import get_bufidx_phase, tlx


@triton.jit
def hand_over(x, desc_y, FAULT: tl.constexpr):
    """One task fills a shared tile, another stores it by TMA."""
    tile = tlx.local_alloc((64, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            cells = tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 32)[None, :]
            if FAULT == "early arrival":
                tlx.barrier_arrive(full[0], 1)
            if FAULT != "never written":
                tlx.local_store(tile[0], tl.load(x + cells))
            if FAULT != "no fence":
                tlx.fence("async_shared")
            if FAULT == "double arrival":
                tlx.barrier_arrive(full[0], 2)
            elif FAULT != "early arrival" and FAULT != "no arrival":
                tlx.barrier_arrive(full[0], 1)
        with tlx.async_task(num_warps=1):
            if FAULT == "wrong parity":
                tlx.barrier_wait(full[0], 1)
            elif FAULT == "no parity":
                tlx.barrier_wait(full[0], 2)
            elif FAULT != "no wait":
                tlx.barrier_wait(full[0], 0)
            tlx.async_descriptor_store(desc_y, tile[0], [0, 0])
            if FAULT != "no store wait":
                tlx.async_descriptor_store_wait(0)


@triton.jit
def ring(desc_x, y, n, FAULT: tl.constexpr):
    """TMA loads through a ring of two, summed by the default task."""
    tiles = tlx.local_alloc((16, 32), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            total = tl.zeros((16, 32), tl.float32)
            for i in range(n):
                buf, phase = get_bufidx_phase(i, 2)
                tlx.barrier_wait(full[buf], phase)
                total += tlx.local_load(tiles[buf])
                if FAULT != "no release" or i < 1:
                    tlx.barrier_arrive(empty[buf], 1)
            tl.store(y + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], total)
        with tlx.async_task(num_warps=1):
            loads = n + 1 if FAULT == "one load too many" else n
            for i in range(loads):
                buf, phase = get_bufidx_phase(i, 2)
                if FAULT != "no empty wait":
                    tlx.barrier_wait(empty[buf], phase ^ 1)
                if FAULT == "too few bytes":
                    tlx.barrier_expect_bytes(full[buf], 16 * 32 * 2)
                elif FAULT == "too many bytes":
                    tlx.barrier_expect_bytes(full[buf], 16 * 32 * 4 + 128)
                elif FAULT != "not armed":
                    tlx.barrier_expect_bytes(full[buf], 16 * 32 * 4)
                tlx.async_descriptor_load(desc_x, tiles[buf], [16 * i, 0], full[buf])


@triton.jit
def products(desc_a, desc_b, y, FAULT: tl.constexpr):
    """Two wgmma in flight, used one after the other."""
    a = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 2 * 64 * 64 * 2)
    tlx.async_descriptor_load(desc_a, a[0], [0, 0], full[0])
    tlx.async_descriptor_load(desc_b, b[0], [0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    first = tlx.async_dot(a[0], b[0])
    second = tlx.async_dot(a[0], tlx.local_trans(b[0]))
    if FAULT == "used in flight":
        total = first * 2.0
    elif FAULT == "wait off by one":
        first = tlx.async_dot_wait(2, first)
        total = first * 2.0
    elif FAULT == "another's wait":
        second = tlx.async_dot_wait(0, second)
        total = first * 2.0
    else:
        first = tlx.async_dot_wait(1, first)
        total = first * 2.0
    second = tlx.async_dot_wait(0, second)
    cells = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(y + cells, total + second)


@triton.jit
def _add_product(x, b, acc):
    return tlx.async_dot_wait(0, tlx.async_dot(x, b, acc))


@triton.jit
def held_operand(desc_a, desc_b, y, n, HOW: tl.constexpr, FAULT: tl.constexpr):
    """Products whose left operand stays in registers, while the next one may land where it was loaded from."""
    dtype: tl.constexpr = tlx.dtype_of(desc_a)
    late: tl.constexpr = HOW == "as loaded" and (FAULT == "" or FAULT == "written over")
    a = tlx.local_alloc((64, 64), dtype, 1)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    a_full = tlx.alloc_barriers(1)
    a_empty = tlx.alloc_barriers(1)
    b_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            cells = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
            tlx.barrier_wait(b_full[0], 0)
            for i in range(n):
                tlx.barrier_wait(a_full[0], i & 1)
                x = tlx.local_load(a[0])
                if HOW == "doubled":
                    x = x + x
                elif HOW == "rounded" or FAULT == "cast to its own type":
                    x = x.to(tl.bfloat16)
                elif FAULT == "cast there and back":
                    x = x.to(tl.float32).to(tl.bfloat16)
                elif FAULT == "cast further and back":
                    x = x.to(tl.float32).to(tl.float64).to(tl.bfloat16)
                elif FAULT == "written over":
                    tlx.local_store(a[0], tl.zeros((64, 64), dtype))
                    tlx.fence("async_shared")
                if not late:
                    tlx.barrier_arrive(a_empty[0], 1)
                acc = tl.zeros((64, 64), tl.float32)
                if HOW == "unrolled":
                    for _ in tl.static_range(2):
                        acc = _add_product(x, b[0], acc)
                elif HOW == "handed on":
                    for _ in range(2):
                        acc = _add_product(x, b[0], acc)
                        x = x + x
                elif FAULT == "changed in the loop":
                    for _ in range(2):
                        acc = _add_product(x + acc.to(tl.bfloat16), b[0], acc)
                else:
                    for _ in range(2):
                        acc = _add_product(x, b[0], acc)
                if late:
                    tlx.barrier_arrive(a_empty[0], 1)
                tl.store(y + 64 * 64 * i + cells, acc)
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(b_full[0], 64 * 64 * 2)
            tlx.async_descriptor_load(desc_b, b[0], [0, 0], b_full[0])
            for i in range(n):
                tlx.barrier_wait(a_empty[0], (i & 1) ^ 1)
                tlx.barrier_expect_bytes(a_full[0], 64 * 64 * tlx.size_of(dtype))
                tlx.async_descriptor_load(desc_a, a[0], [64 * i, 0], a_full[0])


@triton.jit
def shifted(y, FAULT: tl.constexpr):
    """Whole numbers from shared memory, shifted with their sign."""
    a = tlx.local_alloc((64,), tl.int32, 1)
    cells = tl.arange(0, 64)
    tlx.local_store(a[0], cells - 32)
    tl.store(y + cells, tlx.local_load(a[0]) >> 1)


@triton.jit
def tensor_memory(desc_a, desc_b, y, FAULT: tl.constexpr):
    """P over S: a product, its bf16 copy in the same columns as operand of the next."""
    a = tlx.local_alloc((128, 64), tl.bfloat16, 1)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    s = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((128, 64), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)
    o_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if FAULT != "no wait for S":
                tlx.barrier_wait(s_full[0], 0)
            x = tlx.local_load(s[0])
            if FAULT != "P not written":
                tlx.local_store(p[0], (x * 0.5).to(tl.bfloat16))
            tlx.barrier_arrive(o_full[0], 1)
            if FAULT != "S reused too early":
                tlx.barrier_wait(o_full[0], 1)
            else:
                tlx.local_store(s[0], x)
            cells = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
            tl.store(y + cells, tlx.local_load(o[0]))
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(full[0], (128 * 64 + 64 * 64) * 2)
            tlx.async_descriptor_load(desc_a, a[0], [0, 0], full[0])
            tlx.async_descriptor_load(desc_b, b[0], [0, 0], full[0])
            tlx.barrier_wait(full[0], 0)
            tlx.async_dot(a[0], b[0], s[0], use_acc=FAULT == "accumulates", mBarriers=[s_full[0]])
            tlx.barrier_wait(o_full[0], 0)
            tlx.async_dot(p[0], b[0], o[0], use_acc=False, force_async=True)
            tlx.tcgen05_commit(o_full[0])


@triton.jit
def budget(y, BYTES: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr, REGISTERS: tl.constexpr):
    """Asks for what it is told to ask for."""
    tlx.local_alloc((BYTES,), tl.uint8, 1)
    if COLUMNS > 0:
        tlx.local_alloc((128, COLUMNS), tl.float32, 1, tlx.storage_kind.tmem)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(y, 1.0)
        with tlx.async_task(num_warps=WARPS, registers=REGISTERS):
            pass


@triton.jit
def pointers(x, y, n, FAULT: tl.constexpr):
    """Each CTA copies 32 elements."""
    start = tl.program_id(0) * 32
    cells = start + tl.arange(0, 32)
    value = tl.load(x + cells, mask=cells < n, other=0.0)
    if FAULT == "no mask":
        tl.store(y + cells, value)
    elif FAULT == "tile of another CTA":
        tl.store(y + cells - start, value, mask=cells < n)
    elif FAULT == "twice":
        tl.store(y + cells, value, mask=cells < n)
        tl.store(y + cells, value, mask=cells < n)
    elif FAULT == "one short":
        tl.store(y + cells, value, mask=cells < n - 1)
    else:
        tl.store(y + cells, value, mask=cells < n)


@triton.jit
def cp_async(x, y, FAULT: tl.constexpr):
    """Two groups of cp.async; the first is used while the second may be in flight."""
    tiles = tlx.local_alloc((128,), tl.float32, 2)
    cells = tl.arange(0, 128)
    tlx.async_load(x + cells, tiles[0], mask=cells < 100, other=7.0)
    tlx.async_load_commit_group()
    tlx.async_load(x + 128 + cells, tiles[1])
    tlx.async_load_commit_group()
    tlx.async_load_wait_group(2 if FAULT == "wait off by one" else 1)
    tl.store(y + cells, tlx.local_load(tiles[0]))
    if FAULT != "no last wait":
        tlx.async_load_wait_group(0)
    tl.store(y + 128 + cells, tlx.local_load(tiles[1]))


@triton.jit
def bulk(x, y, FAULT: tl.constexpr):
    """Bulk copies in and out."""
    tile = tlx.local_alloc((128,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 512)
    tlx.async_load(x, tile[0], bulk=True, barrier=full[0])
    tlx.barrier_wait(full[0], 0)
    if FAULT == "no fence":
        tlx.local_store(tile[0], tlx.local_load(tile[0]) + 1.0)
    tlx.async_store(y, tile[0], 512)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def multicast(desc_x, y, FAULT: tl.constexpr):
    """CTA 0 loads one tile for both CTAs of its cluster."""
    tile = tlx.local_alloc((16, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    if FAULT != "peer not armed" or rank == 0:
        tlx.barrier_expect_bytes(full[0], 16 * 32 * 4)
    if FAULT != "no cluster barrier":
        tlx.cluster_barrier()
    if rank == 0:
        tlx.async_descriptor_load(desc_x, tile[0], [0, 0], full[0], multicast_targets=[0, 1])
    if FAULT != "peer does not wait" or rank == 0:
        tlx.barrier_wait(full[0], 0)
    cells = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(y + rank * 16 * 32 + cells, tlx.local_load(tile[0]))


@triton.jit
def exchange(x, y, HOW: tl.constexpr, FAULT: tl.constexpr):
    """The CTAs of a pair swap a vector through distributed shared memory."""
    mine = tlx.local_alloc((128,), tl.float32, 1)
    theirs = tlx.local_alloc((128,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    peer = 1 - rank
    cells = tl.arange(0, 128)
    value = tl.load(x + rank * 128 + cells)
    if HOW == "store":
        tlx.remote_shmem_store(theirs[0], value, peer)
        if FAULT != "no cluster barrier":
            tlx.cluster_barrier()
    else:
        tlx.barrier_expect_bytes(full[0], 512)
        if HOW == "async store":
            tlx.async_remote_shmem_store(theirs[0], value, peer, full[0])
        else:
            tlx.local_store(mine[0], value)
            if FAULT != "no fence":
                tlx.fence("async_shared")
            tlx.async_remote_shmem_copy(theirs[0], mine[0], peer, full[0])
        if FAULT != "no wait":
            tlx.barrier_wait(full[0], 0)
    tl.store(y + rank * 128 + cells, tlx.local_load(theirs[0]))
    if HOW == "copy":
        # The source must stay until the peer has the data.
        tlx.barrier_arrive(done[0], 1, remote_cta_rank=peer)
        if FAULT != "leaves early":
            tlx.barrier_wait(done[0], 0)


@triton.jit
def relay(x, desc_b, y, FAULT: tl.constexpr):
    """``y [128, 64] = x^T b``: each CTA of a pair has 128 rows of ``x``, sends columns of them, and makes 64 rows."""
    x_tiles = tlx.local_alloc((128, 64), tl.bfloat16, 2)
    b_tiles = tlx.local_alloc((128, 32), tl.bfloat16, 2)
    both = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    acc = tlx.local_alloc((64, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=both)
    lanes = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem, reuse=both)
    both.set_buffer_overlap(tlx.reuse_group(acc, lanes, group_type=tlx.reuse_group_type.shared))
    full = tlx.alloc_barriers(1)
    got = tlx.alloc_barriers(1)
    ready = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    lane = tl.arange(0, 128)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for g in tl.static_range(2):
                at = x + (rank * 128 + lane)[:, None] * 128 + g * 64 + tl.arange(0, 64)[None, :]
                tlx.async_remote_shmem_store(x_tiles[rank], tl.load(at), g, got[0])
            tlx.barrier_wait(done[0], 0)
            at = y + (rank * 64 + lane % 64)[:, None] * 64 + (lane // 64 * 32)[:, None] + tl.arange(0, 32)[None, :]
            tl.store(at, tlx.local_load(lanes[0]))
            if FAULT == "reads 64 rows":
                tlx.local_load(acc[0])
        with tlx.async_task(num_warps=1, registers=64):
            tlx.barrier_expect_bytes(got[0], 32768)
            tlx.barrier_expect_bytes(full[0], 32768, pred=rank == 0)
            for k in tl.static_range(2):
                tlx.async_descriptor_load(desc_b, b_tiles[k], [k * 128, rank * 32], full[0], two_ctas=True)
            if FAULT != "no wait":
                tlx.barrier_wait(got[0], 0)
            if FAULT != "no fence":
                tlx.fence("async_shared")
            if rank == 1:
                if FAULT != "no relay":
                    tlx.barrier_arrive(ready[0], 1, remote_cta_rank=0)
            else:
                tlx.barrier_wait(full[0], 0)
                if FAULT != "no wait for the relay":
                    tlx.barrier_wait(ready[0], 0)
                for k in tl.static_range(2):
                    tlx.async_dot(
                        tlx.local_trans(x_tiles[k]), b_tiles[k], acc[0], use_acc=k > 0, two_ctas=True, force_async=True
                    )
                tlx.tcgen05_commit(done[0], two_ctas=True)


@triton.jit
def remote_wait(y):
    """Waits for a barrier of the other CTA, which no instruction can do."""
    bar = tlx.alloc_barriers(1)
    tlx.barrier_wait(tlx.remote_view(bar[0], 1 - tlx.cluster_cta_rank()), 0)
    tl.store(y, 1.0)


@triton.jit
def last_words(y, BARRIER: tl.constexpr):
    """The second CTA of a cluster arrives at the first one's barrier, which nobody waits for."""
    bar = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(y + rank, 1.0)
        with tlx.async_task(num_warps=1, registers=48):
            if rank == 1:
                tlx.barrier_arrive(bar[0], 1, remote_cta_rank=0)
    if BARRIER:
        tlx.cluster_barrier()


@triton.jit
def launch_control(y, PAIR: tl.constexpr, FAULT: tl.constexpr):
    """Running CTAs, or pairs of them, take over the tiles of those that have not started."""
    context = tlx.clc_create_context(num_consumers=4 if PAIR else 2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tile = tl.program_id(0)
            produce = 1
            consume = 0
            while tile != -1:
                tlx.clc_producer(context, produce, multi_ctas=PAIR)
                produce ^= 1
                tl.store(y + 2 * tile, tile + 1)
                tile = tlx.clc_consumer(context, consume, multi_ctas=PAIR)
                consume ^= 1
        with tlx.async_task(num_warps=1):
            tile = tl.program_id(0)
            consume = 0
            while tile != -1:
                tl.store(y + 2 * tile + 1, -tile - 1)
                if FAULT == "one consumer fewer" and tile > 2:
                    tile = -1
                else:
                    tile = tlx.clc_consumer(context, consume, multi_ctas=PAIR)
                    consume ^= 1


@triton.jit
def hand_out(counter, slot, y, n, FAULT: tl.constexpr):
    """Tiles by an atomic counter; the number goes to the other task through a global slot and a ring of two."""
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    mine = slot + 2 * tl.program_id(0)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            i = 0
            tile = 0
            while tile >= 0:
                buf, phase = get_bufidx_phase(i, 2)
                tlx.barrier_wait(full[buf], phase)
                tile = tl.load(mine + buf, volatile=True)
                tlx.barrier_arrive(empty[buf], 1)
                if tile >= 0:
                    tl.store(y + tile, tile + 1)
                i += 1
        with tlx.async_task(num_warps=1):
            i = 0
            tile = 0
            while tile >= 0:
                tile = tl.atomic_add(counter, 1)
                tile = tl.where(tile < n, tile, -1)
                buf, phase = get_bufidx_phase(i, 2)
                if FAULT != "slot reused too early":
                    tlx.barrier_wait(empty[buf], phase ^ 1)
                tl.store(mine + buf, tile)
                tlx.barrier_arrive(full[buf], 1)
                i += 1


@triton.jit
def message(flag, data, y, HOW: tl.constexpr, FAULT: tl.constexpr):
    """CTA 0 sends a value to CTA 1 through global memory."""
    if tl.program_id(0) == 0:
        tl.store(data, 42.0)
        if HOW == "fence":
            if FAULT != "no fence":
                tlx.fence("gpu")
            tl.atomic_add(flag, 1, sem="relaxed")
        else:
            tl.atomic_add(flag, 1, sem="relaxed" if FAULT == "relaxed" else "release")
    else:
        if HOW == "fence":
            while tl.load(flag, volatile=True) == 0:
                pass
            tlx.fence("gpu")
        else:
            while tl.atomic_add(flag, 0, sem="acquire") == 0:
                pass
        tl.store(y, tl.load(data))


@triton.jit
def reduction(desc_y, x, FAULT: tl.constexpr):
    """Every CTA adds its tile into the same output by TMA."""
    tile = tlx.local_alloc((16, 32), tl.float32, 1)
    cells = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tlx.local_store(tile[0], tl.load(x + tl.program_id(0) * 512 + cells))
    tlx.fence("async_shared")
    if FAULT == "plain store" and tl.program_id(0) == 1:
        tlx.async_descriptor_store(desc_y, tile[0], [0, 0])
    else:
        tlx.async_descriptor_store(desc_y, tile[0], [0, 0], store_reduce="add")
    tlx.async_descriptor_store_wait(0)


@triton.jit
def device_descriptor(x, y, n):
    """A descriptor made in the kernel, clipped to the first ``n`` rows."""
    desc = tl.make_tensor_descriptor(x, shape=[n, 32], strides=[32, 1], block_shape=[16, 32])
    tile = tlx.local_alloc((16, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 16 * 32 * 4)
    tlx.async_descriptor_load(desc, tile[0], [8, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    cells = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(y + cells, tlx.local_load(tile[0]))


@triton.jit
def aliases(y, FAULT: tl.constexpr):
    """Two vectors side by side over one twice as long, two of each."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem, buffer_size_bytes=64 if FAULT == "too small" else 2048)
    long = tlx.local_alloc((256,), tl.float32, 2, reuse=spec)
    low = tlx.local_alloc((128,), tl.float32, 2, reuse=spec)
    high = tlx.local_alloc((128,), tl.float32, 2, reuse=spec)
    # One expression: a reuse_group has no name.
    spec.set_buffer_overlap(
        tlx.reuse_group(
            long,
            tlx.reuse_group(low, high, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    cells = tl.arange(0, 128)
    for i in tl.static_range(2):
        tlx.local_store(low[i], (cells + 1000 * i).to(tl.float32))
        tlx.local_store(high[i], (cells + 1000 * i + 128).to(tl.float32))
        tl.store(y + 256 * i + tl.arange(0, 256), tlx.local_load(long[i]))


@triton.jit
def reuse_of_unequal_size():
    """A tensor-memory alias smaller than what it lies over."""
    s = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_alloc((128, 64), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=s)


@triton.jit
def warp_barrier(y, ARRIVALS: tl.constexpr):
    """A barrier at which each of 128 threads arrives."""
    bar = tlx.alloc_warp_barrier(1, num_warps=4, num_arrivals=ARRIVALS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(bar[0], 0)
            tl.store(y, 1.0)
        with tlx.async_task(num_warps=4):
            tlx.barrier_arrive(bar[0], 1)


@triton.jit
def unknown(y, WHICH: tl.constexpr):
    """Uses what the emulator does not have."""
    if WHICH == "operation":
        tlx.async_dot_scaled_more(y)
    elif WHICH == "keyword":
        tlx.fence("async_shared", how="well")
    elif WHICH == "task option":
        with tlx.async_tasks(), tlx.async_task("default"):
            pass
    elif WHICH == "ptx":
        tl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [tl.load(y)], dtype=tl.int32, is_pure=True, pack=1)
    elif WHICH == "known":
        tlx.thread_id(0)


@triton.jit
def arithmetic(a, b, out):
    """Integer arithmetic as the GPU does it."""
    x = tl.load(a)
    y = tl.load(b)
    tl.store(out, x // y)
    tl.store(out + 1, x % y)
    tl.store(out + 2, x * y)
    tl.store(out + 3, x - y)
    tl.store(out + 4, 7 - x)
    total = 0
    for i in range(3):
        # -1 // 2 is 0 here, not -1 as in Python.
        total += (i - 1) // 2
    tl.store(out + 5, total)


@triton.jit
def bf16_arithmetic(a, b, out, n: tl.constexpr):
    """bf16 in, bf16 arithmetic, bf16 out."""
    cells = tl.arange(0, n)
    x = tl.load(a + cells)
    y = tl.load(b + cells)
    tl.store(out + cells, x * y)
    tl.store(out + n + cells, x + y)
    tl.store(out + 2 * n + cells, (x.to(tl.float32) / 3.0).to(tl.bfloat16))
    tl.store(out + 3 * n + cells, tl.where(x > y, x, y))
    tl.store(out + 4 * n + cells, x * 0.5)


@triton.jit
def wait_for_next(flag, y):
    """CTA 0 waits for CTA 1."""
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            pass
        tl.store(y, 1.0)
    else:
        tl.atomic_add(flag, 1)


@triton.jit
def default_with_registers():
    """Registers for the default task, which fbtriton refuses."""
    with tlx.async_tasks():
        with tlx.async_task("default", registers=120):
            pass
        with tlx.async_task(num_warps=4, registers=120):
            pass


@triton.jit
def queue_order(desc_a, desc_b, y):
    """A product reads P from columns that the next product, into another accumulator, overwrites."""
    a = tlx.local_alloc((128, 64), tl.bfloat16, 1)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    s = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((128, 64), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], (128 * 64 + 64 * 64) * 2)
    tlx.async_descriptor_load(desc_a, a[0], [0, 0], full[0])
    tlx.async_descriptor_load(desc_b, b[0], [0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    tlx.local_store(p[0], tlx.local_load(a[0]))
    tlx.async_dot(p[0], b[0], o[0], use_acc=False, force_async=True)
    tlx.async_dot(a[0], b[0], s[0], use_acc=False, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    cells = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(y + cells, tlx.local_load(s[0]))


@triton.jit
def descriptor_slots(x, y, n, FAULT: tl.constexpr):
    """The second of two descriptors kept in global scratch."""
    slots = tlx.allocate_tensor_descriptor(num=2)
    if FAULT != "not made":
        tlx.make_tensor_descriptor(slots[1], x, [n, 32], [32, tl.constexpr(1)], [16, 32])
    desc = tlx.reinterpret_tensor_descriptor(slots[1], [16, 32], tl.float32)
    tile = tlx.local_alloc((16, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 16 * 32 * 4)
    tlx.async_descriptor_load(desc, tile[0], [8, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    cells = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(y + cells, tlx.local_load(tile[0]))


@triton.jit
def named_group():
    """A reuse_group with a name, which fbtriton refuses."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    low = tlx.local_alloc((128,), tl.float32, 2, reuse=spec)
    group = tlx.reuse_group(low, group_type=tlx.reuse_group_type.shared)
    spec.set_buffer_overlap(group)


@triton.jit
def _own_number(y):
    tl.store(y + tlx.async_task_replica_id(), 1.0)


@triton.jit
def replica_in_a_function(y):
    """A function asks for the replica's number: fbtriton compiles it once, so both get the first one's."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            pass
        with tlx.async_task(num_warps=4, replicate=2):
            _own_number(y)


@triton.jit
def add_up(desc_sum, sums, y, FAULT: tl.constexpr):
    """One task adds a tile to global memory by TMA, another reads the sum."""
    tile = tlx.local_alloc((16, 32), tl.float32, 1)
    landed = tlx.alloc_barriers(1)
    cells = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tile[0], tl.full((16, 32), 1.0, tl.float32))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(desc_sum, tile[0], [0, 0], store_reduce="add")
            # The compiler's wait is for the source to be read, which says nothing of the sum.
            tlx.async_descriptor_store_wait(0)
            if FAULT != "only read":
                tl.inline_asm_elementwise(
                    "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
            tlx.barrier_arrive(landed[0], 1)
        with tlx.async_task(num_warps=4):
            if FAULT != "no wait":
                tlx.barrier_wait(landed[0], 0)
            tl.store(y + cells, tl.load(sums + cells))
