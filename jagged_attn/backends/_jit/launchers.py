"""Triton's launcher of a compiled kernel, with TMA maps encoded once."""

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from triton.runtime import driver

# Enough for the tensors of a model's layers, whose addresses an allocator hands out again at each step.
_MOST_MAPS = 256


def launcher_of(compiled: Any) -> Callable[..., None]:
    """What launches a compiled kernel: ``compiled.run``, or for a kernel with TMA maps a copy that remembers them.

    Triton encodes every map at every launch, which takes as long as all else that it does. The copy does so once for
    maps of ``descriptors``, which are the kernel's first arguments. Where Triton's launcher is not made as that of 3.7
    it is returned as it is.
    """
    launcher = compiled.run
    metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    if not metadata or None in metadata:
        return launcher
    try:
        from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
    except ImportError:
        return launcher
    if type(launcher) is not CudaLauncher or not hasattr(driver.active.utils, "launch"):
        return launcher
    remembering = copy.copy(launcher)
    remembering.launch = remember_maps(driver.active.utils.launch, make_tensordesc_arg, metadata)
    return remembering


def remember_maps(
    launch: Callable[..., None], encode: Callable[[Any, Any, Any], list[Any]], metadata: Sequence[Any]
) -> Callable[..., None]:
    """``launch``, with what a kernel takes in place of each map put there: the encoded map, its shape, its strides.

    An encoded map is 128 bytes that depend on nothing but the map's numbers, among them an address, and what the kernel
    was compiled for; whose memory it is does not matter to it.

    Args:
        launch: takes the kernel's arguments as the last of its own.
        encode: of a descriptor, its metadata and the other arguments of ``launch``: that list.
        metadata: of the maps, which come first: what the kernel was compiled for.
    """
    encoded_maps: list[dict[Hashable, list[Any]]] = [{} for _ in metadata]
    count = len(encoded_maps)

    def launch_remembering(*arguments: Any) -> None:
        *others, kernel_arguments = arguments
        expanded: list[Any] = []
        for descriptor, encoded, of_kernel in zip(kernel_arguments, encoded_maps, metadata, strict=False):
            key = descriptor.key
            known = encoded.get(key)
            if known is None:
                if len(encoded) >= _MOST_MAPS:
                    encoded.clear()
                known = encoded[key] = encode(descriptor, of_kernel, others)
            expanded += known
        launch(*others, (*expanded, *kernel_arguments[count:]))

    return launch_remembering
