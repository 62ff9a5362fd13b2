"""All that a kernel is compiled for, in one argument."""

from typing import Any

import triton
from triton.language import constexpr


class Constants:
    """Named constants of a kernel: an argument ``C: tl.constexpr`` has each as ``C.name``, a constexpr again.

    Functions of the kernel pass it on whole, instead of a dozen arguments each.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = values
        self.__dict__["_key"] = tuple(sorted(values.items()))

    def __getattr__(self, name: str) -> Any:
        try:
            value = self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None
        return value if triton.knobs.runtime.interpret else constexpr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._key)
