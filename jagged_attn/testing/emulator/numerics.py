"""Numbers: bf16 with correct rounding, and the builder that Triton's own interpreter computes with.

Triton's interpreter keeps bf16 as ``uint16``, computes on those bits as if they were integers, and truncates when it
converts. Here every bf16 operation goes through fp32 and rounds to nearest even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle as Handle

from .errors import EmulatorError, Verdict

if TYPE_CHECKING:
    from .global_memory import GlobalMemory
    from .machine import Machine


_NUMPY: dict[str, np.dtype] = {}


def np_dtype(dtype: Any) -> np.dtype:
    """How numpy stores a Triton element type."""
    name = str(dtype)
    if name not in _NUMPY:
        _NUMPY[name] = interpreter._get_np_dtype(dtype)
    return _NUMPY[name]


def unwrap(value: Any) -> Any:
    """The Python value of a constexpr or of a scalar tensor; anything else unchanged."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tl.tensor) and value.handle.data.size == 1:
        return value.handle.data.reshape(-1)[0].item()
    return value


def is_true(value: Any) -> bool:
    """Truth of a scalar predicate; None counts as true."""
    return value is None or bool(unwrap(value))


def decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Stored numbers of a floating type as fp32 (fp64 stays)."""
    if dtype == tl.bfloat16:
        wide = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(data.shape)
    if dtype.is_fp8():
        half = interpreter._convert_float(np.ascontiguousarray(data), dtype, tl.float16, None).view(np.float16)
        return half.astype(np.float32).reshape(data.shape)
    return data if data.dtype == np.float64 else data.astype(np.float32, copy=False)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of fp32 numbers rounded to bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.reshape(np.shape(x)))


def encode(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Numbers as a type stores them, rounded to nearest even."""
    if dtype == tl.bfloat16:
        # fp64 to bf16 goes through fp32, as cvt does.
        return round_bf16(np.asarray(x, np.float32))
    if dtype.is_fp8():
        raise EmulatorError(Verdict.UNSUPPORTED, f"rounding to {dtype} is not emulated")
    return np.asarray(x).astype(np_dtype(dtype))


def tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """A register tensor (or scalar) of Triton's interpreter."""
    data = np.asarray(data)
    return fast_tensor(data if data.ndim else data.reshape(1), dtype, data.shape)


_TEMPLATES: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


def fast_tensor(data: np.ndarray, dtype: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    """A tensor over ``data``, without the type objects and checks that Triton makes anew each time."""
    key = (dtype.name, shape)
    if key not in _TEMPLATES:
        made = tl.tensor(None, tl.block_type(dtype, list(shape)) if shape else dtype)
        _TEMPLATES[key] = {k: v for k, v in vars(made).items() if k != "handle"}
    handle = object.__new__(Handle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    new = object.__new__(tl.tensor)
    new.__dict__.update(_TEMPLATES[key])
    new.handle = handle
    return new


class PendingHandle(Handle):
    """The result of a wgmma in flight: reading it before its own wait is an error, passing it on is not."""

    def __init__(self, data: np.ndarray, op: Any, where: str) -> None:
        self.raw = data
        self.op = op
        self.where = where
        self.dtype = tl.float32
        self.attr: dict[str, Any] = {}

    @property
    def data(self) -> np.ndarray:
        """Refuse: the compiler is free to move this use before the product has finished."""
        raise EmulatorError(Verdict.WGMMA, f"the result of {self.where} is used without an async_dot_wait of its own")


def raw_data(x: tl.tensor) -> np.ndarray:
    """The array under a register tensor, in flight or not."""
    handle = x.handle
    return handle.raw if isinstance(handle, PendingHandle) else handle.data


class Builder(interpreter.InterpreterBuilder):
    """Triton's numpy builder, with bf16 arithmetic, checked global memory, and program ids per task.

    Args:
        machine: The run.
        memory: Its global memory.
        grid: Grid dimensions.
    """

    def __init__(self, machine: Machine, memory: GlobalMemory, grid: tuple[int, int, int]) -> None:
        super().__init__()
        self.machine = machine
        self.memory = memory
        self.grid_dim = grid
        self.options = interpreter.InterpreterOptions(sanitize_overflow=machine.checks.overflow)

    def create_get_program_id(self, axis: int) -> Handle:
        """Index of the running task's CTA."""
        return Handle(np.array([self.machine.running.cta.position[axis]], np.int32), tl.int32)

    # Conversions.

    def get_bf16(self, value: float) -> Handle:
        """A number beside a bf16 tensor."""
        return Handle(encode(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        """Convert, rounding floats to nearest even; from wider types back, it is the same value, as compiled."""
        old, new = src.dtype.scalar, dst_type.scalar
        narrow: Handle | None = src.attr.get("widened")
        while narrow is not None:
            if narrow.dtype.scalar == new:
                return narrow
            narrow = narrow.attr.get("widened")
        if old.is_floating():
            data = decode(src.data, old)
        else:
            data = src.data.astype(np.float32) if new == tl.bfloat16 else src.data
        made = Handle(encode(data, new) if new.is_floating() else data.astype(np_dtype(new)), new)
        if new.is_floating() == old.is_floating() and new.primitive_bitwidth > old.primitive_bitwidth:
            made.attr["widened"] = src
        return made

    # Arithmetic.

    def binary_op(self, lhs: Handle, rhs: Handle, op: Any) -> Handle:
        """Apply ``op``; bf16 operands go through fp32."""
        if lhs.dtype.scalar != tl.bfloat16:
            return super().binary_op(lhs, rhs, op)
        result = op(decode(lhs.data, tl.bfloat16), decode(rhs.data, tl.bfloat16))
        return Handle(result if result.dtype == bool else round_bf16(result), tl.bfloat16)

    def unary_op(self, arg: Handle, op: Any) -> Handle:
        """Apply ``op``; a bf16 operand goes through fp32."""
        if arg.dtype.scalar != tl.bfloat16:
            return super().unary_op(arg, op)
        return Handle(round_bf16(op(decode(arg.data, tl.bfloat16))), tl.bfloat16)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        """Multiply and add with one rounding."""
        kind = z.dtype.scalar
        if not kind.is_floating():
            return super().create_fma(x, y, z)
        a, b, c = (decode(v.data, kind).astype(np.float64) for v in (x, y, z))
        return Handle(encode(a * b + c, kind), kind)

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        """Multiply matrices in fp32."""
        return Handle(decode(a.data, a.dtype.scalar) @ decode(b.data, b.dtype.scalar) + d.data, d.dtype.scalar)

    # Global memory.

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle | None, cache: Any, eviction: Any, is_volatile: bool
    ) -> Handle:
        """Load through checked pointers."""
        kind = ptrs.get_element_ty()
        fill = other.data if other is not None else None
        return Handle(self.memory.load(ptrs.data, mask.data, fill, kind, bool(is_volatile)), kind)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, cache: Any, eviction: Any) -> None:
        """Store through checked pointers."""
        self.memory.store(ptrs.data, value.data, mask.data, ptrs.get_element_ty())

    def create_atomic_rmw(self, op: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        """Read, modify and write."""
        kind = val.dtype.scalar
        return Handle(self.memory.atomic(op.name.lower(), ptr.data, val.data, mask.data, kind, sem.name), kind)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Handle:
        """Compare and swap."""
        kind = cmp.dtype.scalar
        mask = np.ones(ptr.data.shape, bool)
        return Handle(self.memory.atomic("cas", ptr.data, val.data, mask, kind, sem.name, cmp.data), kind)

    def create_make_tensor_descriptor(
        self, base: Handle, shape: Any, strides: Any, block: Any, is_signed: bool, padding: Any = "zero"
    ) -> Any:
        """Build a descriptor on the device."""
        sizes, steps = ([int(v.data.reshape(-1)[0]) for v in values] for values in (shape, strides))
        kind = base.dtype.element_ty
        return self.memory.descriptor(int(base.data.reshape(-1)[0]), sizes, steps, [int(b) for b in block], kind)

    def create_descriptor_load(self, desc: Any, indices: Any, cache: Any, eviction: Any) -> Handle:
        """Load a block through a descriptor made on the device."""
        loaded: Handle = desc.load([i.data.reshape(-1)[0] for i in indices]).handle
        return loaded

    def create_descriptor_store(self, desc: Any, value: Handle, indices: Any, *reduce: Any) -> None:
        """Store a block through a descriptor made on the device."""
        desc.store([i.data.reshape(-1)[0] for i in indices], tensor(value.data, value.dtype.scalar))

    def create_inline_asm(self, asm: str, *rest: Any) -> Any:
        """Refuse: inline PTX is emulated by name or by mnemonic, elsewhere."""
        raise EmulatorError(Verdict.UNSUPPORTED, f"inline PTX is not emulated: {' '.join(asm.split())}")


def semantic(builder: Builder) -> TritonSemantic:
    """Triton's type rules over ``builder``."""
    return TritonSemantic(builder)
