"""Hardware limits that the emulator enforces, and the switches of its checks."""

from __future__ import annotations

from dataclasses import dataclass

# Shared memory of one CTA on sm_90 and sm_100, mbarriers included.
SHARED_BYTES = 232_448
TENSOR_LANES = 128
TENSOR_COLUMNS = 512
# One 32-bit word per lane and column.
TENSOR_ROW_BYTES = 4 * TENSOR_COLUMNS
# A tcgen05 allocation is a power of two of at least this many columns.
TENSOR_MIN_COLUMNS = 32
THREADS_PER_WARP = 32
MAX_WARPS = 32
REGISTER_FILE = 65_536
# Bounds of `setmaxnreg`.
MIN_REGISTERS = 24
MAX_REGISTERS = 256
# Smallest piece of shared memory whose history is kept apart: TMA and swizzles move nothing smaller.
SHARED_CELL = 16
# Histories of tensor memory are kept per warp's quarter of the lanes and column.
TENSOR_CELL_LANES = 32
NAMED_BARRIERS = 16


@dataclass(frozen=True)
class Checks:
    """Which checks run. On by default are those that no correct kernel in use trips over.

    Args:
        races: Happens-before for shared, tensor and global memory.
        fences: Proxy fences between generic writes and async-proxy reads of shared memory.
        compiler_fences: Count the fence that fbtriton puts before every TMA store and every product whose shared memory
            is written generically (seen in its PTX, 3.7.4). Off, the source has to have its own: this library's rule.
        unwritten: Reads of memory that nothing wrote.
        laps: A barrier that ran ahead of a waiter.
        exits: Work in flight and barriers half full when a CTA ends.
        budgets: Shared memory, tensor memory, warps, registers.
        equal_aliases: A ``reuse=`` in tensor memory is as large as what it lies over; fbtriton takes smaller ones.
        cluster_end: Count the cluster barrier that fbtriton puts at the end of a specialised kernel (seen in its PTX,
            3.7.4): no CTA leaves while another may still arrive at its barriers.
        strict_mma: Take the PTX text at its word: products are ordered only with products into the same accumulator
            of the same shape. Off by default: kernels in use rely on the queue being in order.
        overflow: Raise when 32-bit integer arithmetic in a kernel overflows (slower).
    """

    races: bool = True
    fences: bool = True
    compiler_fences: bool = True
    unwritten: bool = True
    laps: bool = True
    exits: bool = True
    budgets: bool = True
    equal_aliases: bool = False
    cluster_end: bool = False
    strict_mma: bool = False
    overflow: bool = False


# What kernels of this library are held to.
HOUSE_RULES = Checks(compiler_fences=False, equal_aliases=True)
NO_CHECKS = Checks(races=False, fences=False, unwritten=False, laps=False, exits=False, budgets=False)
