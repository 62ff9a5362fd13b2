# mypy: allow-untyped-defs
"""Microbenchmarks that replace the model's assumed parameters; the only timings that it is fitted on.

``python -m jagged_attn.perfmodel measure --out parameters.json`` on a Hopper GPU with fbtriton. Each kernel runs a CTA
a multiprocessor and counts cycles (``%clock64``) over many repetitions of one thing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends._jit.tlx import tlx
from ..bench.timing import make_clock, measure_ceilings
from .machine import Machine

DIM = tl.constexpr(128)
ROWS = tl.constexpr(64)
_REPEATS = 2000
# A tenth of a millisecond of dependent loads: less than it takes the clock to change.
_CLOCK_REPEATS = 600
_LAUNCHES = 5
_ROUNDS = 40
# Tasks move registers from one to another; without a limit the compiler leaves none to move.
_EIGHT_WARPS = {"maxnreg": 128}
_BOX = 8
_L2_BYTES, _MEMORY_BYTES = 16 * 2**20, 2**30


@triton.jit
def _cycles():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _note(out, cycles, nanoseconds):
    tl.store(out + 2 * tl.program_id(0), _cycles() - cycles)
    tl.store(out + 2 * tl.program_id(0) + 1, _nanoseconds() - nanoseconds)


@triton.jit
def round_trip(out, repeats):
    """A pair of arrivals and waits, there and back."""
    ping = tlx.alloc_warp_barrier(1, 4)
    pong = tlx.alloc_warp_barrier(1, 4)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            cycles = _cycles()
            nanoseconds = _nanoseconds()
            for i in range(repeats):
                tlx.barrier_arrive(ping[0], 1)
                tlx.barrier_wait(pong[0], i & 1)
            _note(out, cycles, nanoseconds)
        with tlx.async_task(num_warps=4, registers=80):
            for i in range(repeats):
                tlx.barrier_wait(ping[0], i & 1)
                tlx.barrier_arrive(pong[0], 1)


@triton.jit
def named_barrier(out, repeats):
    """A barrier of the 128 threads of a group."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            cycles = _cycles()
            nanoseconds = _nanoseconds()
            for _ in range(repeats):
                tlx.named_barrier_wait(9, 128)
            _note(out, cycles, nanoseconds)
        with tlx.async_task(num_warps=4, registers=80):
            tlx.named_barrier_wait(10, 128)


@triton.jit
def tma_load(desc, out, repeats, rows, apart, BOX: tl.constexpr):
    """One TMA load of BOX rows after the other, each waited for, ``apart`` rows apart and in the first ``rows``."""
    tile = tlx.local_alloc((BOX, DIM), tlx.dtype_of(desc), 1)
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            cycles = _cycles()
            nanoseconds = _nanoseconds()
            for i in range(repeats):
                row = i * apart % rows
                tlx.barrier_expect_bytes(full[0], BOX * DIM * 2)
                tlx.async_descriptor_load(desc, tile[0], [row, 0], full[0])
                tlx.barrier_wait(full[0], i & 1)
            _note(out, cycles, nanoseconds)
        with tlx.async_task(num_warps=4, registers=80):
            tlx.named_barrier_wait(10, 128)


@triton.jit
def chase(links, out, repeats):
    """Loads whose addresses come from the load before."""
    cycles = _cycles()
    nanoseconds = _nanoseconds()
    at = tl.program_id(0) * 0
    for _ in range(repeats):
        at = tl.load(links + at, volatile=True)
    _note(out, cycles + at * 0, nanoseconds)


@triton.jit
def _multiply(g: tl.constexpr, a_tiles, b_tile, sums, out, repeats):
    acc = tl.zeros((ROWS, DIM), tl.float32)
    cycles = _cycles()
    nanoseconds = _nanoseconds()
    for _ in range(repeats):
        acc = tlx.async_dot(a_tiles[g], tlx.local_trans(b_tile[0]), acc)
        acc = tlx.async_dot_wait(0, acc)
    if g == 0:
        _note(out, cycles, nanoseconds)
    rows = (tl.program_id(0) * 2 + g) * ROWS + tl.arange(0, ROWS)
    tl.store(sums + rows[:, None] * DIM + tl.arange(0, DIM)[None, :], acc)


@triton.jit
def products(values, sums, out, repeats, GROUPS: tl.constexpr):
    """64 by 128 over 128 from shared memory, each waited for, by one or two groups."""
    a_tiles = tlx.local_alloc((ROWS, DIM), tl.bfloat16, 2)
    b_tile = tlx.local_alloc((DIM, DIM), tl.bfloat16, 1)
    columns = tl.arange(0, DIM)[None, :]
    a = tl.load(values + tl.arange(0, ROWS)[:, None] * DIM + columns)
    tlx.local_store(a_tiles[0], a)
    tlx.local_store(a_tiles[1], a)
    tlx.local_store(b_tile[0], tl.load(values + tl.arange(0, DIM)[:, None] * DIM + columns))
    tlx.fence("async_shared")
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(10, 128)
        with tlx.async_task(num_warps=4, registers=200, replicate=GROUPS):
            _multiply(tlx.async_task_replica_id(), a_tiles, b_tile, sums, out, repeats)


@triton.jit
def exponentials(sums, out, repeats):
    """Exponentials of 64 numbers a thread, eight warps."""
    x = tl.arange(0, 16384).to(tl.float32) * 1e-5 - 1.0
    cycles = _cycles()
    nanoseconds = _nanoseconds()
    for _ in range(repeats):
        x = tl.math.exp2(x) - 1.5
    _note(out, cycles, nanoseconds)
    tl.store(sums + tl.program_id(0) * 16384 + tl.arange(0, 16384), x)


@triton.jit
def shared_reads(sums, out, repeats, TILES: tl.constexpr):
    """Reads of ``TILES`` tiles of 16 KiB of shared memory, eight warps, which meet once a repetition.

    Each thread reads four neighbours, so that eight threads, which read at once, meet all banks: with eight, as values
    loaded in bfloat16 have, they meet half of them twice.
    """
    tiles = tlx.local_alloc((ROWS, ROWS), tl.float32, TILES)
    at = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    x = at.to(tl.float32)
    for i in tl.static_range(TILES):
        tlx.local_store(tiles[i], x)
    cycles = _cycles()
    nanoseconds = _nanoseconds()
    for _ in range(repeats):
        for i in tl.static_range(TILES):
            x = tl.maximum(x, tlx.local_load(tiles[i]))
    _note(out, cycles, nanoseconds)
    tl.store(sums + tl.program_id(0) * ROWS * ROWS + at, x)


@triton.jit
def cached_tiles(desc, out, repeats, rows, STAGES: tl.constexpr):
    """TMA loads of 16 KiB from a buffer that the L2 cache holds, ``STAGES`` of them in flight."""
    tiles = tlx.local_alloc((ROWS, DIM), tlx.dtype_of(desc), STAGES)
    full = tlx.alloc_barriers(STAGES)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            cycles = _cycles()
            nanoseconds = _nanoseconds()
            for i in range(repeats + STAGES):
                buf = i % STAGES
                if i >= STAGES:
                    tlx.barrier_wait(full[buf], (i // STAGES - 1) & 1)
                if i < repeats:
                    row = (i * tl.num_programs(0) + tl.program_id(0)) * ROWS % rows
                    tlx.barrier_expect_bytes(full[buf], ROWS * DIM * 2)
                    tlx.async_descriptor_load(desc, tiles[buf], [row, 0], full[buf])
            _note(out, cycles, nanoseconds)
        with tlx.async_task(num_warps=4, registers=80):
            tlx.named_barrier_wait(10, 128)


@triton.jit
def nothing(out):
    """A kernel that stores one number."""
    tl.store(out, 0)


def _per_repeat(launch: Callable[[Tensor], Any], processors: int, device: torch.device) -> tuple[float, float]:
    """Median over launches and multiprocessors: cycles of a repetition, and the clock in GHz."""
    cycles, clocks = [], []
    for i in range(_LAUNCHES + 1):
        out = torch.zeros(processors, 2, dtype=torch.int64, device=device)
        launch(out)
        torch.cuda.synchronize(device)
        if i:
            cycles += (out[:, 0].double() / _REPEATS).tolist()
            clocks += (out[:, 0].double() / out[:, 1].double().clamp(min=1)).tolist()
    return statistics.median(cycles), statistics.median(clocks)


def _links(device: torch.device) -> Tensor:
    """What ``chase`` follows: 256 bytes on, over a MiB."""
    return (torch.arange(2**18, dtype=torch.int32, device=device) + 64) % 2**18


def _loaded_clock(device: torch.device) -> float:
    """GHz right behind rounds like the bench's: a write of 256 MiB, then a millisecond of products.

    Read by one CTA that waits for memory, before the clock can follow it: a kernel that multiplies on all processors
    takes the card to its power limit, where it is slower than the bench's own product can have been.
    """
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    scratch = torch.empty(2**28, dtype=torch.int8, device=device)
    links, clocks = _links(device), []
    for i in range(_LAUNCHES + 1):
        out = torch.zeros(1, 2, dtype=torch.int64, device=device)
        for _ in range(_ROUNDS):
            scratch.zero_()
            a @ b
        chase[(1,)](links, out, _CLOCK_REPEATS)
        cycles, nanoseconds = out[0].tolist()
        clocks += [cycles / max(nanoseconds, 1)] if i else []
    return statistics.median(clocks)


def _milliseconds(launch: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Of one of many calls that are queued behind a busy device."""
    scratch = torch.empty(2**28, dtype=torch.int8, device=device)
    launch()
    for _ in range(40):
        scratch.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        launch()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / calls


def measure(machine: Machine, device: torch.device) -> dict[str, float]:
    """The parameters of ``Machine`` that can be measured, on this device."""
    n, found = machine.processors, dict[str, float]()
    values = torch.randn(128 * 128, device=device).bfloat16()
    sums = torch.empty(n * 2 * 16384, device=device)

    def cycles(kernel: Any, *arguments: Any, **options: Any) -> tuple[float, float]:
        grid = options.pop("grid", n)
        return _per_repeat(lambda out: kernel[(grid,)](*arguments, out, _REPEATS, **options), grid, device)

    ceilings = measure_ceilings(device, torch.bfloat16, make_clock(device), small=False)
    one, _ = cycles(products, values, sums, GROUPS=1, **_EIGHT_WARPS)
    two, _ = cycles(products, values, sums, GROUPS=2)
    busy = two / 2
    clock = _loaded_clock(device)
    found["clock_ghz"] = clock
    found["mma_latency"] = one - busy
    found["mma_efficiency"] = ceilings.tflops / (n * machine.mma_flop * clock * 1e-3)
    found["memory_gb_per_s"] = ceilings.gb_per_s
    found["barrier_latency"] = cycles(round_trip, **_EIGHT_WARPS)[0] / 2
    found["named_barrier"] = cycles(named_barrier, **_EIGHT_WARPS)[0]
    found["exponentials"] = 16384 / cycles(exponentials, sums, num_warps=8)[0]
    found["shared_bytes"] = 8 * 64 * 128 * 2 / cycles(shared_reads, sums, TILES=8, num_warps=8)[0]
    found["global_latency"] = cycles(chase, _links(device), grid=1)[0]
    found |= _tma(machine, device)
    buffer = torch.zeros(_L2_BYTES // 256, 128, dtype=torch.bfloat16, device=device)
    desc = TensorDescriptor.from_tensor(buffer, [64, 128])

    def cached(out: Tensor) -> None:
        cached_tiles[(n,)](desc, out, _REPEATS, buffer.shape[0], STAGES=8, **_EIGHT_WARPS)

    found["l2_bytes"] = 64 * 128 * 2 / _per_repeat(cached, n, device)[0]
    one_number = torch.zeros(1, dtype=torch.int32, device=device)
    found["launch_us"] = 1e3 * _milliseconds(lambda: nothing[(1,)](one_number, num_warps=4), 100, device)
    return found


def _tma(machine: Machine, device: torch.device) -> dict[str, float]:
    """Latencies of a TMA load of one CTA, of few bytes, less the time that they take through the port.

    Of many bytes the first ones land while the last ones come, which the port's rate says nothing of.
    """
    found = {}
    for name, size, apart in (("l2_latency", _L2_BYTES, 64), ("memory_latency", _MEMORY_BYTES, 2048)):
        buffer = torch.zeros(size // 256, 128, dtype=torch.bfloat16, device=device)
        desc = TensorDescriptor.from_tensor(buffer, [_BOX, 128])

        def launch(out: Tensor, buffer: Tensor = buffer, desc: TensorDescriptor = desc, apart: int = apart) -> None:
            if buffer.nbytes > _L2_BYTES:
                # What is read would be in the cache since the launch before.
                buffer.zero_()
            tma_load[(1,)](desc, out, _REPEATS, buffer.shape[0], apart, BOX=_BOX, **_EIGHT_WARPS)

        cycles, _ = _per_repeat(launch, 1, device)
        transfer = _BOX * 256 * (1 / machine.port_bytes + 1 / machine.shared_bytes)
        found[name] = max(cycles - transfer - machine.tma_issue - machine.barrier_latency, 0.0)
    return found


def write(path: Path, found: Mapping[str, float], device: torch.device) -> None:
    """The parameters with where they come from, for ``predict --parameters``."""
    properties = torch.cuda.get_device_properties(device)
    provenance = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "device": properties.name,
        "torch": torch.__version__, "triton": triton.__version__, "command": "python -m jagged_attn.perfmodel measure",
    }  # fmt: skip
    path.write_text(json.dumps({**provenance, "parameters": {k: round(v, 4) for k, v in found.items()}}, indent=1))
