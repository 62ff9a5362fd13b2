"""The microbenchmarks of the performance model compile for sm_90a, and contain what they claim to time."""

import re

import pytest

from jagged_attn.perfmodel import microbench as kernels
from jagged_attn.testing.aot import Compilation, compile_kernel

_OUT = {"out": "*i64", "repeats": "i32"}
_TILE = {"desc": "tensordesc<bf16[64, 128]>", **_OUT, "rows": "i32"}
_LIMIT = {"maxnreg": 128}
# Kernel, its arguments, constants, options, and text that must be in the PTX.
CASES = [
    (kernels.round_trip, _OUT, {}, _LIMIT, "mbarrier.try_wait"),
    (kernels.named_barrier, _OUT, {}, _LIMIT, "barrier.sync"),
    (
        kernels.tma_load, {"desc": "tensordesc<bf16[8, 128]>", **_OUT, "rows": "i32", "apart": "i32"}, {"BOX": 8},
        _LIMIT, "cp.async.bulk.tensor",
    ),
    (kernels.chase, {"links": "*i32", **_OUT}, {}, {}, "ld.volatile.global"),
    (kernels.products, {"values": "*bf16", "sums": "*fp32", **_OUT}, {"GROUPS": 1}, _LIMIT, "wgmma.mma_async"),
    (kernels.products, {"values": "*bf16", "sums": "*fp32", **_OUT}, {"GROUPS": 2}, {}, "wgmma.mma_async"),
    (kernels.exponentials, {"sums": "*fp32", **_OUT}, {}, {"num_warps": 8}, "ex2.approx"),
    (kernels.shared_reads, {"sums": "*fp32", **_OUT}, {"TILES": 8}, {"num_warps": 8}, "ld.shared"),
    (kernels.cached_tiles, _TILE, {"STAGES": 8}, _LIMIT, "cp.async.bulk.tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "signature", "constants", "options", "text"), CASES)
def test_it_compiles_and_times_what_it_says(kernel, signature, constants, options, text):
    found = compile_kernel(Compilation(kernel.__name__, kernel, signature, constants, 90, options))
    loop = found.ptx[found.ptx.index("%clock64") :]
    assert text in (found.ptx if text == "barrier.sync" else loop)
    assert "%globaltimer" in loop
    assert not found.spill_stores
    assert not found.warnings


def test_reads_of_shared_memory_meet_once_a_repetition():
    # Where the warps met at each tile, they waited for its latency each time: half of the rate was measured.
    signature = {"sums": "*fp32", **_OUT}
    found = compile_kernel(Compilation("", kernels.shared_reads, signature, {"TILES": 8}, 90, {"num_warps": 8}))
    start = found.ptx.index("%clock64")
    loop = found.ptx[start : found.ptx.index("%clock64", start + 8)]
    assert loop.count("ld.shared.v4") == 8 * 4
    assert loop.count("bar.sync") <= 1
    # Eight threads, which read at once, read 128 bytes in a row: the seven lowest bits of a thread's address are 16
    # times its number's three lowest, but for bits that they share. Two threads in one bank read at half of the rate.
    code = re.sub(r"\s*\.loc[^\n]*", "", found.ptx)
    assert re.search(r"shl\.b32 \s*%r\d+, %r1, 4;\s*and\.b32 \s*%r\d+, %r\d+, 112;", code)
