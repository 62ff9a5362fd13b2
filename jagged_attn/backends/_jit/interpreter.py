"""A repair of Triton's interpreter, for the tests that run kernels on a CPU."""

import inspect
from typing import Any

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
