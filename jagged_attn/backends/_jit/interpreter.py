"""Triton's interpreter made fit for the tests that run kernels on a CPU: a repair, and arithmetic as on a GPU."""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@cache
def repair() -> None:
    """Make products and casts in the interpreter right for bfloat16, in Triton 3.6 and in fbtriton 3.7.4, once.

    Three faults are mended. The interpreter holds bfloat16 as the integers of its bits, and ``tl.dot`` multiplies
    those; a cast to bfloat16 cuts bits off where a GPU rounds to nearest even. And in fbtriton 3.7.4 the language
    hands ``create_dot`` one argument more (``two_ctas``, which means nothing on a CPU) than it accepts.
    """
    cast = InterpreterBuilder.cast_impl

    def cast_rounding(builder: Any, x: Any, to: Any) -> Any:
        if (x.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bfloat16_bits(x.data), tl.bfloat16)
        return cast(builder, x, to)

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return TensorHandle(np.matmul(_as_numbers(a), _as_numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.cast_impl = cast_rounding
    InterpreterBuilder.create_dot = create_dot


def _as_numbers(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16_bits(x: Any) -> Any:
    """The bits of fp32 numbers as bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).reshape(x.shape)


def quiet_arithmetic() -> AbstractContextManager[Any]:
    """Inf and NaN without a word, as on a GPU: tiles have rows that no sequence owns, whose numbers nobody stores."""
    return np.errstate(all="ignore")
