"""What the model knows of a GPU: every number with its source, and which of them a microbenchmark replaces.

Times are cycles of a multiprocessor at its clock under load; rates are per multiprocessor and cycle unless named
otherwise. Nothing here may be adjusted to the timings that the model predicts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

# What a number rests on.
SHEET = "data sheet"
GUIDE = "CUDA C++ programming guide, throughput of native arithmetic instructions"
MEASURED = "measured"
LITERATURE = "literature"
ASSUMED = "assumed, until the microbenchmark has run"


@dataclass(frozen=True)
class Machine:
    """One GPU.

    Attributes:
        name: of the GPU.
        processors: multiprocessors.
        clock_ghz: of a multiprocessor under load.
        mma_flop: FLOP of the tensor cores, dense, two-byte inputs.
        mma_efficiency: share of it that a matrix product reaches at ``clock_ghz``.
        mma_latency: from the end of a product's last step to the thread that waits for it.
        shared_bytes: bytes of shared memory read or written.
        shared_latency: of a load from shared memory; also what a fence waits for.
        exponentials: results of the special-function units.
        barrier_latency: from an arrival at an mbarrier to the thread that waited there.
        named_barrier: of a ``bar.sync`` of threads that are all there.
        shuffle_latency: of a warp shuffle.
        arithmetic_latency: before the first result of a run of dependent instructions can be used.
        tma_issue: of the thread that issues a TMA copy, its wait and byte count included.
        l2_latency: of a TMA load whose bytes are in the L2 cache.
        memory_latency: of one whose bytes are not.
        global_latency: of an ordinary dependent load from the L2 cache, and of an atomic.
        port_bytes: most bytes a multiprocessor takes from the L2 cache, and gives to it.
        l2_bytes: its share of what the L2 cache gives to all.
        memory_gb_per_s: of device memory in all, read and written, as a copy reaches it.
        launch_us: from the end of one kernel of a stream to the first instruction of the next.
        tensor_memory_bytes: bytes that a warp moves between registers and tensor memory a cycle (Blackwell).
        sources: where each number comes from.
    """

    name: str
    processors: int
    clock_ghz: float
    mma_flop: float
    mma_efficiency: float
    mma_latency: float
    shared_bytes: float
    shared_latency: float
    exponentials: float
    barrier_latency: float
    named_barrier: float
    shuffle_latency: float
    arithmetic_latency: float
    tma_issue: float
    l2_latency: float
    memory_latency: float
    global_latency: float
    port_bytes: float
    l2_bytes: float
    memory_gb_per_s: float
    launch_us: float
    tensor_memory_bytes: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def tflops(self) -> float:
        """What a large matrix product reaches on the whole GPU."""
        return self.processors * self.mma_flop * self.mma_efficiency * self.clock_ghz * 1e-3

    @property
    def memory_bytes(self) -> float:
        """A multiprocessor's share of device memory, bytes a cycle."""
        return self.memory_gb_per_s / self.clock_ghz / self.processors

    def microseconds(self, cycles: float) -> float:
        """Cycles as time."""
        return cycles / self.clock_ghz * 1e-3

    def with_ceilings(self, tflops: float, gb_per_s: float) -> Machine:
        """This machine with the matrix product and the copy that a bench run measured beside its rows."""
        peak = self.processors * self.mma_flop * self.clock_ghz * 1e-3
        return replace(self, mma_efficiency=tflops / peak, memory_gb_per_s=gb_per_s)

    def fitted(self, path: Path) -> Machine:
        """This machine with what ``perfmodel.microbench`` wrote to a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file.
        """
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not isinstance(found.get("parameters"), dict) or "date" not in found:
            raise ValueError("it has no date and parameters")
        values: dict[str, Any] = {
            name: number_of(name, x) for name, x in found["parameters"].items() if name in NUMBERS
        }
        sources = {**self.sources, **dict.fromkeys(values, f"{MEASURED}: {path.name}, {found['date']}")}
        return replace(self, **values, sources=sources)


NUMBERS = tuple(f.name for f in fields(Machine) if f.name not in ("name", "sources"))
# What takes time may take none; everything else is divided by.
_TIMES = tuple(name for name in NUMBERS if name.endswith(("latency", "barrier", "issue", "_us")))


def number_of(name: str, value: Any) -> float:
    """A value for one of ``NUMBERS``.

    Raises:
        ValueError: there is no such number, or it cannot have that value.
    """
    if name not in NUMBERS:
        raise ValueError(f"{name} is none of {', '.join(NUMBERS)}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value}") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and name not in _TIMES):
        raise ValueError(f"{name} must be finite and {'not negative' if name in _TIMES else 'above 0'}, got {value}")
    if name != "processors":
        return number
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, got {value}")
    return int(number)


H200 = Machine(
    name="H200",
    processors=132,
    clock_ghz=1.68,
    mma_flop=4096,
    mma_efficiency=0.895,
    mma_latency=32,
    shared_bytes=128,
    shared_latency=30,
    exponentials=16,
    barrier_latency=60,
    named_barrier=30,
    shuffle_latency=25,
    arithmetic_latency=30,
    tma_issue=40,
    l2_latency=430,
    memory_latency=650,
    global_latency=270,
    port_bytes=64,
    l2_bytes=32,
    memory_gb_per_s=4240,
    launch_us=4.0,
    sources={
        "processors": SHEET,
        "clock_ghz": "nvidia-smi while prototypes of our backward kernels ran: 1.62 to 1.68 and 1.68 to 1.95 GHz",
        "mma_flop": f"{SHEET}: 989 TFLOP/s at 1.83 GHz",
        "mma_efficiency": f"{MEASURED}: the 8192³ product of the bench's run, 813 TFLOP/s, at clock_ghz",
        "mma_latency": ASSUMED,
        "shared_bytes": f"{LITERATURE}: 32 banks of 4 bytes",
        "shared_latency": f"{LITERATURE}: about 30 cycles, arXiv 2402.13499",
        "exponentials": GUIDE,
        "barrier_latency": f"{ASSUMED}: two latencies of shared memory",
        "named_barrier": f"{ASSUMED}: one latency of shared memory",
        "shuffle_latency": ASSUMED,
        "arithmetic_latency": f"{ASSUMED}: seven dependent instructions of four cycles",
        "tma_issue": ASSUMED,
        "l2_latency": f"{LITERATURE}: about 260 for a load, arXiv 2402.13499, and {ASSUMED}: 170 more for TMA",
        "memory_latency": f"{LITERATURE}: about 480 for a load, arXiv 2402.13499, and {ASSUMED}: 170 more for TMA",
        "global_latency": f"{LITERATURE}: about 260 for a load, arXiv 2402.13499",
        "port_bytes": f"{LITERATURE}: 64 bytes a cycle",
        "l2_bytes": f"{LITERATURE}: 5.5 to 6 TB/s of an H100 PCIe's 114 multiprocessors, chipsandcheese.com 2023",
        "memory_gb_per_s": f"{MEASURED}: the copy of the bench's run",
        "launch_us": ASSUMED,
    },
)

# None of it has been measured by us: predictions rest on the data sheet, and on the H200 where that says nothing.
B200 = replace(
    H200,
    name="B200",
    processors=148,
    clock_ghz=1.57,
    mma_flop=8192,
    memory_gb_per_s=7060,
    tensor_memory_bytes=128,
    sources={
        **{name: f"taken from the H200 ({source})" for name, source in H200.sources.items()},
        "processors": SHEET,
        "clock_ghz": f"{ASSUMED}: 1.85 GHz of the data sheet times the H200's 1.68 / 1.98",
        "mma_flop": f"{SHEET}: 2250 TFLOP/s",
        "memory_gb_per_s": f"{SHEET}: 8 TB/s, times the share that a copy reaches on the H200",
        "tensor_memory_bytes": f"{LITERATURE}: 128 bytes a cycle for each quarter of a multiprocessor",
    },
)

MACHINES = {machine.name: machine for machine in (H200, B200)}
