"""Teeth: every standard fault in the Hopper kernels is reported, or is shown to be harmless."""

import functools
from collections.abc import Callable, Sequence

import pytest
import test_hopper_backward as keys_stay
import test_hopper_broadcast_q as queries_stay
import test_hopper_forward as forwards
from replay import Replay, capture

from jagged_attn.backends._jit.rings import pass_on, publish, receive_numbers
from jagged_attn.backends.tlx_hopper.backward import backward_kv
from jagged_attn.backends.tlx_hopper.backward_broadcast_q import backward_64, backward_128
from jagged_attn.backends.tlx_hopper.backward_queries import backward_q
from jagged_attn.backends.tlx_hopper.forward import forward
from jagged_attn.masks import Causal, SlidingWindow
from jagged_attn.testing.emulator import Schedule, hunt
from jagged_attn.testing.emulator.errors import Verdict
from jagged_attn.testing.emulator.faults import standard_mutants
from jagged_attn.testing.emulator.mutants import Mutant, Place, Site, argument, without

_SCHEDULE = Schedule("random", 0)
_OUT = ("desc_o", "lse")


def _forward(**call) -> Replay:
    with pytest.MonkeyPatch.context() as patch:
        return capture(
            lambda: forwards.check(_SCHEDULE, monkeypatch=patch, **call), (forward,), references=_OUT, once=_OUT
        )


def _backward(lengths, kernel=backward_kv, processors=2, **facts) -> Replay:
    case = keys_stay.Case(lengths, **facts)
    keys = ("desc_dk", "desc_dv")
    once = keys if kernel is backward_kv else ("desc_dq",)
    return capture(
        lambda: keys_stay._run(case, _SCHEDULE, processors=processors), (kernel,), references=once, once=once
    )


def _broadcast_q(num_queries, chunk=8) -> Replay:
    case = queries_stay.problem(num_queries, queries_stay.SHORT, tail=3)
    outputs = ("desc_dk", "desc_dv", "desc_parts")
    kernels = (backward_64, backward_128)
    return capture(lambda: case.run(ctas=1, chunk=chunk, outputs=()), kernels, references=outputs, once=outputs)


# By the kernel whose mutants they are for.
CASES: dict[str, dict[str, Callable[[], Replay]]] = {
    "forward": {
        "self": lambda: _forward(lengths_q=(257, 5, 64, 130), processors=2),
        "one CTA": lambda: _forward(lengths_q=(300, 1), heads=(1, 1), processors=1),
        "runs": lambda: _forward(
            kind="cross", lengths_q=(450, 300, 770), lengths_kv=(400, 129, 64), heads=(1, 1), run=4, processors=1
        ),
        "long runs": lambda: _forward(
            kind="cross",
            lengths_q=(1100, 1000, 700, 400),
            lengths_kv=(250, 129, 64, 256),
            heads=(1, 1),
            run=4,
            processors=2,
        ),
        "long": lambda: _forward(lengths_q=(1000, 900), heads=(1, 1), processors=1),
        "pairs in turns": lambda: _forward(lengths_q=(600, 500), dim=128, heads=(1, 1), short=False, processors=1),
        # Blocks of keys that groups pass by.
        "causal": lambda: _forward(lengths_q=(500, 130, 400), heads=(1, 1), mask=Causal(), processors=1),
        "window": lambda: _forward(lengths_q=(300, 130, 257), mask=SlidingWindow(150, 100), processors=1),
        # Fewer tiles of K than of V in flight.
        "broadcast-Q, head dim 128": lambda: _forward(
            kind="broadcast_q", num_queries=100, lengths_q=(700, 300), lengths_kv=(700, 300), dim=128, processors=1
        ),
        "broadcast-Q": lambda: _forward(
            kind="broadcast_q", num_queries=100, lengths_q=(300, 5, 600), lengths_kv=(300, 5, 600), processors=1
        ),
    },
    "backward": {
        "a role makes dQ": lambda: _backward((257, 5, 64, 130)),
        "the groups make dQ": lambda: _backward((257, 5, 64, 130), dim=128),
        "element-wise": lambda: _backward((200, 5), activation="silu", dim=128),
        "without sums": lambda: _backward((257, 5), deterministic=True),
        # Keys that no query sees, whose tile both groups pass by, and buffers that are used again after it.
        "masked": lambda: _backward(
            (200, 70, 70, 70), lengths_q=(5, 129, 4, 3), mask=Causal("top_left"), dim=128, processors=1
        ),
        # The second group passes by from the first tile to the last.
        "few keys": lambda: _backward((30, 20, 10, 5), processors=1),
        "few keys, the groups": lambda: _backward((30, 20, 10, 5), dim=128, processors=1),
        "window, without sums": lambda: _backward(
            (257, 5), mask=SlidingWindow(70, 5), deterministic=True, processors=1
        ),
    },
    "queries": {
        "many items": lambda: _backward((257, 5, 300, 1), kernel=backward_q, apart=True, processors=1),
        # Tiles of keys that one group passes by, or both, and a group without queries.
        "masked": lambda: _backward(
            (300, 70, 5),
            lengths_q=(200, 129, 3),
            kernel=backward_q,
            mask=SlidingWindow(20, 9, "top_left"),
            dim=128,
            apart=True,
            processors=1,
        ),
    },
    "broadcast-Q, 64": {
        "40": lambda: _broadcast_q(40),
        "20": lambda: _broadcast_q(20),
        "chunks of a tile": lambda: _broadcast_q(40, chunk=1),
    },
    "broadcast-Q, 128": {"100": lambda: _broadcast_q(100), "chunks of a tile": lambda: _broadcast_q(100, chunk=1)},
}
_case = functools.cache(lambda kernel, name: CASES[kernel][name]())
_KERNELS = {
    "forward": (forward, pass_on, receive_numbers), "backward": (backward_kv, pass_on, receive_numbers),
    "queries": (backward_q, pass_on, receive_numbers),
    "broadcast-Q, 64": (backward_64, publish), "broadcast-Q, 128": (backward_128, publish),
}  # fmt: skip
# Functions that stand for an operation: its faults go to where they are called.
_HELPERS = {"_release": "barrier_arrive"}


def _one_block_more(place: Place) -> None:
    for ring in range(2):
        argument(ring, "_ + 1")(place)


# What can be wrong with keys that stay, beyond the standard faults.
_STAY = frozenset({Verdict.RACE, Verdict.LAPPED, Verdict.DEADLOCK, Verdict.OVERFLOW, Verdict.EXIT, Verdict.VALUE})
STAYING = [
    Mutant("given back though they stay", Site("_release", "barrier_arrive", "empty", 0), without("pred"), _STAY),
    Mutant("never given back", Site("_release", "barrier_arrive", "empty", 0), argument("pred", "_ & False"), _STAY),
    Mutant("further in the rings though they stay", Site("_count_after", "where"), argument(1, "count"), _STAY),
    Mutant("loaded though they stay", Site("load", "_keys_stay"), argument(0, "(0, 0, 0, 0, 0, 0, 0, 0)"), _STAY),
    Mutant("stay though they do not fit", Site("_with_keys_that_stay", "minimum"), _one_block_more, _STAY),
    Mutant("a run of too few entries", Site("load", "_next_number"), argument(0, "_ + 1"), _STAY),
]
MUTANTS = [
    (name, mutant)
    for name, kernels in _KERNELS.items()
    for k in kernels
    for mutant in [*standard_mutants(k, _HELPERS), *(STAYING if k is forward else [])]
]

# Mutants that change nothing, with the reason.
_IMPLIED = "a group that has stored a tile's dS is done with the dQ of the tile before: see docs/performance-log.md"
_ONE_ACTOR = "it is for the threads of a task, which in the emulator is one actor"
# Needed if a tile's Q and dO land more than a tile apart, in which no schedule that was tried has an error.
_APART = "the other one's wait comes after the same two loads; 240 schedules"
_BROUGHT = (
    "it is filled again when the queries after it have been brought, for which those before it must have been freed, "
    "under the tiles of this item"
)
EQUIVALENT = {
    "forward | arrival too early | _skip: _release(k_empty) #0": "the block has not been read",
    "forward | named barrier dropped | _take_turn: named_barrier_wait() #0": "turns are for speed",
    "backward | wait dropped | _pass_by: barrier_wait(q_full) #0": _APART,
    "backward | wait dropped | _pass_by: barrier_wait(do_full) #0": _APART,
    "backward | arrival too early | _gradients: barrier_arrive(item_empty) #0": "the slot has been read by then",
    "backward | arrival too early | _pass_by: barrier_arrive(tile_empty) #0": "the tile has not been read",
    "backward | arrival too early | _dq_of: barrier_arrive(ds_empty) #0": _IMPLIED,
    "queries | arrival too early | _sum: barrier_arrive(item_empty) #0": _BROUGHT,
    "queries | wait dropped | pass_on: barrier_wait(item_empty) #0": _BROUGHT,
    "queries | arrival too early | _pass_by: barrier_arrive(keys_empty) #0": "the tile has not been read",
    "broadcast-Q, 64 | named barrier dropped | _take_turns: named_barrier_wait() #0": _ONE_ACTOR,
    "broadcast-Q, 64 | named barrier dropped | _store: named_barrier_wait(name) #0": _ONE_ACTOR,
    "broadcast-Q, 128 | named barrier dropped | _take_halves: named_barrier_wait() #4": _ONE_ACTOR,
    "broadcast-Q, 128 | wait dropped | publish: barrier_wait(item_empty) #0": "before it the dO of two runs after is "
    "brought, whose buffer is given back under the next run, when its chunk has been read",
}


def _survives(kernel: str, mutant: Mutant, seeds: Sequence[int]) -> bool:
    """Whether no case of the kernel reports the mutant."""
    return not any(hunt(_case(kernel, name), mutant, seeds).reported for name in CASES[kernel])


@pytest.mark.parametrize(("kernel", "mutant"), MUTANTS[::61], ids=lambda x: getattr(x, "name", x))
def test_some_mutants_are_found(kernel, mutant):
    assert _survives(kernel, mutant, range(4)) == (f"{kernel} | {mutant.name}" in EQUIVALENT)


@pytest.mark.slow
def test_every_mutant_is_found_or_harmless():
    """The score is printed with -s."""
    survivors = [f"{kernel} | {mutant.name}" for kernel, mutant in MUTANTS if _survives(kernel, mutant, range(8))]
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} mutants reported; survivors:")
    print("\n".join(survivors))
    assert set(survivors) == set(EQUIVALENT)
