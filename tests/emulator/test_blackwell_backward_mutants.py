"""Teeth: every standard fault in the Blackwell backward is reported, or is shown to be harmless."""

import functools
from collections.abc import Callable, Sequence

import pytest
import test_blackwell_backward as keys_stay
import test_blackwell_broadcast_q as queries_stay
from replay import Replay, capture

from jagged_attn.backends._jit.rings import open_slot, publish
from jagged_attn.backends.tlx_blackwell.backward import backward_kv
from jagged_attn.backends.tlx_blackwell.backward_pair import backward_pair
from jagged_attn.schedule.blackwell_backward import TWO_CTAS, BackwardConfig
from jagged_attn.testing.emulator import Schedule, hunt
from jagged_attn.testing.emulator.errors import Verdict
from jagged_attn.testing.emulator.faults import standard_mutants
from jagged_attn.testing.emulator.mutants import Mutant, Site, argument, drop

_KERNELS = (backward_kv, backward_pair)
_capture = functools.partial(capture, kernels=_KERNELS, references=("desc_dq", "desc_dk", "desc_dv"))


def _keys(
    config: BackwardConfig, dim: int = 64, deterministic: bool = False, lengths: tuple[int, ...] = (257, 5)
) -> Replay:  # fmt: skip
    case = keys_stay.Case(lengths, dim=dim, deterministic=deterministic)
    processors = 2 * config.ctas if deterministic else config.ctas
    found = _capture(
        lambda: keys_stay.run(case, Schedule("random", 0), None, processors, config), once=("desc_dk", "desc_dv")
    )  # fmt: skip
    if deterministic:
        found.tolerances = dict.fromkeys(found.references, 1e-12)
    return found


def _queries(config: BackwardConfig, dim: int = 64) -> Replay:
    case = queries_stay.problem(40, (257, 5, 130) if dim == 64 else (129,), tail=3, dim=dim)
    return _capture(lambda: case.run(config=config, ctas=1, outputs=()), once=("desc_dq", "desc_dk", "desc_dv"))


CASES: dict[str, Callable[[], Replay]] = {
    "keys stay, early": functools.partial(_keys, BackwardConfig(2, 2, 2, "first", "none")),
    "queries stay, early": functools.partial(_queries, BackwardConfig(1, 2, 2, "first", "none")),
    "queries stay": functools.partial(_queries, BackwardConfig(1, 1, 2, "last", "dk")),
    "keys stay": functools.partial(_keys, BackwardConfig(2, 1, 1, "middle", "dq"), 128),
    "queries stay, wide": functools.partial(_queries, BackwardConfig(1, 2, 2, "last", "none"), 128),
    "in order": functools.partial(_keys, BackwardConfig(2, 2, 2, "first", "none"), deterministic=True),
    "keys stay, pairs": functools.partial(_keys, TWO_CTAS, 128),
    "keys stay, short pairs": functools.partial(_keys, TWO_CTAS, 128, lengths=(9, 5, 3, 7, 1)),
}
_case = functools.cache(lambda name: CASES[name]())
_ONLY = {"_load": "keys", "reduce_dq": "keys", "_epilogue": "keys", "_leave": "keys", "_load_keys": "queries"}
_ONLY |= {"_send": "queries", "_send_keys": "queries", "_await_turn": "order", "_pass_turn": "order"}
_ONLY |= dict.fromkeys(
    ("_publish", "_take", "_load_pair", "_mma_pair", "_await_ds", "_relay", "backward_pair"), "pairs"
)
_ARRIVE = {"arrive": "barrier_arrive"}
_SENT = Site("gradients", "async_remote_shmem_store")
MUTANTS = [
    *(m for kernel in (backward_kv, publish, open_slot, backward_pair) for m in standard_mutants(kernel, _ARRIVE)),
    Mutant("dS not sent", _SENT, drop, frozenset({Verdict.DEADLOCK})),
    Mutant("dS sent to the wrong CTA", _SENT, argument(2, "1 - _"), frozenset({Verdict.VALUE})),
    Mutant("dS counted elsewhere", _SENT, argument(3, "ds_full[0]"), frozenset({Verdict.DEADLOCK, Verdict.BYTES})),
]

# Mutants that change nothing, with the reason.
_FENCE = "in the emulator an arrival in another CTA publishes all stores before it; PTX promises that for one CTA only"
EQUIVALENT = {
    "fence dropped | _publish: fence() #0": _FENCE,
    "arrival too early | _publish: barrier_arrive(item_full) #0": "only the other CTA's arrival needs the fence",
    "arrival too early | _publish: barrier_arrive(item_full) #1": "the two arrivals change places",
    "wait dropped | _mma_pair: barrier_wait(dv_empty) #0": (
        "dV leaves before the last dQ of its item, over which comes a dP that is issued before the next dV"
    ),
    "commit too early | _mma_pair: tcgen05_commit(dq_full) #0": "two commits of the same products change places",
    "named barrier dropped | _pass_turn: named_barrier_wait() #0": (
        "it is for the threads of a task, which in the emulator is one actor"
    ),
    "fence dropped | _await_turn: fence() #0": (
        "additions by TMA are no race in the emulator, and its bits are right as soon as the poll has ended"
    ),
}


def _survives(mutant: Mutant, seeds: Sequence[int]) -> list[str]:
    """What each case said; empty if one of them reports the mutant."""
    verdicts = []
    for name in CASES:
        if _ONLY.get(mutant.site.function, "stay") in name:
            result = hunt(_case(name), mutant, seeds)
            if result.reported:
                return []
            verdicts.append(f"{name}: {result.verdicts}")
    return verdicts


# Faults of several kinds and roles; the others are hunted in the sweep.
@pytest.mark.parametrize("mutant", MUTANTS[::49], ids=lambda m: m.name)
def test_some_mutants_are_found(mutant):
    assert bool(_survives(mutant, range(4))) == (mutant.name in EQUIVALENT)


@pytest.mark.slow
def test_every_mutant_is_found_or_harmless():
    """The score is printed with -s."""
    survivors = [mutant.name for mutant in MUTANTS if _survives(mutant, range(8))]
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} mutants reported; survivors:")
    print("\n".join(survivors))
    assert set(survivors) == set(EQUIVALENT)
