"""From a workload of the bench to predicted milliseconds on a GPU with our Hopper kernels.

    time = sum over launches of (launch + first item + hand-out of the rest), at least bytes / copy bandwidth

An item's time depends on its shape alone: a chain of equal items is simulated once (``steady``), or of equal runs where
items of a run depend on one another. The hand-out is that of the kernels: longest first, to whichever CTA is free.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Protocol

import torch

from ..bench.workloads import Workload
from ..masks import Full
from ..schedule.hopper import ForwardConfig, are_short, forward_config, forward_run, has_few_keys
from ..schedule.hopper_backward import adds_up_dq
from ..schedule.tiles import max_tiles
from .hopper import (
    BYTES,
    DIM,
    FLOAT,
    ROWS,
    Forward,
    ForwardItem,
    Halves,
    Keys,
    KeysItem,
    Queries,
    QueriesItem,
    Run,
    Turns,
)  # fmt: skip
from .machine import Machine
from .simulate import Processor, Rates, Signal

# Items of the two chains whose difference is the steady state.
_FEW, _MANY = 2, 6
_CHUNK_TILES = 8


class Kernel(Protocol):
    """A CTA on a multiprocessor."""

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        ...


# Puts the CTAs of a chain of so many items on a multiprocessor.
Build = Callable[[Processor, int], Sequence[Kernel]]


@dataclass(frozen=True)
class Steady:
    """An item among others of its kind.

    Attributes:
        cycles: from its end to the end of the next.
        first: more of the first one, which finds nothing under way.
        memory: bytes of device memory.
        l2: bytes to and from the L2 cache.
        flop: of the tensor cores.
        tensor_busy: share of the time in which tensor cores work.
        shared_busy: likewise of shared memory.
    """

    cycles: float
    first: float
    memory: float
    l2: float
    flop: float
    tensor_busy: float
    shared_busy: float


def _chain(machine: Machine, rates: Rates, build: Build, items: int) -> Processor:
    sm = Processor(machine, rates)
    ended = [signal for kernel in build(sm, items) for signal in kernel.start()]
    sm.clock.run()
    if not all(signal.fired for signal in ended):
        raise RuntimeError("the simulated roles wait for one another")
    return sm


def simulate_chains(machine: Machine, rates: Rates, build: Build, ctas: int = 1) -> Steady:
    """Simulate a short and a longer chain; per CTA and item, the difference is the steady state."""
    few, many = (_chain(machine, rates, build, n) for n in (_FEW, _MANY))
    items = _MANY - _FEW
    span = many.clock.now - few.clock.now
    return Steady(
        cycles=span / items,
        first=max(few.clock.now - _FEW * span / items, 0.0),
        memory=(many.memory_moved - few.memory_moved) / items / ctas,
        l2=(many.l2_moved - few.l2_moved) / items / ctas,
        flop=(many.flop - few.flop) / items / ctas,
        tensor_busy=(many.tensor.busy - few.tensor.busy) / span,
        shared_busy=(many.shared.busy - few.shared.busy) / span,
    )


def steady(machine: Machine, build: Build, ctas: int = 1) -> Steady:
    """The steady state with the bandwidth that the other multiprocessors leave.

    Alone, a multiprocessor gets what its port takes. With all of them asking for a share r of what there is, one that
    asks gets 1 / r of its own share, but no more than the port, and no less than its share.
    """
    port = machine.port_bytes
    alone = simulate_chains(machine, Rates(port, port), build, ctas)

    def left(moved: float, share: float) -> float:
        asked = min(moved * ctas / alone.cycles / share, 1.0)
        return min(port, share / asked) if asked else port

    rates = Rates(left(alone.l2, machine.l2_bytes), left(alone.memory, machine.memory_bytes))
    return simulate_chains(machine, rates, build, ctas)


def hand_out(durations: Iterable[float], workers: int) -> float:
    """When the last of some items ends that go, in this order, to whichever worker is free."""
    free = [0.0] * workers
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a phase, and what they are made of.

    Attributes:
        ms: in all.
        main_ms: of the main kernel.
        around_ms: of the kernels before and after it.
        tensor_busy: share of the main kernel's time in which tensor cores work.
        shared_busy: likewise shared memory.
        memory_busy: likewise device memory.
        flop: of the main kernel's tensor cores, padding included.
        memory_bytes: of device memory that the main kernel moves.
    """

    ms: float
    main_ms: float
    around_ms: float
    tensor_busy: float
    shared_busy: float
    memory_busy: float
    flop: float
    memory_bytes: float


def all_heads(
    machine: Machine, entries: Sequence[Steady], heads: int, workers: int, around_ms: float, counter: bool = False
) -> Prediction:
    """A kernel that hands out each entry of a table once a head; ``counter``: its zero is a launch, if it is needed."""
    span = hand_out((entry.cycles for entry in entries for _ in range(heads)), workers) + entries[0].first
    memory = heads * sum(entry.memory for entry in entries)
    memory_ms = memory / machine.memory_gb_per_s * 1e-6
    span_ms = machine.microseconds(span) * 1e-3
    total = sum(entry.cycles for entry in entries)
    tensor = sum(entry.tensor_busy * entry.cycles for entry in entries) / total
    shared = sum(entry.shared_busy * entry.cycles for entry in entries) / total
    main_ms = max(span_ms, memory_ms) + machine.launch_us * 1e-3
    if counter and len(entries) * heads > workers:
        around_ms += machine.launch_us * 1e-3
    return Prediction(
        ms=main_ms + around_ms, main_ms=main_ms, around_ms=around_ms, tensor_busy=tensor, shared_busy=shared,
        memory_busy=memory_ms / main_ms, flop=heads * sum(entry.flop for entry in entries), memory_bytes=memory,
    )  # fmt: skip


def one_after_the_other(first: Prediction, second: Prediction) -> Prediction:
    """Two kernels: times and counts are added, shares are of the time of both."""
    main_ms = first.main_ms + second.main_ms

    def share(name: str) -> float:
        return sum(getattr(one, name) * one.main_ms for one in (first, second)) / main_ms

    return Prediction(
        ms=first.ms + second.ms, main_ms=main_ms, around_ms=first.around_ms + second.around_ms,
        tensor_busy=share("tensor_busy"), shared_busy=share("shared_busy"), memory_busy=share("memory_busy"),
        flop=first.flop + second.flop, memory_bytes=first.memory_bytes + second.memory_bytes,
    )  # fmt: skip


def pass_ms(machine: Machine, size: float) -> float:
    """A kernel that does nothing but move bytes of device memory."""
    return size / machine.memory_gb_per_s * 1e-6 + machine.launch_us * 1e-3


# --- Workloads to items ---


@dataclass(frozen=True)
class Tile:
    """What an item of the forward is: so many groups of rows of queries, against blocks of keys.

    Items come in runs of ``run``, in which up to ``fitting`` keys stay for the next item of a sequence.
    """

    keys: int
    rows: int
    groups: int
    run: int = 1
    fitting: int = 0

    @property
    def block_q(self) -> int:
        """Rows of queries of an item."""
        return self.rows * self.groups


@dataclass(frozen=True)
class Lengths:
    """Lengths of the sequences of a workload, in pairs of queries and keys."""

    q: tuple[int, ...]
    kv: tuple[int, ...]

    def longest_first(self, side: str) -> list[tuple[int, int]]:
        """Pairs in the order of the tile tables."""
        by = self.q if side == "q" else self.kv
        return [(self.q[i], self.kv[i]) for i in sorted(range(len(by)), key=lambda i: -by[i])]


def draw(workload: Workload, seed: int = 0) -> Lengths:
    """The lengths that the bench draws."""
    kv, q = workload.draw_lengths(seed)
    if workload.kind == "broadcast_q":
        q = torch.full_like(kv, workload.num_shared_queries or 0)
    return Lengths(tuple((kv if q is None else q).tolist()), tuple(kv.tolist()))


def _keys_of(workload: Workload, rows: Sequence[int], len_q: int, len_kv: int) -> list[tuple[int, int]]:
    """The keys that each of some rows sees, ``[lo, hi)``."""
    lo, hi = workload.mask.key_range(torch.tensor(rows), torch.tensor(len_q), torch.tensor(len_kv))
    return list(zip(lo.clamp(0, len_kv).tolist(), hi.clamp(0, len_kv).tolist(), strict=True))


def filled(rows: Iterable[int], tile: int) -> float:
    """The share of tiles that rows fill: what is past a sequence's end is neither read nor written."""
    lengths = list(rows)
    return sum(lengths) / (sum(-(-n // tile) for n in lengths) * tile)


# Of each tile of rows: blocks of keys, the share of them that comes from device memory, and ``ForwardItem.seen``.
_Tiles = list[tuple[int, float, tuple[tuple[int, int], ...] | None]]


def forward_items(workload: Workload, lengths: Lengths, tile: Tile) -> list[ForwardItem]:
    """The items of one head, in order."""
    kv_fill, q_fill = filled(lengths.kv, tile.keys), filled(lengths.q, tile.rows)
    q_miss = 0.0 if workload.kind == "broadcast_q" else q_fill
    items: list[ForwardItem] = []
    for len_q, len_kv in lengths.longest_first("kv"):
        firsts = range(0, len_q, tile.block_q)
        stay = _keys_stay(len(items), len(firsts), len_kv, tile)
        if workload.mask == Full():
            loads = max(stay.count(False), 1)
            tiles: _Tiles = [(max(-(-len_kv // tile.keys), 1), kv_fill / loads, None)] * len(firsts)
        else:
            tiles = _seen_blocks(workload, len_q, len_kv, tile)
        for first, (blocks, miss, seen), stays in zip(firsts, tiles, stay, strict=True):
            groups = min(-(-(len_q - first) // tile.rows), tile.groups)
            items.append(ForwardItem(blocks, groups, miss, q_miss, q_fill, stays, seen))
    return items


def _keys_stay(first: int, tiles: int, len_kv: int, tile: Tile) -> list[bool]:
    """For each tile of a sequence, whose first is entry ``first`` of the table: whether the next one takes its keys."""
    fits = len_kv <= tile.fitting
    return [fits and (first + n + 1) % tile.run != 0 and n + 1 < tiles for n in range(tiles)]


def _seen_blocks(workload: Workload, len_q: int, len_kv: int, tile: Tile) -> _Tiles:
    """For each tile of rows: blocks, the share of them that no tile before saw, and ``ForwardItem.seen``.

    ``_jit.forward_items`` and ``tlx_hopper.forward`` have the same arithmetic for the kernels.
    """
    firsts = range(0, len_q, tile.rows)
    lasts = [min(first + tile.rows, len_q) - 1 for first in firsts]
    rows = list(zip(_keys_of(workload, firsts, len_q, len_kv), _keys_of(workload, lasts, len_q, len_kv), strict=True))
    found: _Tiles = []
    for groups in (rows[i : i + tile.groups] for i in range(0, len(rows), tile.groups)):
        low, high = groups[0][0][0], groups[-1][1][1]
        blocks = max(-(-(high - low) // tile.keys), 1)
        seen = []
        for (_, hi_first), (lo_last, hi) in groups:
            end = min(max(-(-(hi - low) // tile.keys), 1), blocks) if tile.block_q > tile.keys else blocks
            whole_end = min(max((hi_first - low) // tile.keys, 0), end - 1)
            whole_begin = min(-(-(lo_last - low) // tile.keys), whole_end)
            seen.append((end, end - 1 - (whole_end - whole_begin)))
        found.append((blocks, min(tile.block_q / (blocks * tile.keys), 1.0), tuple(seen)))
    return found


def keys_items(workload: Workload, lengths: Lengths, rows: int = ROWS, groups: bool = False) -> list[KeysItem]:
    """The items of one head where keys stay, in order; ``rows`` of a tile of queries.

    With ``groups`` the items say which tiles see keys of each group, for kernels that leave the others out.
    """
    shared = workload.kind == "broadcast_q"
    kv_fill, q_fill = filled(lengths.kv, Keys.KEYS), filled(lengths.q, rows)
    items = []
    for len_q, len_kv in lengths.longest_first("kv" if shared else "q"):
        tiles = _query_tiles(workload, range(0, len_kv, Keys.KEYS), len_q, len_kv, rows)
        # Every tile of queries comes from memory once, and from the cache for the other tiles of keys. Its sum is read
        # and written once.
        miss = min(-(-len_q // rows) / sum(tiles), 1.0) * q_fill
        q_miss, sum_miss = (0.0, 0.0) if shared else (miss, 2 * miss)
        for first, n in zip(range(0, len_kv, Keys.KEYS), tiles, strict=True):
            seen = _seen_by_groups(workload, first, len_q, len_kv, rows) if groups else None
            items.append(KeysItem(n, q_miss, miss, sum_miss, kv_fill, seen))
    return items


def _seen_by_groups(
    workload: Workload, first: int, len_q: int, len_kv: int, rows: int
) -> tuple[tuple[int, int], ...] | None:
    """``KeysItem.seen`` of the tile of keys that begins with ``first``."""
    half = Keys.KEYS // 2
    if workload.mask == Full():
        return None if first + half < len_kv else ((0, sys.maxsize), (0, 0))
    firsts = [first, min(first + half, len_kv - 1)]
    lasts = [min(low + half, len_kv) - 1 for low in firsts]
    los = [lo for lo, _ in _keys_of(workload, firsts, len_kv, len_q)]
    ends = [end for _, end in _keys_of(workload, lasts, len_kv, len_q)]
    if first + half >= len_kv:
        ends[1] = 0
    begin = los[0] // rows
    return tuple((lo // rows - begin, -(-end // rows) - begin) for lo, end in zip(los, ends, strict=True))


def queries_items(workload: Workload, lengths: Lengths) -> list[QueriesItem]:
    """The items of one head where queries stay, 64 for each of two groups, in order."""
    tile = Tile(ROWS, ROWS, 2)
    items = forward_items(workload, lengths, tile)
    seen: list[tuple[tuple[int, int], ...] | None] = [None] * len(items)
    if workload.mask != Full():
        seen = [
            _keys_seen_by_groups(workload, first, len_q, len_kv)
            for len_q, len_kv in lengths.longest_first("kv")
            for first in range(0, len_q, tile.block_q)
        ]
    return [
        QueriesItem(item.blocks, item.groups, item.kv_miss, item.q_miss, by_groups)
        for item, by_groups in zip(items, seen, strict=True)
    ]


def _keys_seen_by_groups(workload: Workload, first: int, len_q: int, len_kv: int) -> tuple[tuple[int, int], ...]:
    """``QueriesItem.seen`` of the tile of queries that begins with ``first``."""
    firsts = [first, min(first + ROWS, len_q - 1)]
    los = [lo for lo, _ in _keys_of(workload, firsts, len_q, len_kv)]
    ends = [end for _, end in _keys_of(workload, [min(low + ROWS, len_q) - 1 for low in firsts], len_q, len_kv)]
    return tuple(((lo - los[0]) // ROWS, -(-(end - los[0]) // ROWS)) for lo, end in zip(los, ends, strict=True))


def _query_tiles(workload: Workload, firsts: range, len_q: int, len_kv: int, rows: int) -> list[int]:
    """Tiles of queries that see each tile of keys: of a symmetric window, rows are to keys as keys are to rows."""
    if workload.mask == Full():
        return [max(-(-len_q // rows), 1)] * len(firsts)
    lasts = [min(first + Keys.KEYS, len_kv) - 1 for first in firsts]
    begins, ends = (_keys_of(workload, keys, len_kv, len_q) for keys in (firsts, lasts))
    return [max(-(-(end - lo // rows * rows) // rows), 1) for (lo, _), (_, end) in zip(begins, ends, strict=True)]


def chunks(lengths: Lengths) -> list[tuple[int, ...]]:
    """The chunks of the table of 64 keys, as the runs that each is made of."""
    entries = [i for i, (_, kv) in enumerate(lengths.longest_first("kv")) for _ in range(-(-kv // ROWS))]
    parts = [entries[i : i + _CHUNK_TILES] for i in range(0, len(entries), _CHUNK_TILES)]
    return [tuple(len(list(run)) for _, run in groupby(part)) for part in parts]


# --- Phases ---


def predict_forward(machine: Machine, workload: Workload, lengths: Lengths) -> Prediction:
    """The forward kernel; with more runs than CTAs, the counter's zero is a launch of its own."""
    rows_q, rows_kv, batch = sum(lengths.q), sum(lengths.kv), len(lengths.kv)
    few_keys = has_few_keys(workload.head_dim, workload.mask, rows_kv, batch)
    short = are_short(workload.head_dim, rows_kv, batch)
    config = forward_config(workload.head_dim, workload.num_shared_queries, workload.mask, short)
    entries = max_tiles(rows_q, batch, config.block_q) * workload.num_heads
    run = forward_run(workload.kind, workload.head_dim, few_keys, rows_q, batch, entries, machine.processors)
    tile = Tile(config.block_kv, ROWS, config.groups, run, config.keys_in_flight)
    items = forward_items(workload, lengths, tile)
    workers = machine.processors * config.ctas_per_processor
    runs = [tuple(items[i : i + run]) for i in range(0, len(items), run)]
    times = {taken: _forward_time(machine, config, workload.activation, taken) for taken in set(runs)}
    return all_heads(machine, [times[taken] for taken in runs], workload.num_heads, workers, 0.0, counter=True)


@lru_cache(maxsize=4096)
def _forward_time(machine: Machine, config: ForwardConfig, act: str, run: tuple[ForwardItem, ...]) -> Steady:
    def build(sm: Processor, n: int) -> list[Forward]:
        return [Forward(sm, config, act, run * n, cta) for cta in range(config.ctas_per_processor)]

    return steady(machine, build, config.ctas_per_processor)


def predict_backward(machine: Machine, workload: Workload, lengths: Lengths) -> Prediction:
    """Preparation, main kernel, and what makes dQ of its sums."""
    shared = workload.num_shared_queries
    if shared is not None and shared <= 2 * ROWS:
        return _broadcast_q_backward(machine, workload, lengths, shared)
    kind = workload.activation if workload.mask == Full() else "masked"
    heads, processors = workload.num_heads, machine.processors
    rows_kv, batch = sum(lengths.kv), len(lengths.kv)
    sums = shared is not None or adds_up_dq(workload.head_dim, workload.mask, rows_kv, batch)
    items = keys_items(workload, lengths, groups=True)
    times = {item: _keys_time(machine, kind, sums, item) for item in set(items)}
    around = around_keys(machine, workload, lengths, sums)
    keys = all_heads(machine, [times[item] for item in items], heads, processors, around)
    if sums:
        return keys
    queries = queries_items(workload, lengths)
    others = {item: _queries_time(machine, kind, item) for item in set(queries)}
    return one_after_the_other(keys, all_heads(machine, [others[item] for item in queries], heads, processors, 0.0))


@lru_cache(maxsize=4096)
def _keys_time(machine: Machine, kind: str, sums: bool, item: KeysItem) -> Steady:
    return steady(machine, lambda sm, n: [Keys(sm, kind, [item] * n, sums)])


@lru_cache(maxsize=4096)
def _queries_time(machine: Machine, kind: str, item: QueriesItem) -> Steady:
    return steady(machine, lambda sm, n: [Queries(sm, kind, [item] * n)])


def around_keys(machine: Machine, workload: Workload, lengths: Lengths, sums: bool = True) -> float:
    """Milliseconds of what comes before and after the kernel where keys stay: zeros, preparation, rounded sums."""
    elements = sum(lengths.q) * workload.num_heads * DIM
    # Without a softmax there are counters to be zeroed.
    prepared = pass_ms(machine, elements * 2 * BYTES if workload.activation == "softmax" else 0)
    if workload.kind == "broadcast_q":
        # Zeros, and PyTorch's sum, product and copy, of a few megabytes.
        return prepared + 4 * machine.launch_us * 1e-3
    if not sums:
        return prepared
    return prepared + pass_ms(machine, elements * FLOAT) + pass_ms(machine, elements * (FLOAT + BYTES))


def _broadcast_q_backward(machine: Machine, workload: Workload, lengths: Lengths, shared: int) -> Prediction:
    rows = next(n for n in (32, 64, 128) if shared <= n)
    kv_fill = filled(lengths.kv, ROWS)
    parts = chunks(lengths)
    times = {n: _run_time(machine, rows, Run(n, kv_fill, shared / rows)) for runs in set(parts) for n in runs}
    # A chunk is as long as its runs together.
    chunk_times = [_joined([times[n] for n in runs]) for runs in parts]
    queries = len(lengths.kv) * shared * workload.num_heads * DIM
    around = pass_ms(machine, 2 * BYTES * queries) + machine.launch_us * 1e-3
    workers = machine.processors // workload.num_heads * workload.num_heads
    return all_heads(machine, chunk_times, workload.num_heads, workers, around)


def _joined(runs: Sequence[Steady]) -> Steady:
    cycles = sum(run.cycles for run in runs)
    return Steady(
        cycles, runs[0].first, sum(run.memory for run in runs), sum(run.l2 for run in runs),
        sum(run.flop for run in runs), sum(run.tensor_busy * run.cycles for run in runs) / cycles,
        sum(run.shared_busy * run.cycles for run in runs) / cycles,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _run_time(machine: Machine, rows: int, run: Run) -> Steady:
    def build(sm: Processor, n: int) -> list[Turns | Halves]:
        # Two at a time: a group's turn comes with even and with odd tiles.
        items = [run] * (2 * n)
        if rows == 128:
            return [Halves(sm, items)]
        return [Turns(sm, rows, 6 if rows == 32 else 4, 2 if rows == 32 else 3, items)]

    two = steady(machine, build)
    return replace(two, cycles=two.cycles / 2, memory=two.memory / 2, l2=two.l2 / 2, flop=two.flop / 2)
