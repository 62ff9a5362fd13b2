"""The roles of our Hopper kernels: their operations, waits and arrivals, in the order of the sources.

Each class follows one kernel of ``backends/tlx_hopper`` and its table of barriers. The instructions of a phase
(``Work``) were counted in the compiled sm_90a loops of the shipped configurations (bf16, D = 128), so they are facts
about the kernels and not parameters. D = 128 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schedule.hopper import ForwardConfig
from .simulate import Barrier, HandOut, Processor, Role, Signal, StoringRole, Work

DIM, ROWS, BYTES, FLOAT = 128, 64, 2, 4


def _read(stored: Signal | None) -> Role:
    """Wait until a group's last store has read its source."""
    if stored is not None:
        yield stored


# --- Forward ---


@dataclass(frozen=True)
class ForwardItem:
    """A tile of queries against its keys.

    Attributes:
        blocks: of keys.
        groups: warp groups that have a row.
        kv_miss: share of the bytes of K and V that comes from device memory: other items load the same rows, and rows
            past the end of a sequence are not read.
        q_miss: likewise for Q.
        out_miss: likewise for the output.
        stay: whether K and V stay for the next item.
        seen: for each of these groups the blocks that it takes part in, and those of them after its first that need
            the mask; ``None``: all, and none.
    """

    blocks: int
    groups: int
    kv_miss: float = 1.0
    q_miss: float = 1.0
    out_miss: float = 1.0
    stay: bool = False
    seen: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class ForwardWork:
    """Instructions of a warp: row maxima; weights; sums and rounding; rescaling; the mask; an item's end."""

    maxima: Work
    weights: Work
    sums: Work
    rescale: Work
    mask: Work
    end: Work


_END = Work(fma=110, alu=60, other=250, mufu=2)
FORWARD_WORK = {
    ("softmax", 128): ForwardWork(
        Work(alu=68, other=28, shuffles=2), Work(fma=66, mufu=66), Work(fma=68, alu=32, other=10, shuffles=2),
        Work(fma=66), Work(alu=128), _END,
    ),
    ("softmax", 64): ForwardWork(
        Work(alu=36, other=28, shuffles=2), Work(fma=34, mufu=34), Work(fma=36, alu=16, other=10, shuffles=2),
        Work(fma=66), Work(alu=147), _END,
    ),
    ("fast_gelu", 128): ForwardWork(
        Work(other=24), Work(fma=256, mufu=64), Work(alu=64), Work(), Work(alu=128), Work(fma=64, alu=32, other=200),
    ),
    ("fast_gelu", 64): ForwardWork(
        Work(other=24), Work(fma=128, mufu=32), Work(alu=32), Work(), Work(alu=176), Work(fma=64, alu=32, other=200),
    ),
}  # fmt: skip


class Forward(HandOut):
    """``forward.forward``: one CTA."""

    SLOTS_ARE_SHARED = True

    def __init__(self, sm: Processor, config: ForwardConfig, act: str, items: Sequence[ForwardItem], cta: int) -> None:
        self.sm, self.c, self.items, self.cta = sm, config, items, cta
        self.work = FORWARD_WORK[act, config.block_kv]
        self.softmax = act == "softmax"
        groups = config.groups
        self.q_full, self.q_empty = ([sm.barrier() for _ in range(groups)] for _ in range(2))
        self.k_full, self.v_full = sm.barrier(), sm.barrier()
        self.k_empty, self.v_empty = sm.barrier(groups), sm.barrier(groups)
        self.item_full, self.item_empty = sm.barrier(), sm.barrier(groups)
        # Of each group's turn: the group before it arrives; they take no mbarrier, but a named barrier.
        self.turns = [sm.barrier() for _ in range(groups)]
        self.taken = [0] * groups
        self.passed = [0] * groups

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        if self.c.turns:
            self._pass_turn(self.c.groups - 1)
        roles = [self.load(), *(self.attend(g) for g in range(self.c.groups))]
        return [self.sm.clock.spawn(role) for role in roles]

    def load(self) -> Role:
        """Items, looked up one ahead, with two tiles of Q loaded then; K and V, unless they are present."""
        sm, tile = self.sm, self.c.block_kv * DIM * BYTES
        count = 0
        present = False
        ahead = self.c.q_stages > 1
        yield from self._take(0)
        if ahead:
            yield from self._bring_queries(0)
        for turn, item in enumerate(self.items):
            rounds = 1 if present else item.blocks
            for i in range(rounds):
                if not present:
                    yield self.k_empty.wait(count - self.c.k_stages)
                    yield from sm.load(tile, item.kv_miss, self.k_full, count)
                    if not ahead and i == 0:
                        yield from self._bring_queries(turn)
                    yield self.v_empty.wait(count - self.c.v_stages)
                    yield from sm.load(tile, item.kv_miss, self.v_full, count)
                    count += 1
                if i == min(rounds, self.c.k_stages, self.c.v_stages) - 1:
                    yield from self._take(turn + 1)
                    if ahead:
                        yield from self._bring_queries(turn + 1)
            present = item.stay

    def _bring_queries(self, turn: int) -> Role:
        for g in range(self.c.groups if turn < len(self.items) else 0):
            yield self.q_empty[g].wait(turn - self.c.q_stages)
            miss = self.items[turn].q_miss if g < self.items[turn].groups else 0.0
            yield from self.sm.load(ROWS * DIM * BYTES, miss, self.q_full[g], turn)

    def attend(self, g: int) -> Role:
        """A group's rows of each item."""
        count = 0
        yield from self._receive(0)
        for turn, item in enumerate(self.items):
            role = self._rows(g, turn, item, count) if g < item.groups else self._pass_by(g, turn, item, count)
            yield from role
            count += 0 if item.stay else item.blocks

    def _release(self, empty: Barrier, count: int, item: ForwardItem) -> None:
        if not item.stay:
            empty.arrive(count)

    def _rows(self, g: int, turn: int, item: ForwardItem, count: int) -> Role:
        sm, work = self.sm, self.work
        output: Signal | None = None
        own, masked = item.seen[g] if item.seen is not None else (item.blocks, 0)
        first, last = count + item.blocks - own, count + item.blocks - 1
        apart = item.seen is not None and self.c.block_q > self.c.block_kv
        if apart:
            self._give_queries_back(g, turn)
        yield from self._skip(g, item, range(count, first))
        yield self.k_full.wait(first)
        yield self.q_full[g].wait(turn)
        yield from self._take_turn(g)
        scores = self._scores(g)
        self._pass_turn(g)
        yield scores
        self._release(self.k_empty, first, item)
        # Only a mask cuts the last block of element-wise activations.
        if self.softmax or item.seen is not None:
            yield from sm.compute(work.mask)
        yield from self._weigh()
        if not apart:
            self._give_queries_back(g, turn)
        for i in range(first + 1, last + 1):
            yield self.k_full.wait(i)
            yield from self._take_turn(g)
            scores = self._scores(g)
            yield self.v_full.wait(i - 1)
            output = self._output(g)
            self._pass_turn(g)
            yield scores
            self._release(self.k_empty, i, item)
            if i - first <= masked:
                yield from sm.compute(work.mask)
            yield from self._weigh()
            yield output
            self._release(self.v_empty, i - 1, item)
            yield from sm.compute(work.rescale)
        if self.c.q_stages == 1:
            self.q_empty[g].arrive(turn)
        yield self.v_full.wait(last)
        output = self._output(g)
        yield from self._receive(turn + 1)
        yield output
        self._release(self.v_empty, last, item)
        yield from sm.compute(work.end)
        yield from sm.touch(ROWS * DIM * BYTES)
        yield sm.fence()
        yield sm.meet()
        sm.store(ROWS * DIM * BYTES, item.out_miss)

    def _give_queries_back(self, g: int, turn: int) -> None:
        """Those of the item before, whose output has left through their tile by now."""
        if self.c.q_stages > 1 and turn > 0:
            self.q_empty[g].arrive(turn - 1)

    def _skip(self, g: int, item: ForwardItem, blocks: range) -> Role:
        for i in blocks:
            yield self.k_full.wait(i)
            yield from self._take_turn(g)
            self._pass_turn(g)
            self._release(self.k_empty, i, item)
            yield self.v_full.wait(i)
            self._release(self.v_empty, i, item)

    def _pass_by(self, g: int, turn: int, item: ForwardItem, count: int) -> Role:
        self._give_queries_back(g, turn)
        yield self.q_full[g].wait(turn)
        yield from self._skip(g, item, range(count, count + item.blocks))
        yield from self._receive(turn + 1)

    def _owner(self, g: int) -> int:
        return self.cta * 2 + g

    def _scores(self, g: int) -> Signal:
        return self.sm.product(self._owner(g), ROWS, self.c.block_kv, DIM)

    def _output(self, g: int) -> Signal:
        return self.sm.product(self._owner(g), ROWS, DIM, self.c.block_kv, registers=True)

    def _weigh(self) -> Role:
        for part in (self.work.maxima, self.work.weights, self.work.sums):
            yield from self.sm.compute(part)

    def _take_turn(self, g: int) -> Role:
        if self.c.turns:
            self.taken[g] += 1
            yield self.turns[g].wait(self.taken[g] - 1)

    def _pass_turn(self, g: int) -> None:
        if self.c.turns:
            following = (g + 1) % self.c.groups
            self.turns[following].arrive(self.passed[following])
            self.passed[following] += 1


# --- Backward of self and cross attention ---


@dataclass(frozen=True)
class KeysItem:
    """A tile of 128 keys, and the query tiles of 64 rows that see it.

    Attributes:
        tiles: of queries.
        q_miss: share of Q that comes from device memory.
        do_miss: likewise for dO.
        sum_miss: bytes of device memory for each byte that is added to the sum of dQ.
        kv_miss: likewise for K and V, dK and dV.
        seen: the first of the tiles that see keys of each group, and the end of these; ``None``: all do.
    """

    tiles: int
    q_miss: float = 1.0
    do_miss: float = 1.0
    sum_miss: float = 1.0
    kv_miss: float = 1.0
    seen: tuple[tuple[int, int], ...] | None = None

    def sees(self, group: int, trip: int) -> bool:
        """Whether a tile sees any of a group's keys."""
        return self.seen is None or self.seen[group][0] <= trip < self.seen[group][1]


@dataclass(frozen=True)
class KeysWork:
    """Instructions of a warp: P; dQ on its way out; unpacking P; dS; the rounding of dK or dV."""

    weights: Work
    out: Work
    unpack: Work
    gradient: Work
    rounding: Work
    parked: bool = False


_OUT, _ROUNDING = Work(alu=6, other=50), Work(fma=64, alu=32, other=60)
KEYS_WORK = {
    "softmax": KeysWork(
        Work(fma=32, alu=48, mufu=32, other=40), _OUT, Work(alu=40, other=10), Work(fma=64, alu=45, other=40),
        _ROUNDING,
    ),
    "masked": KeysWork(
        Work(fma=32, alu=250, mufu=64, other=60), _OUT, Work(alu=24, other=10), Work(fma=64, alu=75, other=60),
        _ROUNDING,
    ),
    "fast_gelu": KeysWork(
        Work(fma=350, alu=50, mufu=32, other=60), _OUT, Work(alu=16, other=10), Work(fma=66, alu=50, other=60),
        _ROUNDING, parked=True,
    ),
}  # fmt: skip


class Keys(HandOut):
    """``backward.backward_kv`` at D = 128: two tiles of Q, dO and dS in flight; with ``sums`` of dQ, or without."""

    SLOTS_ARE_SHARED = True
    KEYS = 128

    def __init__(self, sm: Processor, act: str, items: Sequence[KeysItem], sums: bool = True) -> None:
        self.sm, self.items, self.work, self.sums = sm, items, KEYS_WORK[act], sums
        self.stages = 2 if sums or self.work.parked else 3
        # Tiles of queries come with lse or delta.
        self.parts = (DIM * BYTES, FLOAT) if act != "fast_gelu" else (DIM * BYTES,)
        self.q_full, self.do_full = (sm.barrier(len(self.parts)) for _ in range(2))
        self.k_full, self.v_full = sm.barrier(), sm.barrier()
        self.tile_empty, self.k_empty, self.v_empty = sm.barrier(2), sm.barrier(2), sm.barrier(2)
        self.ds_full, self.ds_empty = sm.barrier(2), sm.barrier(2)
        self.item_full, self.item_empty = sm.barrier(), sm.barrier(2)

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        return [self.sm.clock.spawn(role) for role in (self.load(), self.gradients(0), self.gradients(1))]

    def load(self) -> Role:
        """Items, looked up one ahead; Q and dO of each tile, K and V of each item."""
        sm, parts = self.sm, self.parts
        count = 0
        yield from self._take(0)
        for turn, item in enumerate(self.items):
            for trip in range(item.tiles):
                yield self.tile_empty.wait(count - self.stages)
                for width in parts:
                    yield from sm.load(ROWS * width, item.q_miss, self.q_full, count)
                if trip == 0:
                    yield self.k_empty.wait(turn - 2)
                    yield from sm.load(self.KEYS * DIM * BYTES, item.kv_miss, self.k_full, turn)
                for width in parts:
                    yield from sm.load(ROWS * width, item.do_miss, self.do_full, count)
                if trip == 0:
                    yield self.v_empty.wait(turn - 1)
                    yield from sm.load(self.KEYS * DIM * BYTES, item.kv_miss, self.v_full, turn)
                if trip == min(item.tiles - 1, 1):
                    yield from self._take(turn + 1)
                count += 1

    def gradients(self, g: int) -> Role:
        """64 of the keys: their dK and dV, and half of the columns of the dQ of all."""
        count = 0
        # The last store of this group, whose source must have been read before the next.
        stored: Signal | None = None
        yield from self._read_item(0)
        for turn, item in enumerate(self.items):
            yield self.k_full.wait(turn)
            for trip in range(item.tiles):
                tile = self._tile if item.sees(g, trip) else self._pass_by
                sent = yield from tile(g, count + trip, trip, turn, item, stored)
                stored = sent or stored
            if not self.sums:
                self.k_empty.arrive(turn)
            count += item.tiles
            stored = yield from self._end(turn, item, stored)
        if self.sums:
            yield from self._dq(g, count, stored)
            yield from self._send(self.items[-1])

    def _tile(self, g: int, count: int, trip: int, turn: int, item: KeysItem, stored: Signal | None) -> StoringRole:
        """S and dQ of the tile before; P; dP; dV; dS; dK. Returns the store of dQ, if there was one."""
        sm, work = self.sm, self.work
        sent: Signal | None = None
        yield self.q_full.wait(count)
        s = self._half(g)
        if self.sums:
            if count:
                yield self.ds_full.wait(count - 1)
                yield sm.meet()
            dq = self._half(g)
        yield s
        yield from sm.touch_rows(8)
        yield from sm.compute(work.weights)
        yield self.do_full.wait(count)
        if work.parked:
            if self.sums:
                yield self.ds_empty.wait(count - 2)
            yield from sm.touch(ROWS * ROWS * BYTES)
        yield self.v_full.wait(turn)
        dp = self._half(g)
        if self.sums:
            yield from _read(stored)
            yield sm.meet()
            yield dq
            if count:
                sent = yield from self._dq_made(count, trip, turn, item)
        if self.sums or work.parked:
            yield from sm.compute(work.unpack)
        dv = self._full(g)
        yield dp
        if trip == item.tiles - 1:
            self.v_empty.arrive(turn)
        yield from sm.touch_rows(8)
        if work.parked:
            yield sm.meet()
            yield from sm.touch(ROWS * ROWS * BYTES)
        yield from sm.compute(work.gradient)
        if self.sums:
            if not work.parked:
                yield self.ds_empty.wait(count - 2)
            yield from self._hand_over_ds(count)
        dk = self._full(g)
        yield dv
        yield dk
        self.tile_empty.arrive(count)
        return sent

    def _hand_over_ds(self, count: int) -> Role:
        yield from self.sm.touch(ROWS * ROWS * BYTES)
        yield self.sm.fence()
        self.ds_full.arrive(count)

    def _pass_by(self, g: int, count: int, trip: int, turn: int, item: KeysItem, stored: Signal | None) -> StoringRole:
        """A tile that sees none of the group's keys: dQ of the tile before, and a dS of zeros."""
        sent: Signal | None = None
        yield self.q_full.wait(count)
        yield self.do_full.wait(count)
        yield self.v_full.wait(turn)
        if trip == item.tiles - 1:
            self.v_empty.arrive(turn)
        if self.sums:
            if count:
                yield from self._dq(g, count, stored)
                sent = yield from self._dq_made(count, trip, turn, item)
            yield self.ds_empty.wait(count - 2)
            yield from self._hand_over_ds(count)
        self.tile_empty.arrive(count)
        return sent

    def _dq(self, g: int, count: int, stored: Signal | None) -> Role:
        """The dQ of the tile before by itself."""
        yield self.ds_full.wait(count - 1)
        yield self.sm.meet()
        dq = self._half(g)
        yield from _read(stored)
        yield self.sm.meet()
        yield dq

    def _dq_made(self, count: int, trip: int, turn: int, item: KeysItem) -> StoringRole:
        """What is free with the dQ of the tile before, K too if that was an item's last; and the dQ's way out."""
        self.ds_empty.arrive(count - 1)
        if trip == 0:
            self.k_empty.arrive(turn - 1)
        return (yield from self._send(item))

    def _half(self, g: int) -> Signal:
        """S, dP: 64 keys by 64 queries over D; dQ: 64 queries by D / 2 over all keys. Both from shared memory."""
        return self.sm.product(g, ROWS, ROWS, DIM)

    def _full(self, g: int) -> Signal:
        """DV, dK: 64 keys by D over 64 queries, the left operand in registers."""
        return self.sm.product(g, ROWS, DIM, ROWS, registers=True)

    def _send(self, item: KeysItem) -> StoringRole:
        sm, size = self.sm, ROWS * DIM // 2 * FLOAT
        yield from sm.compute(self.work.out)
        yield from sm.touch(size)
        yield sm.fence()
        yield sm.meet()
        return sm.store(size, item.sum_miss)

    def _end(self, turn: int, item: KeysItem, stored: Signal | None) -> StoringRole:
        """DV and dK, through the buffer of dQ, and the hand-over to the next item."""
        self.item_empty.arrive(turn)
        yield from self._read_item(turn + 1)
        stored = yield from self._store(item, stored)
        return (yield from self._store(item, stored))

    def _store(self, item: KeysItem, stored: Signal | None) -> StoringRole:
        """DV or dK."""
        sm, size = self.sm, ROWS * DIM * BYTES
        yield from _read(stored)
        yield from sm.compute(self.work.rounding)
        yield from sm.touch(size)
        yield sm.fence()
        yield sm.meet()
        return sm.store(size, item.kv_miss)


@dataclass(frozen=True)
class QueriesItem:
    """Two groups' tiles of 64 queries, and the tiles of 64 keys that they see.

    Attributes:
        tiles: of keys.
        groups: warp groups that have a row.
        kv_miss: share of K and V that comes from device memory.
        q_miss: likewise for Q and dO, and for dQ on its way there.
        seen: the first of the tiles that each group sees, and the end of these; ``None``: all.
    """

    tiles: int
    groups: int = 2
    kv_miss: float = 1.0
    q_miss: float = 1.0
    seen: tuple[tuple[int, int], ...] | None = None

    def sees(self, group: int, trip: int) -> bool:
        """Whether a group sees any of a tile's keys."""
        return group < self.groups and (self.seen is None or self.seen[group][0] <= trip < self.seen[group][1])


# Instructions of a warp for the factor of dP.
QUERIES_WEIGHTS = {
    "softmax": Work(fma=32, alu=32, mufu=32, other=70),
    "masked": Work(fma=32, alu=180, mufu=32, other=90),
    "fast_gelu": Work(fma=352, mufu=32, other=70),
}


class Queries(HandOut):
    """``backward_queries.backward_q`` at D = 128: the queries of two items, three tiles of K and V in flight."""

    SLOTS_ARE_SHARED = True
    STAGES = 3
    GRADIENT = Work(fma=64, alu=18, other=60)

    def __init__(self, sm: Processor, act: str, items: Sequence[QueriesItem]) -> None:
        self.sm, self.items, self.weights = sm, items, QUERIES_WEIGHTS[act]
        # Q and dO come with lse and delta.
        self.parts = (DIM * BYTES,) * 2 + ((FLOAT,) * 2 if act != "fast_gelu" else ())
        self.q_full = [sm.barrier(len(self.parts)) for _ in range(2)]
        self.q_empty = [sm.barrier() for _ in range(2)]
        self.k_full, self.v_full, self.keys_empty = sm.barrier(), sm.barrier(), sm.barrier(2)
        self.item_full, self.item_empty = sm.barrier(), sm.barrier(2)

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        return [self.sm.clock.spawn(role) for role in (self.load(), self.groups(0), self.groups(1))]

    def load(self) -> Role:
        """Items, looked up one ahead and their queries loaded then; K and V of each tile."""
        count = 0
        yield from self._take(0)
        yield from self._bring_queries(0)
        for turn, item in enumerate(self.items):
            for trip in range(item.tiles):
                yield self.keys_empty.wait(count - self.STAGES)
                for full in (self.k_full, self.v_full):
                    yield from self.sm.load(ROWS * DIM * BYTES, item.kv_miss, full, count)
                count += 1
                if trip == min(item.tiles, self.STAGES) - 1:
                    yield from self._take(turn + 1)
                    yield from self._bring_queries(turn + 1)

    def _bring_queries(self, turn: int) -> Role:
        for g in range(2 if turn < len(self.items) else 0):
            item = self.items[turn]
            yield self.q_empty[g].wait(turn - 2)
            for width in self.parts:
                yield from self.sm.load(ROWS * width, item.q_miss if g < item.groups else 0.0, self.q_full[g], turn)

    def groups(self, g: int) -> Role:
        """64 of the queries: their dQ."""
        sm = self.sm
        count = 0
        stored: Signal | None = None
        yield from self._receive(0)
        for turn, item in enumerate(self.items):
            yield self.q_full[g].wait(turn)
            for trip in range(item.tiles):
                yield from self._tile(g, count + trip, turn if trip == 0 else 0, item.sees(g, trip), stored)
            count += item.tiles
            if g < item.groups:
                yield from sm.compute(_ROUNDING)
                yield from sm.touch(ROWS * DIM * BYTES)
                yield sm.fence()
                yield sm.meet()
                stored = sm.store(ROWS * DIM * BYTES, item.q_miss)
            yield from self._receive(turn + 1)

    def _tile(self, g: int, count: int, turn: int, sees: bool, stored: Signal | None) -> Role:
        """S, dP and dQ, or nothing; ``turn`` is that of an item's first tile: under it the last item's queries go."""
        sm = self.sm
        yield self.k_full.wait(count)
        s = sm.product(g, ROWS, ROWS, DIM) if sees else None
        yield self.v_full.wait(count)
        dp = sm.product(g, ROWS, ROWS, DIM) if sees else None
        if turn > 0:
            yield from _read(stored)
            yield sm.meet()
            self.q_empty[g].arrive(turn - 1)
        if s is not None and dp is not None:
            yield s
            yield from sm.compute(self.weights)
            yield dp
            yield from sm.compute(self.GRADIENT)
            yield sm.product(g, ROWS, DIM, ROWS, registers=True)
        self.keys_empty.arrive(count)


# --- Backward of broadcast-Q ---


@dataclass(frozen=True)
class Run:
    """Key tiles of 64 rows of one sequence, one after the other: one dO.

    Attributes:
        tiles: of keys.
        kv_miss: share of the bytes of K, V, dK and dV that device memory moves.
        do_miss: likewise for dO.
    """

    tiles: int
    kv_miss: float = 1.0
    do_miss: float = 1.0


# Instructions of a warp: P; dS; the rounding of dV or dK.
TURNS_WORK = {
    64: (Work(fma=32, alu=32, mufu=32, other=60), Work(fma=64, alu=16, other=40), Work(alu=32, other=30)),
    32: (Work(fma=16, alu=16, mufu=16, other=50), Work(fma=32, alu=8, other=30), Work(alu=32, other=30)),
}


class Turns:
    """``backward_broadcast_q.backward_64``: two groups take key tiles in turn; up to 32 or 64 queries."""

    def __init__(self, sm: Processor, rows: int, stages: int, do_stages: int, items: Sequence[Run]) -> None:
        self.sm, self.rows, self.stages, self.do_stages, self.items = sm, rows, stages, do_stages, items
        self.do_full, self.k_full, self.v_full = (sm.barrier() for _ in range(3))
        self.do_empty, self.kv_empty = sm.barrier(2), sm.barrier()

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        return [self.sm.clock.spawn(role) for role in (self.load(), self.groups(0), self.groups(1))]

    def load(self) -> Role:
        """Brings dO of each run, K and V of each tile."""
        sm, tile = self.sm, ROWS * DIM * BYTES
        count = 0
        for turn, item in enumerate(self.items):
            yield self.do_empty.wait(turn - self.do_stages)
            yield from sm.load(self.rows * DIM * BYTES, item.do_miss, self.do_full, turn)
            for n in range(item.tiles):
                if n + 1 == item.tiles:
                    yield sm.pause(3 * sm.machine.global_latency)
                yield self.kv_empty.wait(count - self.stages)
                for full in (self.k_full, self.v_full):
                    yield from sm.load(tile, item.kv_miss, full, count)
                count += 1

    def groups(self, g: int) -> Role:
        """Every second tile."""
        count, last = 0, -1
        stored: Signal | None = None
        for turn, item in enumerate(self.items):
            yield self.sm.pause(2 * self.sm.machine.global_latency)
            yield self.do_full.wait(turn)
            for n in range(count, count + item.tiles):
                if n % 2 == g:
                    stored = yield from self._tile(g, n, last, item, stored)
                    last = n
            self.do_empty.arrive(turn)
            count += item.tiles

    def _tile(self, g: int, n: int, last: int, item: Run, stored: Signal | None) -> StoringRole:
        sm, rows = self.sm, self.rows
        weights, gradient, rounding = TURNS_WORK[rows]
        yield self.k_full.wait(n)
        s = sm.product(g, ROWS, rows, DIM)
        yield self.v_full.wait(n)
        dp = sm.product(g, ROWS, rows, DIM)
        yield s
        yield from _read(stored)
        if last >= 0:
            self.kv_empty.arrive(last)
        yield from sm.compute(weights)
        yield dp
        yield from sm.compute(gradient)
        yield from self._put(ROWS * rows * BYTES)
        dv = sm.product(g, ROWS, DIM, rows, registers=True)
        # [queries, D], or transposed for 32 queries: as many products.
        dq = sm.product(g, rows, DIM, ROWS) if rows == ROWS else sm.product(g, DIM, rows, ROWS)
        yield dv
        yield from sm.compute(rounding)
        yield from self._put(ROWS * DIM * BYTES)
        sm.store(ROWS * DIM * BYTES, item.kv_miss)
        dk = sm.product(g, ROWS, DIM, rows, registers=True)
        yield dq
        yield dk
        yield from sm.compute(rounding)
        yield from self._put(ROWS * DIM * BYTES)
        return sm.store(ROWS * DIM * BYTES, item.kv_miss)

    def _put(self, size: float) -> Role:
        yield from self.sm.touch(size)
        yield self.sm.fence()
        yield self.sm.meet()


class Halves:
    """``backward_broadcast_q.backward_128``: each group has 64 of the queries; P and dS meet in shared memory."""

    STAGES, DO_STAGES = 2, 2
    WEIGHTS, GRADIENT = Work(fma=32, alu=32, mufu=32, other=60), Work(fma=64, alu=16, other=40)
    ROUNDING = Work(alu=48, other=80)

    def __init__(self, sm: Processor, items: Sequence[Run]) -> None:
        self.sm, self.items = sm, items
        self.do_full, self.k_full, self.v_full = sm.barrier(2), sm.barrier(), sm.barrier()
        self.do_empty, self.k_empty, self.v_empty = (sm.barrier(2) for _ in range(3))
        # Named barriers 12 and 11, of both groups.
        self.read, self.written = (sm.barrier(2) for _ in range(2))

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        return [self.sm.clock.spawn(role) for role in (self.load(), self.groups(0), self.groups(1))]

    def load(self) -> Role:
        """Brings dO of each run, V and K of each tile; the tile of no rows is left out."""
        sm, tile = self.sm, ROWS * DIM * BYTES
        count = 0
        for turn, item in enumerate(self.items):
            yield self.do_empty.wait(turn - self.DO_STAGES)
            for _ in range(2):
                yield from sm.load(tile, item.do_miss, self.do_full, turn)
            for n in range(item.tiles):
                if n + 1 == item.tiles:
                    yield sm.pause(3 * sm.machine.global_latency)
                for full, empty in ((self.v_full, self.v_empty), (self.k_full, self.k_empty)):
                    yield empty.wait(count - self.STAGES)
                    yield from sm.load(tile, item.kv_miss, full, count)
                count += 1

    def groups(self, g: int) -> Role:
        """S, dP and dQ of half of the queries, and dV or dK."""
        count = 0
        stored: Signal | None = None
        for turn, item in enumerate(self.items):
            yield self.sm.pause(2 * self.sm.machine.global_latency)
            for n in range(item.tiles):
                stored = yield from self._tile(g, count, turn if n == 0 else -1, item, stored)
                count += 1

    def _tile(self, g: int, count: int, turn: int, item: Run, stored: Signal | None) -> StoringRole:
        """``turn`` is that of the run that begins with this tile, or -1."""
        sm = self.sm
        yield self.k_full.wait(count)
        s = sm.product(g, ROWS, ROWS, DIM)
        if turn >= 0:
            yield self.do_full.wait(turn)
        yield self.v_full.wait(count)
        # dQ, dV or dK of the tile before.
        dq = sm.product(g, ROWS, DIM, ROWS)
        dp = sm.product(g, ROWS, ROWS, DIM)
        sm.product(g, ROWS, DIM, ROWS)
        x = sm.product(g, ROWS, DIM, ROWS)
        yield s
        yield from sm.compute(self.WEIGHTS)
        yield dq
        if count:
            self.k_empty.arrive(count - 1)
        yield dp
        self.v_empty.arrive(count)
        yield from sm.compute(self.GRADIENT)
        yield x
        yield from _read(stored)
        self.read.arrive(count)
        yield self.read.wait(count)
        if turn > 0:
            self.do_empty.arrive(turn - 1)
        yield from sm.compute(self.ROUNDING)
        yield from sm.touch(2 * ROWS * ROWS * BYTES + ROWS * DIM * BYTES)
        yield sm.fence()
        self.written.arrive(count)
        yield self.written.wait(count)
        return sm.store(ROWS * DIM * BYTES, item.kv_miss)
