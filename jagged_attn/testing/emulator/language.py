"""The two languages a kernel is written in, as the emulator runs them: ``tlx`` and ``tl``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from . import barrier_ops, buffer_ops, copies, launch_control, matrix, task_ops
from .errors import EmulatorError, Verdict
from .machine import machine
from .memory import CLUSTER, SMEM, TMEM, ReuseGroup
from .numerics import decode, encode, np_dtype, tensor, unwrap
from .parameters import THREADS_PER_WARP
from .scalars import integer


class _Storage:
    smem, tmem, smemCluster = SMEM, TMEM, CLUSTER


class _GroupType:
    shared, distinct = "shared", "distinct"


def thread_id(axis: Any) -> tl.tensor:
    """Refuse: a task is emulated as one actor, not as threads."""
    raise EmulatorError(Verdict.UNSUPPORTED, "tlx.thread_id is not emulated: tasks have no threads here")


def clock64() -> tl.tensor:
    """A count of scheduler steps."""
    return tensor(np.array(machine().steps, np.int64), tl.int64)


def vote_ballot_sync(mask: Any, pred: tl.tensor) -> tl.tensor:
    """For each warp of 32 rows, the bits of its lanes' predicates."""
    flags = np.asarray(pred.handle.data, bool)
    rows = flags.reshape(-1, THREADS_PER_WARP) if flags.size % THREADS_PER_WARP == 0 else flags.reshape(1, -1)
    bits = (rows.astype(np.int64) << np.arange(rows.shape[1])).sum(1) & int(unwrap(mask))
    words = np.repeat(bits, rows.shape[1]).astype(np.uint32).view(np.int32)
    return tensor(words.reshape(flags.shape), tl.int32)


_MODULES = (buffer_ops, barrier_ops, copies, matrix, launch_control)
_NOT_TLX = {
    "values",
    "indices",
    "by_rank",
    "in_cta",
    "meet_cluster",
    "unwrap",
    "tensor",
    "raw_data",
    "is_true",
    "decode",
    "np_dtype",
}


def _operations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in _MODULES:
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "") == module.__name__
            if callable(value) and own and name[0] != "_" and name not in _NOT_TLX and name.islower():
                found[name] = value
    found |= {f.__name__: f for f in (thread_id, clock64, vote_ballot_sync, task_ops.async_task_replica_id)}
    found |= {"storage_kind": _Storage, "reuse_group_type": _GroupType, "reuse_group": ReuseGroup}
    return found


class Tlx:
    """The ``tlx`` of an emulated kernel. A name that it lacks raises at once."""

    def __init__(self) -> None:
        self.__dict__.update(_operations())

    def __getattr__(self, name: str) -> Any:
        raise EmulatorError(Verdict.UNSUPPORTED, f"tlx.{name} is not emulated")


TLX = Tlx()


# Inline PTX, by what it computes.


def _wide(x: Any) -> Any:
    return np.asarray(x.handle.data, np.float64) if isinstance(x, tl.tensor) else np.float64(unwrap(x))


def _f32(x: np.ndarray) -> tl.tensor:
    return tensor(np.asarray(x, np.float32), tl.float32)


PTX_HELPERS: dict[str, Callable[..., Any]] = {
    "_mul_f32x2": lambda a, b: _f32(_wide(a) * _wide(b)),
    "_sub_f32x2": lambda a, b: _f32(_wide(a) - _wide(b)),
    "_fma_f32x2": lambda a, b, c: _f32(_wide(a) * _wide(b) + _wide(c)),
    "_reduce_fadd2": lambda a, b, c, d: (_f32(_wide(a) + _wide(c)), _f32(_wide(b) + _wide(d))),
    "tanh_approx_fp32": lambda x: _f32(np.tanh(_wide(x))),
}

# Functions of libdevice.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    "fast_dividef": lambda a, b: _f32(_wide(a) / _wide(b)),
    "fast_expf": lambda a: _f32(np.exp(_wide(a))),
    "tanh": lambda a: _f32(np.tanh(_wide(a))),
    "rsqrt": lambda a: _f32(1 / np.sqrt(_wide(a))),
}

_PTX_MNEMONICS: list[tuple[str, Callable[..., np.ndarray]]] = [
    (r"fma\.rn(\.ftz)?\.f32x2", lambda a, b, c: a * b + c),
    (r"mul(\.rn)?(\.ftz)?\.f32x2", lambda a, b: a * b),
    (r"add(\.rn)?(\.ftz)?\.f32x2", lambda a, b: a + b),
    (r"sub(\.rn)?(\.ftz)?\.f32x2", lambda a, b: a - b),
    (r"ex2\.approx(\.ftz)?\.f32", lambda a: np.exp2(a)),
    (r"lg2\.approx(\.ftz)?\.f32", lambda a: np.log2(a)),
    (r"rcp\.approx(\.ftz)?\.f32", lambda a: 1 / a),
    (r"tanh\.approx\.f32", lambda a: np.tanh(a)),
]
_PTX_NOISE = re.compile(r"^\s*([{}]|\.reg|mov\.)")
# What changes nothing here: a task is one actor, so its threads need not meet; global memory knows no proxies.
_PTX_IDLE = re.compile(r"bar\.warp\.sync 0xffffffff|fence\.proxy\.async\.global")


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any = True, pack: Any = 1
) -> tl.tensor:
    """Inline PTX of one known instruction; a timer gives the step count; anything else is refused by name."""
    text = str(unwrap(asm))
    if "globaltimer" in text or "clock" in text:
        return clock64()
    lines = [line.strip() for line in re.split(r"[;\n]", text)]
    real = [line for line in lines if line.strip("{} \t") and not _PTX_NOISE.match(line)]
    if len(real) == 1 and (store_wait := re.fullmatch(r"cp\.async\.bulk\.wait_group (\d+)", real[0])):
        copies.bulk_wait_group(int(store_wait[1]))
    if len(real) == 1 and (store_wait or _PTX_IDLE.fullmatch(real[0])):
        return tensor(np.zeros((), np_dtype(unwrap(dtype))), unwrap(dtype))
    for pattern, function in _PTX_MNEMONICS:
        if len(real) == 1 and re.match(pattern, real[0].lstrip("{ ")):
            return tensor(encode(function(*(_wide(a) for a in args)), unwrap(dtype)), unwrap(dtype))
    raise EmulatorError(Verdict.UNSUPPORTED, f"inline PTX is not emulated: {'; '.join(real)}")


# The parts of `tl` that Triton's interpreter does slowly or not at all.


def _reduce(function: Any, x: tl.tensor, axis: Any, keep_dims: Any) -> tl.tensor:
    where = unwrap(axis)
    data = decode(x.handle.data, x.dtype) if x.dtype.is_floating() else x.handle.data
    out = function(data, axis=where, keepdims=bool(unwrap(keep_dims)))
    return tensor(encode(out, x.dtype) if x.dtype.is_floating() else np.asarray(out, np_dtype(x.dtype)), x.dtype)


def tl_max(x: tl.tensor, axis: Any = None, return_indices: Any = False, keep_dims: Any = False, **rest: Any) -> Any:
    """``tl.max``."""
    if unwrap(return_indices):
        raise EmulatorError(Verdict.UNSUPPORTED, "tl.max(return_indices=True) is not emulated")
    return _reduce(np.max, x, axis, keep_dims)


def tl_min(x: tl.tensor, axis: Any = None, return_indices: Any = False, keep_dims: Any = False, **rest: Any) -> Any:
    """``tl.min``."""
    if unwrap(return_indices):
        raise EmulatorError(Verdict.UNSUPPORTED, "tl.min(return_indices=True) is not emulated")
    return _reduce(np.min, x, axis, keep_dims)


def tl_sum(x: tl.tensor, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> tl.tensor:
    """``tl.sum``: bf16 adds in fp32, narrow integers in 32 bits."""
    kind = unwrap(dtype)
    if kind is None and x.dtype.is_int() and x.dtype.primitive_bitwidth < 32:
        kind = tl.int32 if x.dtype.is_int_signed() or x.dtype.is_bool() else tl.uint32
    return _reduce(np.sum, x.to(kind) if kind is not None else x, axis, keep_dims)


def tl_zeros(shape: Any, dtype: Any) -> tl.tensor:
    """``tl.zeros``."""
    return tensor(np.zeros([int(unwrap(n)) for n in shape], np_dtype(unwrap(dtype))), unwrap(dtype))


def tl_reduce(x: tl.tensor, axis: Any, combine_fn: Any, keep_dims: Any = False) -> tl.tensor:
    """``tl.reduce`` with any combine function, one slice after another."""
    where = unwrap(axis)
    data = x.handle.data.reshape(-1) if where is None else x.handle.data
    along = 0 if where is None else where
    total = tensor(np.take(data, 0, along), x.dtype)
    for i in range(1, data.shape[along]):
        total = combine_fn(total, tensor(np.take(data, i, along), x.dtype))
    if unwrap(keep_dims):
        return tensor(np.expand_dims(total.handle.data, along), total.dtype)
    return total


def tl_map_elementwise(scalar_fn: Any, *args: Any, pack: Any = 1) -> Any:
    """``tl.map_elementwise`` for functions without data-dependent branches: applied to whole arrays."""
    arrays = np.broadcast_arrays(*(a.handle.data for a in args))
    return scalar_fn(*(tensor(np.array(a), t.dtype) for a, t in zip(arrays, args, strict=True)))


def static_assert(cond: Any, msg: Any = "") -> None:
    """``tl.static_assert``."""
    if not bool(unwrap(cond)):
        raise AssertionError(f"static_assert at {machine().here()}: {unwrap(msg)}")


def static_range(*bounds: Any, **options: Any) -> range:
    """``tl.static_range``: Python integers."""
    return range(*(int(unwrap(b)) for b in bounds), *(int(unwrap(v)) for k, v in options.items() if k == "step"))


def tl_range(*bounds: Any, **options: Any) -> range:
    """``tl.range``; hints to the compiler are dropped."""
    return static_range(*bounds, **options)


def loop(values: Any) -> Iterator[Any]:
    """Loop values of a dynamic loop: int32 scalars, with Triton's arithmetic rather than Python's."""
    task = machine().running
    task.loops += 1
    try:
        for value in values:
            yield integer(value) if type(value) is int else value
    finally:
        task.loops -= 1


_OVERRIDES: dict[str, Any] = {
    "max": tl_max,
    "min": tl_min,
    "sum": tl_sum,
    "zeros": tl_zeros,
    "reduce": tl_reduce,
    "map_elementwise": tl_map_elementwise,
    "static_assert": static_assert,
    "static_range": static_range,
    "range": tl_range,
    "inline_asm_elementwise": inline_asm_elementwise,
}


class ModuleProxy:
    """A Triton module whose jit functions are rewritten for the emulator when they are used.

    Args:
        module: The module.
        rewrite: Turns a jit function into a callable.
        overrides: Names done otherwise.
    """

    def __init__(self, module: ModuleType, rewrite: Callable[[Any], Any], overrides: dict[str, Any]) -> None:
        self._module = module
        self._rewrite = rewrite
        self._overrides = overrides

    def __getattr__(self, name: str) -> Any:
        if name in self._overrides:
            return self._overrides[name]
        value = getattr(self._module, name)
        if isinstance(value, JITFunction | InterpretedFunction):
            value = self._rewrite(value)
        elif isinstance(value, ModuleType):
            return ModuleProxy(value, self._rewrite, {})
        return value


def triton_language(rewrite: Callable[[Any], Any]) -> ModuleProxy:
    """The ``tl`` of an emulated kernel."""
    return ModuleProxy(tl, rewrite, _OVERRIDES)


def _extreme(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    """Python's ``max`` or ``min`` in a kernel, which mean ``tl.maximum`` and ``tl.minimum`` there."""

    def extreme(*args: Any) -> Any:
        if any(isinstance(a, tl.tensor) for a in args):
            result = args[0]
            for other in args[1:]:
                result = getattr(tl, name)(result, other)
            return result
        return python(*(unwrap(a) for a in args))

    return extreme


BUILTINS: dict[str, Any] = {"max": _extreme("maximum", max), "min": _extreme("minimum", min)}
