"""Short cuts for int32 scalars, which is most of what a kernel's control flow computes, and for fp32.

Triton's interpreter takes some 50 microseconds for ``i + 1``: type rules, splats, numpy. Here two int32 scalars, or
one and a Python integer, go through Python's arithmetic with C's division and 32-bit wrap-around, and fp32 values go
through numpy directly; everything else takes the long way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from .numerics import fast_tensor

_LOW, _HIGH, _SPAN = -(1 << 31), (1 << 31) - 1, 1 << 32


def _divide(a: int, b: int) -> int:
    """Quotient rounded toward zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(a: int, b: int) -> int:
    """Remainder with the sign of the dividend."""
    return a - _divide(a, b) * b


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": _divide,
    "mod": _remainder,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


_FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def integer(value: int) -> tl.tensor:
    """An int32 scalar."""
    return fast_tensor(np.array([value], np.int32), tl.int32, ())


def _operand(x: Any) -> int | None:
    """The number of an int32 scalar or a small Python integer."""
    if type(x) is int:
        return x if _LOW <= x <= _HIGH else None
    if isinstance(x, tl.tensor) and x.type is tl.int32:
        return int(x.handle.data.reshape(-1)[0])
    return None


def _float_operand(x: Any) -> tuple[Any, tuple[int, ...]] | None:
    """The numbers and block shape of an fp32 value or a Python number."""
    if type(x) is float or type(x) is int:
        return np.float32(x), ()
    if isinstance(x, tl.tensor) and x.dtype is tl.float32:
        data = x.handle.data
        return (data, data.shape) if x.type.is_block() else (data[0], ())
    return None


def _float_result(function: Callable[[Any, Any], Any], left: Any, right: Any) -> tl.tensor | None:
    a, b = _float_operand(left), _float_operand(right)
    if a is None or b is None:
        return None
    result = np.asarray(function(a[0], b[0]))
    dtype = tl.int1 if result.dtype == bool else tl.float32
    data = result if result.ndim else result.reshape(1)
    return fast_tensor(data, dtype, result.shape)


def _method(function: Any, floats: Any, slow: Any, compares: bool, swapped: bool) -> Any:
    def method(self: tl.tensor, other: Any) -> Any:
        if floats is not None and self.dtype is tl.float32:
            made = _float_result(floats, other, self) if swapped else _float_result(floats, self, other)
            if made is not None:
                return made
        if function is not None and self.type is tl.int32:
            b = _operand(other)
            if b is not None:
                a = int(self.handle.data.reshape(-1)[0])
                result = function(b, a) if swapped else function(a, b)
                if compares:
                    return fast_tensor(np.array([result]), tl.int1, ())
                if not _LOW <= result <= _HIGH:
                    result = (result - _LOW) % _SPAN + _LOW
                return integer(result)
        return slow(self, other)

    return method


def install(scope: Any) -> None:
    """Patch the operators of ``tl.tensor`` for the duration of ``scope``."""
    for name in {**_ARITHMETIC, **_COMPARISONS, **_FLOATS}:
        compares = name in _COMPARISONS
        function = _COMPARISONS.get(name) or _ARITHMETIC.get(name)
        for prefix in ("",) if compares else ("", "r"):
            attribute = f"__{prefix}{name}__"
            slow = getattr(tl.tensor, attribute, None)
            if slow is not None:
                new = _method(function, _FLOATS.get(name), slow, compares, prefix == "r")
                scope.set_attr(tl.tensor, attribute, new)
