"""A kernel with its constants, launched at little cost once it is compiled."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from .launchers import launcher_of

_ALIGNMENT = 16
_NARROW = 2**31

if knobs.runtime.interpret:
    # Every kernel of ours is launched from here.
    from . import interpreter

    interpreter.repair()


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
        self._tail = tuple([self.constants[name] for name in kernel.arg_names if name in self.constants])
        self._compiled: dict[Hashable, _Compiled] = {}

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
            tensors: the pointers, first in the kernel's signature but for the maps; all on one device.
            sizes: counts of rows, sequences and the like, which change from call to call; second.
            others: strides and factors, few combinations in a model; third.
            maps: TMA descriptors, before all of these; their dtypes and blocks are the same in every launch.
        """
        index = tensors[0].device.index
        if tensors[0].is_cuda and index != torch._C._cuda_getDevice():
            # Triton launches on the current device.
            with torch.cuda.device(index):
                return self.launch(programs, tensors, sizes, others, maps)
        # Triton compiles for pointers' alignment and dtype, and for sizes that need 64 bits.
        key = (others, index, *[x.dtype for x in tensors])
        pointers = [x.data_ptr() for x in tensors]
        is_plain = max(sizes) < _NARROW and reduce(or_, pointers) % _ALIGNMENT == 0
        compiled = self._compiled.get(key) if is_plain else None
        if compiled is not None:
            compiled.launch(programs, index, maps, tensors, pointers, (*sizes, *others, *self._tail))
            return None
        with _quiet(tensors[0]):
            compiled = self._kernel[(programs,)](*maps, *tensors, *sizes, *others, **self.constants, **self._options)
        if is_plain and hasattr(compiled, "function"):
            self._compiled[key] = _Compiled(compiled)
        return None


class _Compiled:
    """A compiled kernel on the device that it was loaded to.

    ``compiled[grid](...)`` does the same as ``launch`` and takes a third longer: it makes a function each time, asks
    for the device, and reads switches from the environment.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._run = launcher_of(compiled)

    def launch(
        self,
        programs: int,
        index: int,
        maps: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        pointers: list[int],
        scalars: tuple[Any, ...],
    ) -> None:
        """Launch on the current stream of the current device, whose ``index`` it is."""
        compiled = self._compiled
        if _is_set(knobs.runtime.launch_enter_hook) or _is_set(knobs.runtime.launch_exit_hook):
            # A profiler is to be told of the launch, with its arguments as they are.
            compiled[(programs, 1, 1)](*maps, *tensors, *scalars)
            return
        stream = driver.active.get_current_stream(index)
        # Of a tensor, Triton would ask for the address once more, and of the driver whether it is one.
        arguments = (*maps, *pointers, *scalars)
        self._run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _is_set(hook: Any) -> bool:
    """Whether a hook would do something: a chain of none would not, which in Triton 3.6 is true all the same."""
    return bool(getattr(hook, "calls", hook))


def _quiet(x: Tensor) -> AbstractContextManager[Any]:
    """On a CPU, where Triton interprets the kernel, inf and NaN without a word."""
    if x.is_cuda:
        return nullcontext()
    from . import interpreter

    return interpreter.quiet_arithmetic()
