"""What a schedule needs to know of a device, by its compute capability."""

from functools import cache

import torch

_KIB = 1024
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory a block may opt in to.
_SHARED_BYTES = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
}
# The least of the devices above: right, if slow, on one that is not listed.
_LEAST_SHARED_BYTES = 99 * _KIB
_HIP_SHARED_BYTES = 64 * _KIB


def shared_bytes_per_program(capability: tuple[int, int] | None, is_hip: bool) -> int:
    """Shared memory that one program may use."""
    if is_hip:
        return _HIP_SHARED_BYTES
    return _SHARED_BYTES.get(capability or (0, 0), _LEAST_SHARED_BYTES)


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device, asked for once; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
