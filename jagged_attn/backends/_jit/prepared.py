"""A kernel with its constants, launched at little cost once it is compiled."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
_NARROW = 2**31


class PreparedKernel:
    """One Triton kernel and the constants of one kind of call.

    Triton looks at every argument of every launch to find the kernel that it compiled for such arguments: about 22 µs
    for the forward's. What it looks at is remembered here in a smaller key, so that later launches go straight to the
    compiled kernel. Where the key does not say enough, or in the interpreter, Triton's own way is taken.

    Args:
        kernel: a function under ``triton.jit``.
        constants: its ``tl.constexpr`` arguments, by name.
        options: Triton's own (``num_warps``, ``num_stages``).
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        self._kernel = kernel
        self._options = options
        # Constants come last in every kernel's signature, and a compiled kernel takes them by position.
        self._tail = [self.constants[name] for name in kernel.arg_names if name in self.constants]
        self._compiled: dict[Hashable, Any] = {}

    def launch(
        self,
        programs: int,
        tensors: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        others: tuple[Any, ...],
        maps: tuple[Any, ...] = (),
    ) -> None:
        """Launch on the device of the tensors, on its current stream.

        Args:
            programs: size of the grid.
            tensors: the pointers, first in the kernel's signature but for the maps.
            sizes: counts of rows, sequences and the like, which change from call to call; second.
            others: strides and factors, few combinations in a model; third.
            maps: TMA descriptors, before all of these; their dtypes and blocks are the same in every launch.
        """
        index = tensors[0].device.index
        if tensors[0].is_cuda and index != torch.cuda.current_device():
            # Triton launches on the current device.
            with torch.cuda.device(index):
                return self.launch(programs, tensors, sizes, others, maps)
        # Triton compiles for pointers' alignment and dtype, and for sizes that need 64 bits.
        key = (others, index, tuple([x.dtype for x in tensors]))
        addresses = 0
        for x in tensors:
            addresses |= x.data_ptr()
        plain = addresses % _ALIGNMENT == 0 and max(sizes) < _NARROW
        compiled = self._compiled.get(key) if plain else None
        if compiled is not None:
            compiled[(programs, 1, 1)](*maps, *tensors, *sizes, *others, *self._tail)
            return None
        with _quiet(tensors[0]):
            compiled = self._kernel[(programs,)](*maps, *tensors, *sizes, *others, **self.constants, **self._options)
        if plain and hasattr(compiled, "function"):
            self._compiled[key] = compiled
        return None


def _quiet(x: Tensor) -> AbstractContextManager[Any]:
    """On a CPU, where Triton interprets the kernel, inf and NaN without a word."""
    if x.is_cuda:
        return nullcontext()
    from . import interpreter

    return interpreter.quiet_arithmetic()
