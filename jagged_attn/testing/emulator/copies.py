"""Asynchronous copies: TMA loads, stores and reductions, cp.async, bulk copies, distributed shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl

from .barrier_ops import by_rank, in_cta
from .barriers import Mbarrier
from .descriptors import Descriptor, DescriptorSlots
from .errors import Verdict
from .machine import Op, machine
from .memory import Buffer
from .numerics import is_true, np_dtype, unwrap

_POISON = 0xFF


def _poison(buffer: Buffer) -> None:
    """Fill what an operation is about to write with a pattern that is NaN in every float type."""
    buffer.data[...] = np.full((), _POISON, np.uint8).repeat(buffer.data.itemsize).view(buffer.data.dtype)[0]


def _checked(map: Any, buffer: Buffer) -> Descriptor:
    """The descriptor, made on the host or in the kernel, once it fits the tile."""
    desc: Descriptor = map.handle
    if int(np.prod(desc.block_shape)) != buffer.data.size or desc.block_shape[-1] != buffer.shape[-1]:
        raise machine().fail(Verdict.SHAPE, f"{buffer.name} of {buffer.shape} for a block of {desc.block_shape}")
    if desc.dtype.primitive_bitwidth != buffer.dtype.primitive_bitwidth:
        raise machine().fail(Verdict.SHAPE, f"{buffer.name} of {buffer.dtype} for a descriptor of {desc.dtype}")
    return desc


def async_descriptor_load(
    desc: Descriptor,
    result: Buffer,
    offsets: Sequence[Any],
    barrier: Mbarrier,
    pred: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
    multicast_targets: Sequence[Any] = (),
    two_ctas: bool = False,
) -> None:
    """TMA load: zeros outside the map, and always the whole tile's bytes on the barrier."""
    if not is_true(pred):
        return
    desc, run = _checked(desc, result), machine()
    ctas = [by_rank(t) for t in multicast_targets] or [run.running.cta]
    leader = by_rank(run.running.cta.rank & ~1) if two_ctas else None
    barriers = [in_cta(barrier, leader or cta) for cta in ctas]
    box = desc.box(offsets)
    op = run.issue("tma_load", ctas, run.running.release())
    desc.record(op, box, write=False)
    tiles = [result.at(cta) for cta in ctas]
    for tile in tiles:
        op.access(tile, write=True)
        _poison(tile)

    def finish() -> None:
        for tile, signal in zip(tiles, barriers, strict=True):
            desc.fetch(box, tile.data)
            signal.complete(op.clock, tile.nbytes, op.where)

    op.action = finish
    run.submit(op)
    run.pause()


def _store_op(source: Buffer) -> tuple[Op, int]:
    """A bulk-group operation of this task, and the number under which its global write is known."""
    run = machine()
    task = run.running
    op = run.issue("tma_store", [task.cta], task.release(), ("store", task.number))
    # Waiting for a group tells that the source has been read, not that the destination is visible.
    written = run.next_op()
    op.clock.ops |= 1 << written
    op.written = written
    op.access(source, write=False)
    return op, written


def _submit_store(op: Op) -> None:
    """Queue a bulk group, which waits of both kinds will ask for."""
    run = machine()
    run.submit(op)
    run.running.stores.append(op)
    run.running.writes.append(op)
    run.pause()


def async_descriptor_store(
    desc: Descriptor, source: Buffer, offsets: Sequence[Any], eviction_policy: str = "", store_reduce: Any = ""
) -> None:
    """TMA store or reduction, a bulk group of its own."""
    desc, run, how = _checked(desc, source), machine(), unwrap(store_reduce)
    if how not in ("", "add", "min", "max", "and", "or", "xor"):
        raise run.fail(Verdict.SHAPE, f"store_reduce {how!r}")
    box = desc.box(offsets)
    run.compiler_fence()
    op, written = _store_op(source)
    desc.record(op, box, True, bool(how), written)
    op.action = lambda: desc.reduce(box, source.data, how)
    _submit_store(op)


def async_store(dst_global_ptr: tl.tensor, src_smem: Buffer, size: Any) -> None:
    """Bulk copy of bytes from shared to global memory, a bulk group of its own."""
    run, count = machine(), int(unwrap(size))
    address = int(dst_global_ptr.handle.data.reshape(-1)[0])
    base = run.memory.find(address)
    item = np.dtype(f"u{base.itemsize}")
    kind = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}[item.itemsize]
    desc = run.memory.descriptor(address, [count // item.itemsize], [1], [count // item.itemsize], kind)
    box = desc.box([0])
    op, written = _store_op(src_smem)
    desc.record(op, box, True, False, written)

    def finish() -> None:
        raw = np.ascontiguousarray(src_smem.data).reshape(-1).view(np.uint8)[:count]
        desc.reduce(box, raw.view(item), "")

    op.action = finish
    _submit_store(op)


def async_descriptor_store_wait(pendings: Any) -> None:
    """Wait until at most ``pendings`` of this task's store groups may still read their source."""
    task = machine().running
    for op in _wait_for(task.stores, pendings):
        task.clock.ops |= 1 << op.number


def bulk_wait_group(pendings: int) -> None:
    """``cp.async.bulk.wait_group`` without ``.read``: the groups have been written to global memory, too."""
    task = machine().running
    finished = _wait_for(task.writes, pendings)
    for op in finished:
        task.clock.ops |= 1 << op.number | 1 << op.written
    task.stores = [op for op in task.stores if op not in finished]


def _wait_for(ops: list[Op], pendings: Any) -> list[Op]:
    """Wait for all but the last ``pendings`` of some groups, and take them from the list."""
    run = machine()
    finished = ops[: max(0, len(ops) - int(unwrap(pendings)))]
    run.block(lambda: all(op.done for op in finished), lambda: f"waits for TMA stores: {len(ops)} outstanding")
    del ops[: len(finished)]
    return finished


def allocate_tensor_descriptor(num: Any) -> DescriptorSlots:
    """Room for descriptors made in the kernel."""
    return DescriptorSlots([None] * int(unwrap(num)))


def make_tensor_descriptor(
    desc_ptr: DescriptorSlots | None,
    base: tl.tensor,
    shape: Sequence[Any],
    strides: Sequence[Any],
    block_shape: Sequence[Any],
    padding_option: str = "zero",
) -> Descriptor:
    """Make a descriptor in the kernel."""
    sizes, steps, block = ([int(unwrap(v)) for v in part] for part in (shape, strides, block_shape))
    address = int(base.handle.data.reshape(-1)[0])
    made: Descriptor = machine().memory.descriptor(address, sizes, steps, block, base.dtype.element_ty)
    if desc_ptr is not None:
        desc_ptr.put(made)
    return made


def reinterpret_tensor_descriptor(desc_ptr: DescriptorSlots, block_shape: Sequence[Any], dtype: Any) -> Descriptor:
    """The descriptor made in a slot."""
    made = desc_ptr.get()
    if made.block_shape != [int(unwrap(n)) for n in block_shape] or made.dtype != unwrap(dtype):
        raise machine().fail(Verdict.SHAPE, f"a descriptor of {made.block_shape} is taken for {list(block_shape)}")
    return made


def async_descriptor_prefetch_tensor(
    desc: Descriptor, offsets: Any, pred: Any = None, eviction_policy: str = ""
) -> None:
    """A hint without effect on results."""


def prefetch(pointer: Any, level: str = "L2", mask: Any = None, tensormap: bool = False) -> None:
    """A hint without effect on results."""


class Token:
    """What cp.async operations return; groups are counted per task, so it carries nothing."""


def async_load(
    src: tl.tensor,
    result: Buffer,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
    is_volatile: bool = False,
    bulk: Any = False,
    bulk_size: Any = None,
    barrier: Mbarrier | None = None,
) -> Token:
    """cp.async (a generic-proxy write that lands later), or with ``bulk`` a 1-D copy that signals an mbarrier."""
    if unwrap(bulk):
        return _bulk_load(src, result, bulk_size, barrier)
    run = machine()
    task = run.running
    kind = src.dtype.element_ty
    pointers = src.handle.data
    shape = tuple(result.shape)
    where = np.broadcast_to(True if mask is None else mask.handle.data, shape)
    if list(np.broadcast_shapes(pointers.shape, shape)) != list(shape):
        raise run.fail(Verdict.SHAPE, f"pointers of {pointers.shape} for {result.name} of {result.shape}")
    fill = None
    if other is not None:
        fill = other.handle.data if isinstance(other, tl.tensor) else np.array(unwrap(other), np_dtype(kind))
    op = run.issue("cp_async", [task.cta], task.release(), ("cp_async", task.number))
    op.access(result, write=True, generic=True)
    data = run.memory.load(np.broadcast_to(pointers, shape), where, fill, kind, False)
    _poison(result)
    op.action = lambda: result.data.__setitem__(..., data)
    run.submit(op)
    task.copies.append(op)
    run.pause()
    return Token()


def _bulk_load(src: tl.tensor, result: Buffer, bulk_size: Any, barrier: Mbarrier | None) -> Token:
    run = machine()
    if barrier is None:
        raise run.fail(Verdict.SHAPE, "a bulk async_load needs a barrier")
    count = result.nbytes if bulk_size is None else int(unwrap(bulk_size))
    size = result.data.itemsize
    if count % 16 or count > result.nbytes:
        raise run.fail(Verdict.BYTES, f"a bulk copy of {count} bytes into {result.name} of {result.nbytes}")
    address = int(src.handle.data.reshape(-1)[0])
    desc = run.memory.descriptor(address, [count // size], [1], [count // size], result.dtype)
    box = desc.box([0])
    op = run.issue("tma_load", [run.running.cta], run.running.release())
    part = result.view(result.data[: count // size])
    desc.record(op, box, write=False)
    op.access(part, write=True)
    _poison(part)

    def finish() -> None:
        desc.fetch(box, part.data)
        barrier.complete(op.clock, count, op.where)

    op.action = finish
    run.submit(op)
    run.pause()
    return Token()


def async_load_commit_group(tokens: Sequence[Token] = ()) -> Token:
    """Make a group of the copies issued since the last one."""
    task = machine().running
    task.copy_groups.append(task.copies)
    task.copies = []
    return Token()


def async_load_wait_group(pendings: Any, tokens: Sequence[Token] = ()) -> Token:
    """Wait until at most ``pendings`` groups of this task are outstanding."""
    run = machine()
    task, left = run.running, int(unwrap(pendings))
    finished = task.copy_groups[: max(0, len(task.copy_groups) - left)]
    ops = [op for group in finished for op in group]
    run.block(
        lambda: all(op.done for op in ops), lambda: f"waits for cp.async: {len(task.copy_groups)} groups outstanding"
    )
    for op in ops:
        task.clock.join(op.clock)
    task.copy_groups = task.copy_groups[len(finished) :]
    return Token()


def remote_shmem_store(dst: Buffer, src: tl.tensor, remote_cta_rank: Any) -> None:
    """Store registers into another CTA's shared memory."""
    target = dst.at(by_rank(remote_cta_rank))
    if target.cta.ended:
        raise machine().fail(Verdict.EXIT, f"stores into shared memory of {target.cta.name}, which has ended")
    machine().access(target, write=True)
    target.data[...] = src.handle.data
    machine().pause()


def async_remote_shmem_store(dst: Buffer, src: tl.tensor, remote_cta_rank: Any, barrier: Mbarrier) -> None:
    """Store registers into another CTA's shared memory; the bytes count on its mbarrier."""
    data = np.array(src.handle.data)
    _remote(dst, None, lambda: data, remote_cta_rank, barrier)


def async_remote_shmem_copy(dst: Buffer, src: Buffer, remote_cta_rank: Any, barrier: Mbarrier) -> None:
    """Copy shared memory into another CTA's; the bytes count on its mbarrier."""
    _remote(dst, src, lambda: src.data, remote_cta_rank, barrier)


def _remote(dst: Buffer, src: Buffer | None, read: Any, rank: Any, barrier: Mbarrier) -> None:
    run = machine()
    cta = by_rank(rank)
    signal, target = in_cta(barrier, cta), dst.at(cta)
    # The registers of a store are gone when it is issued; the source of a copy must outlive it.
    op = run.issue("remote", [cta] if src is None else [cta, run.running.cta], run.running.release())
    if src is not None:
        op.access(src, write=False)
    # st.async goes through the generic proxy, a bulk copy through the async one.
    op.access(target, write=True, generic=src is None)
    _poison(target)

    def finish() -> None:
        if cta.ended and run.checks.exits:
            raise run.fail(Verdict.EXIT, f"{op.where} arrives in {cta.name}, which has ended")
        target.data[...] = read()
        signal.complete(op.clock, target.nbytes, op.where)

    op.action = finish
    run.submit(op)
    run.pause()
