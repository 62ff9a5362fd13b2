"""Triton's interpreter made fit for the tests that run kernels on a CPU: a repair, and arithmetic as on a GPU."""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder


def repair_dot() -> None:
    """Let the interpreter's ``tl.dot`` take the arguments that the language passes to it.

    In fbtriton 3.7.4 the language hands ``create_dot`` one argument more (``two_ctas``, which means nothing on a CPU)
    than the interpreter's builder accepts. Does nothing where both agree.
    """
    create_dot = InterpreterBuilder.create_dot
    if len(inspect.signature(create_dot).parameters) != 6:
        return

    def create_dot_ignoring(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any, *_: Any) -> Any:
        return create_dot(self, a, b, d, precision, imprecise)

    InterpreterBuilder.create_dot = create_dot_ignoring


def quiet_arithmetic() -> AbstractContextManager[Any]:
    """Inf and NaN without a word, as on a GPU: tiles have rows that no sequence owns, whose numbers nobody stores."""
    return np.errstate(all="ignore")
