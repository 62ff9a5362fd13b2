"""Clocks: forward and backward of several contestants in turn, the host's share of a call, the device's ceilings."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .contestants import Attempt
from .problem import BACKWARD, BOTH, FORWARD

# The gate has run everything once already.
# Stack depths of timed batches of calls: a step that meets most of them, prime to their number.
_DEPTH_STEP, _DEPTHS = 7, 97
_WARMUP_PASSES = 2
_FLUSH_BYTES = 256 * 2**20


@contextmanager
def compiled_throughout() -> Iterator[None]:
    """What is under ``torch.compile`` raises where dynamo would give up on it, which it does after eight compilations.

    It would go on uncompiled, and be timed under the name of what is compiled.
    """
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


class Quantiles(NamedTuple):
    """Median, 20th and 80th percentile of some times in milliseconds, and how many passes there are."""

    median: float
    p20: float
    p80: float
    passes: int

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        """The quantiles of at least one sample."""
        values = torch.tensor(samples, dtype=torch.float64)
        p20, median, p80 = torch.quantile(values, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
        return cls(median, p20, p80, len(samples))


class Clock(Protocol):
    """Marks moments, and tells the milliseconds between two of them once the device has passed both."""

    def flush(self) -> None:
        """Make the next call find its inputs in memory, not in a cache left by the last call."""
        ...

    def mark(self) -> Any:
        """Now, in the order of the device's work."""
        ...

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to another."""
        ...

    def wait(self) -> None:
        """Wait for the device."""
        ...


class HostClock:
    """``time.perf_counter``, for a device whose calls return when they are done."""

    def flush(self) -> None:
        """See ``Clock.flush``: nothing, the batches are larger than the caches."""

    def mark(self) -> float:
        """See ``Clock.mark``."""
        return time.perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        """See ``Clock.elapsed``."""
        return (end - start) * 1e3

    def wait(self) -> None:
        """See ``Clock.wait``: nothing to wait for."""


class CudaClock:
    """CUDA events, with a write larger than the L2 cache in front of each timed region.

    The write also keeps the device busy while the host prepares the launch, so that launch latency is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def flush(self) -> None:
        """See ``Clock.flush``."""
        self._scratch.zero_()

    def mark(self) -> torch.cuda.Event:
        """See ``Clock.mark``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See ``Clock.elapsed``."""
        return start.elapsed_time(end)

    def wait(self) -> None:
        """See ``Clock.wait``."""
        torch.cuda.synchronize(self._device)


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def time_attempts(
    attempts: Mapping[str, Attempt], clock: Clock, repeats: int, on_pass: Callable[[], Any] = lambda: None
) -> dict[str, dict[str, Quantiles] | Exception]:
    """Time forward and backward of every attempt, one pass of each in turn.

    Taking turns exposes all to the same clocks, temperature and neighbours; who begins changes every round.

    Args:
        attempts: by contestant.
        clock: the device's clock.
        repeats: timed passes of each.
        on_pass: called after every pass.

    Returns:
        For each contestant its times by phase, or what it raised.
    """
    failures: dict[str, Exception] = {}
    for name, attempt in attempts.items():
        try:
            for _ in range(_WARMUP_PASSES):
                _one_pass(attempt, clock)
                on_pass()
            clock.wait()
        except Exception as error:  # whatever a contestant raises is its result
            failures[name] = error
    names = [name for name in attempts if name not in failures]
    marks: dict[str, list[_Marks]] = {name: [] for name in names}
    # Nothing waits for the device from here to the last pass: it would run dry while the host prepares the next launch.
    for round_ in range(repeats if names else 0):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            marks[name].append(_one_pass(attempts[name], clock))
            on_pass()
    clock.wait()
    return failures | {name: _by_phase(passes, clock) for name, passes in marks.items()}


class _Marks(NamedTuple):
    forward_start: Any
    forward_end: Any
    backward_start: Any
    backward_end: Any


def _one_pass(attempt: Attempt, clock: Clock) -> _Marks:
    clock.flush()
    forward_start = clock.mark()
    out = attempt.forward()
    forward_end = clock.mark()
    clock.flush()
    backward_start = clock.mark()
    gradients = torch.autograd.grad(out, attempt.leaves, attempt.dout)
    backward_end = clock.mark()
    del gradients  # after the mark: giving memory back is not the contestant's time
    return _Marks(forward_start, forward_end, backward_start, backward_end)


def _by_phase(passes: list[_Marks], clock: Clock) -> dict[str, Quantiles]:
    forward = [clock.elapsed(p.forward_start, p.forward_end) for p in passes]
    backward = [clock.elapsed(p.backward_start, p.backward_end) for p in passes]
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return {FORWARD: Quantiles.of(forward), BACKWARD: Quantiles.of(backward), BOTH: Quantiles.of(both)}


def passes_of(attempts: Mapping[str, Attempt], repeats: int) -> int:
    """How many passes ``time_attempts`` makes, warm-up included."""
    return len(attempts) * (repeats + _WARMUP_PASSES)


def time_calls(call: Callable[[], Any], wait: Callable[[], None], calls: int, batches: int) -> Quantiles:
    """Host milliseconds of one call at steady state.

    The device is waited for between batches of calls, never between calls, and not while the clock runs. Each batch
    runs at another depth of the stack: CPython takes and returns a piece of memory whenever calls cross the end of a
    block of frames, so that at one depth in six the same call takes up to three times as long. The median is that of
    an ordinary depth.
    """

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    samples = []
    for batch in range(-1, batches):
        wait()
        elapsed = _at_depth(_DEPTH_STEP * max(batch, 0) % _DEPTHS, timed)
        if batch >= 0:
            samples.append(elapsed * 1e3 / calls)
    wait()
    return Quantiles.of(samples)


def _at_depth(frames: int, run: Callable[[], float]) -> float:
    """``run()``, so many frames further down the stack."""
    return run() if frames == 0 else _at_depth(frames - 1, run)


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches on the two simplest loads, in this run.

    Attributes:
        tflops: a square matrix product in the run's dtype.
        gb_per_s: a copy, bytes read and written.
        matmul_size: rows of the matrices.
        copy_bytes: bytes of the copied buffer.
    """

    tflops: float
    gb_per_s: float
    matmul_size: int
    copy_bytes: int


def measure_ceilings(device: torch.device, dtype: torch.dtype, clock: Clock, small: bool) -> Ceilings:
    """Time a matrix product (8192 on a GPU, 2048 on a CPU; random, since zeros run faster) and a copy."""
    on_gpu = device.type == "cuda"
    size = 256 if small else 8192 if on_gpu else 2048
    copy_bytes = 2**22 if small else 2**31 if on_gpu else 2**28
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_ms = _median_ms(lambda: a @ b, clock)
    source = torch.randint(0, 127, (copy_bytes,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), clock)
    return Ceilings(2 * size**3 / product_ms * 1e-9, 2 * copy_bytes / copy_ms * 1e-6, size, copy_bytes)


def _median_ms(call: Callable[[], Any], clock: Clock, repeats: int = 20) -> float:
    marks = []
    for _ in range(_WARMUP_PASSES + repeats):
        clock.flush()
        start = clock.mark()
        call()
        marks.append((start, clock.mark()))
    clock.wait()
    return statistics.median(clock.elapsed(start, end) for start, end in marks[_WARMUP_PASSES:])
