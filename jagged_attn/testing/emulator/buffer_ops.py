"""TLX operations on shared and tensor memory: allocate, view, load, store, fence."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from .errors import EmulatorError, Verdict
from .machine import machine
from .memory import SMEM, TMEM, AliasSpec, Buffer
from .numerics import Handle, np_dtype, tensor, unwrap
from .parameters import TENSOR_LANES

# What unwritten memory holds; arithmetic with a number leaves this NaN as it is.
_POISON = np.uint32(0xFFFFFFFF)


def _sizes(values: Any) -> list[int]:
    return [int(unwrap(v)) for v in values]


def local_alloc(
    shape: Any,
    dtype: Any,
    num: Any,
    storage: str = SMEM,
    reuse: Any = None,
    layout: Any = None,
    _name: str = "buffer",
) -> Buffer:
    """Allocate ``num`` equal tiles; ``layout`` is the compiler's business."""
    kind, sizes, count = unwrap(dtype), _sizes(shape), int(unwrap(num))
    bits = kind.primitive_bitwidth
    if storage == TMEM:
        if len(sizes) != 2 or sizes[0] not in (TENSOR_LANES // 2, TENSOR_LANES) or sizes[1] * bits % 32:
            raise machine().fail(
                Verdict.SHAPE, f"a tensor-memory tile of {sizes} x {bits} bits: 64 or 128 lanes, whole columns"
            )
        unit = sizes[1] * bits // 32
        if sizes[0] < TENSOR_LANES and len(machine().running.cta.cluster) > 1:
            # A pair lays it out over all lanes, half of the columns each: see ``Buffer.halved``.
            unit //= 2
    else:
        unit = int(np.prod(sizes)) * bits // 8
    buffer = Buffer(machine().running.cta, storage, kind, sizes, _name, num=count, unit=unit)
    if reuse is None:
        buffer.offset = buffer.arena.allocate(unit * count)
    elif reuse.storage != storage:
        raise machine().fail(Verdict.ALIAS, f"{_name} is in {storage}, what it reuses in {reuse.storage}")
    elif isinstance(reuse, AliasSpec):
        reuse.buffers.append(buffer)
        buffer.alias = reuse
    else:
        _reuse_buffer(buffer, reuse)
    return buffer


def _reuse_buffer(buffer: Buffer, owner: Buffer) -> None:
    """Lay ``buffer`` over ``owner``: no larger, and by the house rules, in tensor memory, of the same size."""
    mine, theirs = buffer.unit * buffer.num, owner.unit * owner.num
    unequal = buffer.storage == TMEM and mine != theirs and machine().checks.equal_aliases
    if mine > theirs or unequal:
        raise machine().fail(Verdict.ALIAS, f"{buffer.name} takes {mine}, {owner.name}, which it reuses, {theirs}")
    buffer.offset = owner.offset
    buffer.alias = owner.alias


def storage_alias_spec(storage: str = SMEM, buffer_size_bytes: Any = None) -> AliasSpec:
    """Declare a backing store that several allocations share."""
    size = unwrap(buffer_size_bytes)
    return AliasSpec(storage, None if size is None else int(size))


def local_view(local_allocated_buffers: Any, buffer_idx: Any) -> Any:
    """Select one tile, barrier or response."""
    return local_allocated_buffers[buffer_idx]


def _refuse_halved(buffer: Buffer) -> None:
    if buffer.halved:
        text = f"{buffer.name}: 64 rows of a pair of CTAs lie over 128 lanes, to be read through an alias of 128 rows"
        raise machine().fail(Verdict.UNSUPPORTED, text)


def local_slice(buffer: Buffer, offset: Any, shape: Any) -> Buffer:
    """Take a rectangle of a tile; in tensor memory, columns only."""
    _refuse_halved(buffer)
    starts, sizes = _sizes(offset), _sizes(shape)
    if buffer.storage == TMEM and (starts[0] or sizes[0] != buffer.shape[0]):
        raise machine().fail(Verdict.SHAPE, "tensor memory is sliced along columns only")
    if any(o + n > full for o, n, full in zip(starts, sizes, buffer.shape, strict=True)):
        raise machine().fail(Verdict.OUTSIDE, f"slice at {starts} of {sizes} from {buffer.name} of {buffer.shape}")
    return buffer.view(buffer.data[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))])


def subslice(local_allocated_buffer: Buffer, offset: Any, size: Any) -> Buffer:
    """Take columns of a tensor-memory tile."""
    if local_allocated_buffer.storage != TMEM:
        raise machine().fail(Verdict.SHAPE, "subslice is for tensor memory; use local_slice")
    rows = local_allocated_buffer.shape[0]
    return local_slice(local_allocated_buffer, [0, offset], [rows, size])


def local_trans(input: Buffer, dims: Any = (1, 0)) -> Buffer:
    """View with swapped dimensions."""
    return input.view(np.transpose(input.data, _sizes(dims)))


def local_reshape(src: Buffer, shape: Any) -> Buffer:
    """View of another shape."""
    return _reshaped(src, src.data, _sizes(shape), src.dtype)


def local_reinterpret(src: Buffer, dtype: Any, shape: Any = None) -> Buffer:
    """View of the same bits with another element type, in shared memory also of another shape."""
    kind = unwrap(dtype)
    if src.view_data is None:
        return _reinterpreted_allocation(src, kind, shape)
    if shape is not None and src.storage != SMEM:
        raise machine().fail(Verdict.SHAPE, "only shared memory can be reinterpreted with another shape")
    data = src.data.view(np_dtype(kind))
    return _reshaped(src, data, _sizes(shape) if shape is not None else list(data.shape), kind)


def _reinterpreted_allocation(src: Buffer, kind: tl.dtype, shape: Any) -> Buffer:
    sizes = _sizes(shape) if shape is not None else list(src.tile_shape)
    new = Buffer(src.cta, src.storage, kind, sizes, src.name, num=src.num, unit=src.unit)
    new.offset, new.group, new.stride, new.alias = src.offset, src.group, src.stride, src.alias
    return new


def _reshaped(src: Buffer, data: np.ndarray, sizes: list[int], kind: tl.dtype) -> Buffer:
    new = data.reshape(sizes)
    if not np.shares_memory(new, src.data):
        raise machine().fail(Verdict.SHAPE, f"{src.name} of {src.shape} cannot be viewed as {sizes}")
    return src.view(new, kind)


class LoadedHandle(Handle):
    """What a task loaded from shared memory: a use in a loop that begins after the load reads the memory again.

    The compiler moves the load to such a use, past every barrier between (seen in fbtriton 3.7.4, where the use is the
    only one). What is computed from the value before the loop stays in registers.

    Args:
        data: The numbers.
        source: Where the running task has them from.
    """

    def __init__(self, data: np.ndarray, source: Buffer) -> None:
        self.loaded = data
        self.source = source
        self.dtype = source.dtype
        self.attr: dict[str, Any] = {}
        self.loops = machine().running.loops
        self.remark = f", loaded before the loop by {machine().here()}: the compiler may move that load here"

    @property
    def data(self) -> np.ndarray:
        """The numbers; in a later loop, those that the memory holds by then."""
        run, source = machine(), self.source
        if run.running.loops <= self.loops:
            return self.loaded
        run.access(source, write=False, remark=self.remark)
        if run.checks.races and source.data.tobytes() != self.loaded.tobytes():
            raise run.fail(Verdict.RACE, f"read of what has been overwritten ({source.name}{self.remark})")
        return source.data.copy()

    @data.setter
    def data(self, data: np.ndarray) -> None:
        # Triton's own builder looks at an operand of a shift as signed or unsigned so.
        self.loaded = data


def settled(value: Any) -> Any:
    """A value that a loop hands from trip to trip: its name stands for what is handed on, and no longer for a load."""
    if isinstance(value, tuple):
        return type(value)(*map(settled, value)) if hasattr(value, "_fields") else tuple(map(settled, value))
    if isinstance(value, tl.tensor) and isinstance(value.handle, LoadedHandle):
        return tensor(value.handle.loaded, value.handle.dtype)
    return value


def local_load(src: Buffer, token: Any = None, layout: Any = None, relaxed: bool = False) -> tl.tensor:
    """Load a tile into registers (from tensor memory with its wait)."""
    _refuse_halved(src)
    machine().access(src, write=False)
    value = tensor(src.data.copy(), src.dtype)
    if src.storage == SMEM:
        value.handle = LoadedHandle(value.handle.data, src)
    return value


def local_store(dst: Buffer, src: tl.tensor) -> None:
    """Store registers into a tile, through the generic proxy."""
    _refuse_halved(dst)
    data = src.handle.data
    if data.size > 1 and list(data.shape) != dst.shape:
        raise machine().fail(Verdict.SHAPE, f"a value of {list(data.shape)} is stored into {dst.name} of {dst.shape}")
    if src.dtype.primitive_bitwidth != dst.dtype.primitive_bitwidth:
        raise machine().fail(Verdict.SHAPE, f"a value of {src.dtype} is stored into {dst.name} of {dst.dtype}")
    machine().access(dst, write=True)
    dst.data[...] = data
    if data.dtype == np.float32 and (data.view(np.uint32) == _POISON).all():
        dst.arena.history.forget(dst.arena.cells(dst.data))
    machine().pause()


def local_gather(src: Buffer, indices: Any, axis: Any, token: Any = None) -> tl.tensor:
    """Load elements picked along an axis."""
    machine().access(src, write=False)
    picked = indices.data if isinstance(indices, Buffer) else indices.handle.data
    return tensor(np.take_along_axis(src.data, picked, int(unwrap(axis))), src.dtype)


def fence(scope: Any) -> None:
    """Order generic writes before async-proxy accesses, or memory accesses before later ones."""
    kind, task = unwrap(scope), machine().running
    if kind == "async_shared":
        task.clock.fence()
        task.clock.tasks[task.number] += 1
    elif kind in ("gpu", "sys"):
        machine().memory.fence()
    else:
        raise machine().fail(Verdict.SHAPE, f"fence scope must be 'gpu', 'sys' or 'async_shared', got {kind!r}")


def fence_async_shared() -> None:
    """Order generic writes before async-proxy accesses."""
    fence("async_shared")


def tmem_copy(src: Buffer, dst: Buffer) -> None:
    """Refuse: block-scaled products are not emulated, and this feeds them."""
    raise EmulatorError(Verdict.UNSUPPORTED, "tlx.tmem_copy is not emulated")


def dtype_of(v: Any) -> tl.dtype:
    """Element type of a tensor, pointer or descriptor."""
    kind = v.dtype
    return kind.element_ty if isinstance(kind, tl.pointer_type) else kind


def size_of(dtype: Any) -> int:
    """Bytes of an element type."""
    return int(unwrap(dtype).primitive_bitwidth) // 8
