"""A discrete-event simulation of the roles of one multiprocessor.

A role is a generator that yields what it waits for: a time (cycles) or a ``Signal``. The parts of a multiprocessor are
queues: tensor cores, shared memory, instruction issue, the half-rate arithmetic, the special-function units, the port
to the L2 cache, a share of device memory. Work passes through them in pieces, so that roles interleave.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import ClassVar, TypeAlias

from .machine import Machine

# Bytes of a piece on its way through shared memory, and cycles of a piece of arithmetic.
_PIECE_BYTES = 4096
_PIECE_CYCLES = 64
# Threads of a warp group are four warps, one for each quarter of a multiprocessor.
_WARP_LANES = 32


class Signal:
    """Something that happens once."""

    def __init__(self, fired: bool = False) -> None:
        self.fired = fired
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Let go on who waits."""
        self.fired = True
        waiting, self.waiting = self.waiting, []
        for resume in waiting:
            resume()

    def then(self, call: Callable[[], None]) -> None:
        """Call when it happens; now, if it has."""
        if self.fired:
            call()
        else:
            self.waiting.append(call)


Role: TypeAlias = Generator[float | Signal, None, None]
# A part of a role that returns the store that it leaves under way.
StoringRole: TypeAlias = Generator[float | Signal, None, Signal | None]
_PAST = Signal(fired=True)


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call at a time, or now if it is past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), call))

    def spawn(self, role: Role) -> Signal:
        """Run a role; the signal says that it has ended."""
        ended = Signal()

        def step() -> None:
            try:
                wanted = next(role)
            except StopIteration:
                ended.fire()
                return
            if isinstance(wanted, Signal):
                wanted.then(step)
            else:
                self.at(wanted, step)

        self.at(self.now, step)
        return ended

    def run(self) -> None:
        """Until nothing happens any more."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class Queue:
    """A part that serves one request after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free = 0.0
        self.busy = 0.0

    def serve(self, cycles: float) -> float:
        """When a request that comes now will have been served."""
        self._free = max(self._free, self._clock.now) + cycles
        self.busy += cycles
        return self._free


class Barrier:
    """An mbarrier, or a ring of them: use ``n`` is complete after ``arrivals`` arrivals, and a latency."""

    def __init__(self, clock: Clock, arrivals: int, latency: float) -> None:
        self._clock, self._arrivals, self._latency = clock, arrivals, latency
        self._left: dict[int, int] = {}
        self._uses: dict[int, Signal] = {}

    def arrive(self, use: int) -> None:
        """One of the arrivals of a use."""
        left = self._left.setdefault(use, self._arrivals) - 1
        if left < 0:
            raise RuntimeError(f"a barrier takes {self._arrivals} arrivals a use, got one more at use {use}")
        self._left[use] = left
        if not left:
            self._clock.at(self._clock.now + self._latency, self.wait(use).fire)

    def wait(self, use: int) -> Signal:
        """That a use is complete; uses below 0 are."""
        return _PAST if use < 0 else self._uses.setdefault(use, Signal())


class TensorCores:
    """Steps of products, in order for each warp group and in turns between them.

    The operands of a step are read from shared memory while the step before it is computed.
    """

    def __init__(self, clock: Clock, shared: Queue, latency: float) -> None:
        self._clock, self._shared, self._latency = clock, shared, latency
        self._waiting: dict[int, deque[tuple[float, float, int, Signal]]] = {}
        self._turn = -1
        self._free = 0.0
        self._reading = False
        self.busy = 0.0

    def issue(self, owner: int, cycles: float, read: float, steps: int) -> Signal:
        """A product of equal steps, each of so many cycles of the tensor cores and of shared memory."""
        done = Signal()
        self._waiting.setdefault(owner, deque()).append((cycles, read, steps, done))
        if not self._reading:
            self._read()
        return done

    def _next_owner(self) -> int | None:
        owners = sorted(owner for owner, waiting in self._waiting.items() if waiting)
        return next((owner for owner in owners if owner > self._turn), owners[0] if owners else None)

    def _read(self) -> None:
        owner = self._next_owner()
        self._reading = owner is not None
        if owner is None:
            return
        self._turn = owner
        cycles, read, steps, done = self._waiting[owner].popleft()
        start = max(self._shared.serve(read) if read else self._clock.now, self._free)
        self._free = start + cycles
        self.busy += cycles
        if steps > 1:
            self._waiting[owner].appendleft((cycles, read, steps - 1, done))
        else:
            self._clock.at(self._free + self._latency, done.fire)
        self._clock.at(start, self._read)


@dataclass(frozen=True)
class Work:
    """Instructions of a warp on registers, by the units that execute them.

    Attributes:
        fma: full rate: multiply, add.
        alu: half rate: minimum, comparison, selection, conversion, integers.
        mufu: special functions.
        other: only issued: addresses, loads and stores of shared memory, the uniform path.
        shuffles: latencies of shuffles one after the other.
    """

    fma: float = 0
    alu: float = 0
    mufu: float = 0
    other: float = 0
    shuffles: int = 0


@dataclass(frozen=True)
class Rates:
    """Bytes a cycle that a multiprocessor gets from the L2 cache and from device memory."""

    l2: float
    memory: float


@dataclass
class Processor:
    """A multiprocessor with its parts, and what roles do on it."""

    machine: Machine
    rates: Rates
    clock: Clock = field(default_factory=Clock)
    products: int = 0
    loads: int = 0
    stores: int = 0
    flop: float = 0.0
    l2_moved: float = 0.0
    memory_moved: float = 0.0

    def __post_init__(self) -> None:
        self.shared, self.issue, self.alu, self.mufu = (Queue(self.clock) for _ in range(4))
        self.incoming, self.outgoing, self.memory = (Queue(self.clock) for _ in range(3))
        self.tensor = TensorCores(self.clock, self.shared, self.machine.mma_latency)

    def barrier(self, arrivals: int = 1) -> Barrier:
        """A barrier of this machine's latency."""
        return Barrier(self.clock, arrivals, self.machine.barrier_latency)

    def pause(self, cycles: float) -> float:
        """A time so many cycles from now."""
        return self.clock.now + cycles

    def product(self, owner: int, m: int, n: int, k: int, registers: bool = False) -> Signal:
        """``[m, k] @ [k, n]``; both operands are in shared memory, or the left one in registers or tensor memory."""
        steps = k // 16
        flop = 2.0 * m * n * 16
        self.products += 1
        self.flop += flop * steps
        read = 2.0 * 16 * (n + (0 if registers else m)) / self.machine.shared_bytes
        cycles = flop / (self.machine.mma_flop * self.machine.mma_efficiency)
        return self.tensor.issue(owner, cycles, read, steps)

    def compute(self, work: Work) -> Role:
        """Arithmetic of a warp group: one of its warps on each quarter of the multiprocessor."""
        mufu = work.mufu * _WARP_LANES / (self.machine.exponentials / 4)
        issue = work.fma + work.alu + work.mufu + work.other
        pieces = max(int(max(mufu, issue, 2 * work.alu) // _PIECE_CYCLES), 1)
        for _ in range(pieces):
            ends = (
                self.issue.serve(issue / pieces),
                self.alu.serve(2 * work.alu / pieces),
                self.mufu.serve(mufu / pieces),
            )
            yield max(ends)
        latency = work.shuffles * self.machine.shuffle_latency + self.machine.arithmetic_latency
        yield self.pause(latency)

    def touch(self, size: float) -> Role:
        """Read or write shared memory from registers."""
        for piece in _pieces(size):
            yield self.shared.serve(piece / self.machine.shared_bytes)

    def touch_rows(self, loads: int) -> Role:
        """Loads by each warp of a group of numbers that its threads share: a pass through the banks each."""
        yield from self.touch(loads * 4 * self.machine.shared_bytes)

    def columns(self, columns: int) -> Role:
        """Move fp32 columns of 128 rows between tensor memory and a group's registers."""
        yield self.pause(columns * 4 * _WARP_LANES / self.machine.tensor_memory_bytes + self.machine.shared_latency)

    def fence(self) -> float:
        """Make what was written visible to TMA and tensor cores."""
        return self.pause(self.machine.shared_latency)

    def meet(self) -> float:
        """A named barrier of warps of one group."""
        return self.pause(self.machine.named_barrier)

    def load(self, size: float, miss: float, barrier: Barrier, use: int) -> Role:
        """Issue a TMA load that arrives at a barrier; a share ``miss`` of its bytes comes from device memory."""
        yield self.pause(self.machine.tma_issue)
        self.loads += 1
        self._count(size, miss)
        ready = max(self.incoming.serve(size / self.rates.l2), self.memory.serve(size * miss / self.rates.memory))
        latency = self.machine.l2_latency + miss * (self.machine.memory_latency - self.machine.l2_latency)
        arrived = Signal()
        arrived.then(partial(barrier.arrive, use))
        pieces = _pieces(size)
        rate = min(self.rates.l2, self.rates.memory / miss if miss else self.rates.l2)
        for i, piece in enumerate(reversed(pieces)):
            self.clock.at(ready + latency - i * piece / rate, self._lands(piece, arrived if i == 0 else None))

    def _lands(self, size: float, arrived: Signal | None) -> Callable[[], None]:
        def land() -> None:
            end = self.shared.serve(size / self.machine.shared_bytes)
            if arrived is not None:
                self.clock.at(end, arrived.fire)

        return land

    def store(self, size: float, miss: float) -> Signal:
        """A TMA store or addition; the signal says that its source has been read."""
        self.stores += 1
        self._count(size, miss)
        self.memory.serve(size * miss / self.rates.memory)
        read = Signal()

        def copy() -> Role:
            yield self.pause(self.machine.shared_latency)
            for piece in _pieces(size):
                yield max(
                    self.shared.serve(piece / self.machine.shared_bytes), self.outgoing.serve(piece / self.rates.l2)
                )
            read.fire()

        self.clock.spawn(copy())
        return read

    def _count(self, size: float, miss: float) -> None:
        self.l2_moved += size
        self.memory_moved += size * miss


class HandOut:
    """What kernels share whose load role hands items to the others, each looked up one ahead, in a ring of two slots.

    Attributes:
        sm: the processor.
        item_full: the load role has published an item.
        item_empty: the others have read it.
        SLOTS_ARE_SHARED: the slots are in shared memory, not in global memory.
    """

    SLOTS_ARE_SHARED: ClassVar[bool] = False

    sm: Processor
    item_full: Barrier
    item_empty: Barrier

    def _take(self, turn: int) -> Role:
        """The counter, the table and the offsets answer one after the other."""
        yield self.sm.pause(3 * self.sm.machine.global_latency)
        yield self.item_empty.wait(turn - 2)
        self.item_full.arrive(turn)

    def _read_item(self, turn: int) -> Role:
        """Read an item, and keep its slot."""
        yield self.item_full.wait(turn)
        machine = self.sm.machine
        yield self.sm.pause(machine.shared_latency if self.SLOTS_ARE_SHARED else machine.global_latency)

    def _receive(self, turn: int) -> Role:
        """Read an item, and free its slot."""
        yield from self._read_item(turn)
        self.item_empty.arrive(turn)


def _pieces(size: float) -> list[float]:
    whole = max(int(-(-size // _PIECE_BYTES)), 1)
    return [size / whole] * whole
