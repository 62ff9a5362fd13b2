"""The roles of our Blackwell kernels for self and cross attention at D = 128: never run, so never compared.

The forward is by one CTA; the backward also by pairs, which ``JAGGED_ATTN_BLACKWELL_BACKWARD`` asks for.

As in ``hopper``, instructions were counted in the compiled sm_100a loops. Products are those of one thread, in one
queue; a left operand in tensor memory costs no shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..bench.workloads import Workload
from ..schedule.blackwell import ROWS, ForwardConfig, forward_config
from ..schedule.blackwell_backward import BackwardConfig, backward_config
from .hopper import BYTES, DIM, FLOAT, ForwardItem, KeysItem
from .machine import Machine
from .predict import (
    Lengths,
    Prediction,
    Steady,
    Tile,
    all_heads,
    around_keys,
    forward_items,
    keys_items,
    steady,
)
from .simulate import Barrier, HandOut, Processor, Role, Signal, StoringRole, Work

_CHUNK = 32
# Cycles from one CTA of a pair to the other: an assumption, between an L1 hit and the L2 cache.
HOP = 200.0


# --- Forward ---

# Instructions of a warp for a block of 64 keys, and of the correction of a block, an item's end.
WEIGHTS = {"softmax": Work(fma=162, alu=100, mufu=49, other=40), "fast_gelu": Work(fma=320, alu=32, mufu=64, other=40)}
CORRECTION, OUTPUT = Work(alu=4, other=30), Work(fma=64, alu=64, other=100)


class Forward(HandOut):
    """``tlx_blackwell.forward``: two streams of 128 query rows against the same blocks of keys."""

    def __init__(self, sm: Processor, config: ForwardConfig, act: str, items: Sequence[ForwardItem]) -> None:
        self.sm, self.c, self.items, self.act = sm, config, items, act
        self.softmax = act == "softmax"
        self.q_full, self.q_empty, self.k_full, self.k_empty, self.v_full, self.v_empty = (
            sm.barrier() for _ in range(6)
        )
        self.item_full, self.item_empty = sm.barrier(), sm.barrier(4)
        streams = [[sm.barrier() for _ in range(2)] for _ in range(8)]
        self.s_full, self.s_empty, self.p_full, self.p_empty, self.o_ready, self.o_full, self.a_full, self.a_empty = (
            streams
        )
        self.st_full, self.st_empty = sm.barrier(), sm.barrier()

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        roles = (self.load(), self.mma(), self.activate(0), self.activate(1), self.correct(), self.store())
        return [self.sm.clock.spawn(role) for role in roles]

    def load(self) -> Role:
        """Items, looked up one ahead; Q, K and V."""
        sm, tile = self.sm, self.c.block_kv * DIM * BYTES
        count = 0
        yield from self._take(0)
        for turn, item in enumerate(self.items):
            yield self.q_empty.wait(turn - 1)
            yield from sm.load(item.groups * ROWS * DIM * BYTES, item.q_miss, self.q_full, turn)
            for i in range(item.blocks):
                yield self.k_empty.wait(count - self.c.k_stages)
                yield from sm.load(tile, item.kv_miss, self.k_full, count)
                yield self.v_empty.wait(count - self.c.v_stages)
                yield from sm.load(tile, item.kv_miss, self.v_full, count)
                count += 1
                if i == min(item.blocks, self.c.k_stages, self.c.v_stages) - 1:
                    yield from self._take(turn + 1)

    def mma(self) -> Role:
        """The next scores of each stream before its output."""
        steps = [(turn, i) for turn, item in enumerate(self.items) for i in range(item.blocks)]
        yield from self._receive(0)
        for count in range(-1, len(steps)):
            following = count + 1
            if following < len(steps) and steps[following][1] == 0:
                turn = steps[following][0]
                if turn:
                    yield from self._receive(turn)
                yield self.q_full.wait(turn)
            for g in range(2):
                if following < len(steps):
                    yield from self._scores(g, following, *steps[following])
                if count >= 0:
                    yield from self._output(g, count, *steps[count])

    def _scores(self, g: int, count: int, turn: int, i: int) -> Role:
        item = self.items[turn]
        if g >= item.groups:
            return
        yield self.k_full.wait(count)
        yield self.s_empty[g].wait(self._use(g, turn, i) - 1)
        done = self.sm.product(0, ROWS, self.c.block_kv, DIM)
        use = self._use(g, turn, i)
        done.then(partial(self.s_full[g].arrive, use))
        if g + 1 == item.groups:
            done.then(partial(self.k_empty.arrive, count))
            if i + 1 == item.blocks:
                done.then(partial(self.q_empty.arrive, turn))

    def _output(self, g: int, count: int, turn: int, i: int) -> Role:
        item, use = self.items[turn], self._use(g, turn, i)
        if g >= item.groups:
            return
        yield self.v_full.wait(count)
        if self.softmax or i == 0:
            yield self.o_ready[g].wait((use if self.softmax else self._item(g, turn)) - 1)
        yield self.p_full[g].wait(use)
        done = self.sm.product(0, ROWS, DIM, self.c.block_kv, registers=True)
        done.then(partial(self.p_empty[g].arrive, use))
        if g + 1 == item.groups:
            done.then(partial(self.v_empty.arrive, count))
        if i + 1 == item.blocks:
            done.then(partial(self.o_full[g].arrive, self._item(g, turn)))

    def _use(self, g: int, turn: int, i: int) -> int:
        return sum(item.blocks for item in self.items[:turn] if g < item.groups) + i

    def _item(self, g: int, turn: int) -> int:
        return sum(1 for item in self.items[:turn] if g < item.groups)

    def activate(self, g: int) -> Role:
        """One stream's weights."""
        sm = self.sm
        for turn, item in enumerate(self.items):
            yield from self._receive(turn)
            for i in range(item.blocks if g < item.groups else 0):
                use = self._use(g, turn, i)
                yield self.s_full[g].wait(use)
                yield from sm.columns(self.c.block_kv)
                self.s_empty[g].arrive(use)
                if self.softmax and i:
                    yield self.a_empty[g].wait(self._passed(g, turn, i) - 1)
                    self.a_full[g].arrive(self._passed(g, turn, i))
                yield self.p_empty[g].wait(use - 1)
                yield from sm.compute(WEIGHTS[self.act])
                yield from sm.columns(self.c.block_kv // 2)
                self.p_full[g].arrive(use)

    def _passed(self, g: int, turn: int, i: int) -> int:
        return self._use(g, turn, i) - self._item(g, turn) - 1

    def correct(self) -> Role:
        """Lets the output go on, which is seldom rescaled; at an item's end, stages it."""
        sm = self.sm
        stored = 0
        for turn, item in enumerate(self.items):
            yield from self._receive(turn)
            for i in range(1, item.blocks if self.softmax else 0):
                for g in range(item.groups):
                    yield self.a_full[g].wait(self._passed(g, turn, i))
                    self.a_empty[g].arrive(self._passed(g, turn, i))
                    yield self.p_empty[g].wait(self._use(g, turn, i) - 1)
                    yield from sm.compute(CORRECTION)
                    self.o_ready[g].arrive(self._use(g, turn, i) - 1)
            for g in range(item.groups):
                yield self.o_full[g].wait(self._item(g, turn))
                yield self.st_empty.wait(stored - self.c.o_stages)
                yield from sm.columns(DIM)
                yield from sm.compute(OUTPUT)
                self.o_ready[g].arrive(self._use(g, turn, item.blocks) - 1 if self.softmax else self._item(g, turn))
                yield from sm.touch(ROWS * DIM * BYTES)
                yield sm.fence()
                self.st_full.arrive(stored)
                stored += 1

    def store(self) -> Role:
        """TMA stores of the staged tiles."""
        stored = 0
        for item in self.items:
            for _ in range(item.groups):
                yield self.st_full.wait(stored)
                yield self.sm.store(ROWS * DIM * BYTES, item.out_miss)
                self.st_empty.arrive(stored)
                stored += 1


# --- Backward where keys stay ---


@dataclass(frozen=True)
class GradientWork:
    """Instructions of a warp for its half of a tile: P, dS; and of what leaves tensor memory, 64 columns of it."""

    weights: Work
    gradient: Work
    loads: int


GRADIENTS = {
    "softmax": GradientWork(
        Work(fma=64, alu=64, mufu=128, other=40), Work(fma=64, alu=138, other=40), 16,
    ),
    "fast_gelu": GradientWork(
        Work(fma=400, alu=60, mufu=128, other=40), Work(fma=64, alu=100, other=40), 0,
    ),
}  # fmt: skip
ROUNDED = Work(fma=32, alu=64, other=80)


class Keys(HandOut):
    """``tlx_blackwell.backward_kv`` where keys stay: scores in the middle, dQ over dP."""

    # Chunks in which a tile's dQ leaves.
    DQ_CHUNKS = DIM // _CHUNK

    def __init__(self, sm: Processor, config: BackwardConfig, act: str, items: Sequence[KeysItem]) -> None:
        self.sm, self.c, self.items, self.work = sm, config, items, GRADIENTS[act]
        self.softmax = act == "softmax"
        self.q_full, self.q_empty, self.do_full, self.do_empty = (sm.barrier() for _ in range(4))
        self.k_full, self.k_empty, self.v_full, self.v_empty = (sm.barrier() for _ in range(4))
        self.s_full, self.dp_full, self.dq_full, self.dq_empty = (sm.barrier() for _ in range(4))
        self.p_full, self.ds_full = sm.barrier(2), sm.barrier(2)
        self.dv_full, self.dv_empty, self.dk_full, self.dk_empty = (sm.barrier() for _ in range(4))
        self.item_full, self.item_empty = sm.barrier(), sm.barrier(4)

    def start(self) -> list[Signal]:
        """Run the roles; signals of their ends."""
        roles = (self.load(), self.mma(), self.gradients(), self.gradients(), self.reduce())
        return [self.sm.clock.spawn(role) for role in roles]

    def load(self) -> Role:
        """Items, looked up one ahead; Q and dO of each tile, K and V of each item."""
        sm, tile = self.sm, ROWS * (DIM * BYTES + FLOAT)
        count = 0
        yield from self._take(0)
        for turn, item in enumerate(self.items):
            for trip in range(item.tiles):
                if trip == 0:
                    yield self.k_empty.wait(turn - self.c.kv_stages)
                    yield from sm.load(ROWS * DIM * BYTES, item.kv_miss, self.k_full, turn)
                yield self.q_empty.wait(count - self.c.q_stages)
                yield from sm.load(tile, item.q_miss, self.q_full, count)
                if trip == 0:
                    yield self.v_empty.wait(turn - self.c.kv_stages)
                    yield from sm.load(ROWS * DIM * BYTES, item.kv_miss, self.v_full, turn)
                yield self.do_empty.wait(count - self.c.do_stages)
                yield from sm.load(tile, item.do_miss, self.do_full, count)
                if trip == min(item.tiles - 1, 1):
                    yield from self._take(turn + 1)
                count += 1

    def mma(self) -> Role:
        """S and dP of a tile, and the other products of the tile before it."""
        count = 0
        for turn, item in enumerate(self.items):
            yield from self._receive(turn)
            for trip in range(item.tiles + 1):
                last, ends = count - 1, trip == item.tiles
                if trip:
                    yield from self._sum_of_values(last, turn, ends)
                if not ends:
                    yield self.k_full.wait(turn)
                    yield self.q_full.wait(count)
                    self._scored(self._product(), count, turn, trip + 1 == item.tiles)
                if trip:
                    yield from self._last_products(last, turn, ends)
                if not ends:
                    yield self.v_full.wait(turn)
                    yield self.do_full.wait(count)
                    yield self.dq_empty.wait(count - 1)
                    self._weighed(self._product(), count, turn, trip + 1 == item.tiles)
                    count += 1

    def _sum_of_values(self, last: int, turn: int, ends: bool) -> Role:
        """DV; dO has been waited for, and is free after it."""
        yield self.p_full.wait(last)
        yield self.dv_empty.wait(turn - 1)
        dv = self._product(registers=True)
        dv.then(partial(self.do_empty.arrive, last))
        if ends:
            dv.then(partial(self.dv_full.arrive, turn))

    def _scored(self, s: Signal, count: int, turn: int, is_last: bool) -> None:
        """What comes after S of a tile, the item's last or not."""
        s.then(partial(self.s_full.arrive, count))

    def _weighed(self, dp: Signal, count: int, turn: int, is_last: bool) -> None:
        """What comes after dP."""
        dp.then(partial(self.dp_full.arrive, count))
        if is_last:
            dp.then(partial(self.v_empty.arrive, turn))

    def _last_products(self, last: int, turn: int, ends: bool) -> Role:
        yield self.ds_full.wait(last)
        self._product().then(partial(self.dq_full.arrive, last))
        yield self.dk_empty.wait(turn - 1)
        dk = self._product()
        dk.then(partial(self.q_empty.arrive, last))
        if ends:
            dk.then(partial(self.k_empty.arrive, turn))
            dk.then(partial(self.dk_full.arrive, turn))

    def _product(self, registers: bool = False) -> Signal:
        """All five are 128 by 128 by 128."""
        return self.sm.product(0, ROWS, DIM, ROWS, registers)

    def gradients(self) -> Role:
        """P and dS of half of each tile's queries: 64 columns of 128 keys."""
        sm, half = self.sm, ROWS // 2
        count = 0
        for turn, item in enumerate(self.items):
            yield from self._receive(turn)
            for _ in range(item.tiles):
                yield self.s_full.wait(count)
                yield from sm.columns(half)
                yield from sm.touch_rows(self.work.loads)
                yield from sm.compute(self.work.weights)
                yield from sm.columns(half // 2)
                self._arrive(self.p_full, count)
                yield self.dp_full.wait(count)
                yield from sm.columns(half)
                yield from sm.touch_rows(self.work.loads)
                yield from sm.compute(self.work.gradient)
                yield from self._hand_over(half, count)
                count += 1

    def _hand_over(self, half: int, count: int) -> Role:
        """DS, to where the products take it."""
        yield from self.sm.touch(ROWS * half * BYTES)
        yield self.sm.fence()
        self.ds_full.arrive(count)

    def _arrive(self, barrier: Barrier, use: int) -> None:
        """An arrival of a group, or of what leaves."""
        barrier.arrive(use)

    def reduce(self) -> Role:
        """What leaves tensor memory: dQ of each tile, dV and dK of each item, 16 KiB at a time."""
        count = 0
        sent: list[Signal | None] = [None] * self.c.dq_stages
        for turn, item in enumerate(self.items):
            yield from self._receive(turn)
            for trip in range(item.tiles):
                if trip + 1 == item.tiles:
                    yield self.dv_full.wait(turn)
                    yield from self._send(DIM // (2 * _CHUNK), 2 * _CHUNK, item.kv_miss, sent)
                    self._arrive(self.dv_empty, turn)
                yield self.dq_full.wait(count)
                yield from self._send(self.DQ_CHUNKS, _CHUNK, item.sum_miss, sent)
                self._arrive(self.dq_empty, count)
                count += 1
            yield self.dk_full.wait(turn)
            yield from self._send(DIM // (2 * _CHUNK), 2 * _CHUNK, item.kv_miss, sent)
            self._arrive(self.dk_empty, turn)

    def _send(self, chunks: int, columns: int, miss: float, sent: list[Signal | None]) -> Role:
        for _ in range(chunks):
            sent.append((yield from self._chunk(columns, miss, sent.pop(0))))

    def _chunk(self, columns: int, miss: float, before: Signal | None) -> StoringRole:
        sm, size = self.sm, ROWS * _CHUNK * FLOAT
        yield from sm.columns(columns)
        if columns > _CHUNK:
            yield from sm.compute(ROUNDED)
        if before is not None:
            yield before
        yield from sm.touch(size)
        yield sm.fence()
        yield sm.meet()
        return sm.store(size, miss)


class Pairs(Keys):
    """``tlx_blackwell.backward_pair``, one CTA of a pair whose other does the same at the same time.

    What one does for the other takes ``hop`` cycles to get there and as many to come back, which nobody has measured.
    """

    DQ_CHUNKS = DIM // (2 * _CHUNK)  # each has half of a tile's dQ

    def __init__(
        self, sm: Processor, config: BackwardConfig, act: str, items: Sequence[KeysItem], hop: float = HOP
    ) -> None:
        super().__init__(sm, config, act, items)
        self.hop = hop
        self.qc_full, self.qc_empty, self.doc_full, self.doc_empty = (sm.barrier() for _ in range(4))
        self.kc_full, self.kc_empty = sm.barrier(), sm.barrier()
        self.ds_whole = sm.barrier(2)

    def load(self) -> Role:
        """Q and dO of each tile by halves of rows and of columns, K and V of each item, and K by columns."""
        sm, half, keys = self.sm, ROWS * DIM * BYTES // 2, ROWS * DIM * BYTES
        count = 0
        yield from self._take(0)
        for turn, item in enumerate(self.items):
            for trip in range(item.tiles):
                if trip == 0:
                    yield self.k_empty.wait(turn - 1)
                    yield from sm.load(keys, item.kv_miss, self.k_full, turn)
                yield self.q_empty.wait(count - 1)
                yield from sm.load(half + ROWS * FLOAT, item.q_miss, self.q_full, count)
                if trip == 0:
                    yield self.v_empty.wait(turn - 1)
                    yield from sm.load(keys, item.kv_miss, self.v_full, turn)
                yield self.do_empty.wait(count - 1)
                yield from sm.load(half + ROWS * FLOAT, item.do_miss, self.do_full, count)
                yield self.doc_empty.wait(count - 1)
                yield from sm.load(half, 0.0, self.doc_full, count)
                yield self.qc_empty.wait(count - 1)
                yield from sm.load(half, 0.0, self.qc_full, count)
                if trip == 0:
                    yield self.kc_empty.wait(turn - 1)
                    yield from sm.load(keys, 0.0, self.kc_full, turn)
                if trip == min(item.tiles - 1, 1):
                    yield from self._take(turn + 1)
                count += 1

    def _sum_of_values(self, last: int, turn: int, ends: bool) -> Role:
        """DV, from halves of dO by columns."""
        yield self.doc_full.wait(last)
        yield self.p_full.wait(last)
        yield self.dv_empty.wait(turn - 1)
        dv = self._product(registers=True)
        dv.then(partial(self.doc_empty.arrive, last))
        if ends:
            dv.then(partial(self.dv_full.arrive, turn))

    def _scored(self, s: Signal, count: int, turn: int, is_last: bool) -> None:
        super()._scored(s, count, turn, is_last)
        s.then(partial(self.q_empty.arrive, count))
        if is_last:
            s.then(partial(self.k_empty.arrive, turn))

    def _weighed(self, dp: Signal, count: int, turn: int, is_last: bool) -> None:
        dp.then(partial(self.dp_full.arrive, count))
        dp.then(partial(self.do_empty.arrive, count))
        if is_last:
            dp.then(partial(self.v_empty.arrive, turn))

    def _last_products(self, last: int, turn: int, ends: bool) -> Role:
        """DK before dQ, which waits for the dS of both."""
        yield self.qc_full.wait(last)
        yield self.ds_full.wait(last)
        yield self.dk_empty.wait(turn - 1)
        dk = self._product(registers=True)
        dk.then(partial(self.qc_empty.arrive, last))
        if ends:
            dk.then(partial(self.dk_full.arrive, turn))
        yield self.kc_full.wait(turn)
        yield self.ds_whole.wait(last)
        yield self.sm.fence()
        # Of 64 queries and all columns, over 256 keys: as many steps again, each reading 64 rows and 64 columns.
        dq = self._multiply(2 * ROWS, ROWS // 2, DIM // 2)
        dq.then(partial(self.dq_full.arrive, last))
        if ends:
            dq.then(partial(self.kc_empty.arrive, turn))

    def _product(self, registers: bool = False) -> Signal:
        """128 rows of each CTA's own, and half of what stands on the right."""
        return self._multiply(ROWS, 0 if registers else ROWS, DIM // 2)

    def _multiply(self, depth: int, rows: int, columns: int) -> Signal:
        """A CTA's share of a product of 128 by 128 by 128, in steps of 16 of ``depth``, and what a step reads."""
        sm, steps = self.sm, depth // 16
        flop = 2.0 * ROWS * DIM * ROWS / steps
        sm.products += 1
        sm.flop += flop * steps
        read = 2.0 * 16 * (rows + columns) / sm.machine.shared_bytes
        cycles = flop / (sm.machine.mma_flop * sm.machine.mma_efficiency)
        return sm.tensor.issue(0, cycles, read, steps)

    def _hand_over(self, half: int, count: int) -> Role:
        """DS to tensor memory, and to whom it belongs; as much comes as goes."""
        yield from self.sm.columns(half // 2)
        yield from self.sm.touch(ROWS * half * BYTES)
        self._arrive(self.ds_full, count)
        self._arrive(self.ds_whole, count)

    def _arrive(self, barrier: Barrier, use: int) -> None:
        """The other CTA's arrival: its work began with a signal from here, and its answer comes back."""
        self.sm.clock.at(self.sm.clock.now + 2 * self.hop, partial(barrier.arrive, use))


def predict_forward(machine: Machine, workload: Workload, lengths: Lengths) -> Prediction:
    """The forward of self or cross attention without a mask."""
    config = forward_config(DIM, None, workload.mask)
    items = forward_items(workload, lengths, Tile(config.block_kv, ROWS, 2))

    def time(item: ForwardItem) -> Steady:
        return steady(machine, lambda sm, n: [Forward(sm, config, workload.activation, [item] * n)])

    times = {item: time(item) for item in set(items)}
    return all_heads(
        machine, [times[item] for item in items], workload.num_heads, machine.processors, 0.0, counter=True
    )


def predict_backward(
    machine: Machine, workload: Workload, lengths: Lengths, hop: float = HOP
) -> Prediction:  # fmt: skip
    """The backward of self or cross attention without a mask; ``hop``: see ``Pairs``."""
    config = backward_config(DIM)
    items = keys_items(workload, lengths, ROWS)
    if config.two_ctas:
        items = _paired(workload, lengths, items)

    def kernel(sm: Processor, many: list[KeysItem]) -> Keys:
        if config.two_ctas:
            return Pairs(sm, config, workload.activation, many, hop)
        return Keys(sm, config, workload.activation, many)

    def time(item: KeysItem) -> Steady:
        one = steady(machine, lambda sm, n: [kernel(sm, [item] * n)])
        # An item of a pair is the work of two.
        return replace(one, memory=config.ctas * one.memory, l2=config.ctas * one.l2, flop=config.ctas * one.flop)

    times = {item: time(item) for item in set(items)}
    around = around_keys(machine, workload, lengths)
    workers = machine.processors // config.ctas
    return all_heads(machine, [times[item] for item in items], workload.num_heads, workers, around)


def _paired(workload: Workload, lengths: Lengths, items: Sequence[KeysItem]) -> list[KeysItem]:
    """One of each two neighbours of a sequence; without a mask they see the same queries.

    A tile of queries is asked for half as often; of the halves by rows, the others are in the cache by then.
    """
    pairs: list[KeysItem] = []
    at = 0
    for _, len_kv in lengths.longest_first("kv" if workload.kind == "broadcast_q" else "q"):
        tiles = -(-len_kv // ROWS)
        pairs += items[at : at + tiles : 2]
        at += tiles
    return [replace(x, q_miss=min(2 * x.q_miss, 1.0), do_miss=min(2 * x.do_miss, 1.0),
                    sum_miss=min(2 * x.sum_miss, 2.0)) for x in pairs]  # fmt: skip
