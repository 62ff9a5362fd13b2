"""The Blackwell forward kernel in the emulator, launched by the library's own launch code."""

import signal
from dataclasses import replace

import pytest
import torch

from jagged_attn import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.backends import reference
from jagged_attn.backends._jit import rings
from jagged_attn.backends.base import Arch, Geometry
from jagged_attn.backends.tlx_blackwell import capability, launch_forward
from jagged_attn.backends.tlx_blackwell.forward import forward as kernel
from jagged_attn.functional import _tables
from jagged_attn.schedule.blackwell import _PAIR, _SPLIT, _TWO_PAIR, _TWO_SPLIT, forward_config
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.emulator import EmulatorError, Verdict
from jagged_attn.testing.emulator.faults import standard_mutants
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import Schedule, standard_schedules

BLACKWELL = Arch("cuda", (10, 0))
# "mma" is the engine; the role that issues its products is the third task.
ROLES = ("load", "task2", "activate", "correct", "store")
# fbtriton ends a specialised kernel of a cluster with a barrier of the cluster.
RULES = replace(HOUSE_RULES, cluster_end=True)
LENGTHS = (0, 1, 63, 300, 64, 65, 127, 128, 129, 0)
OTHERS = (5, 0, 64, 129, 300, 1, 128, 0, 65, 2)


def _offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def check(schedule, kind="self", lengths_q=LENGTHS, lengths_kv=None, tail=5, num_queries=3, heads=(2, 2), dim=64,
          mask=None, activation="softmax", dtype=torch.bfloat16, processors=3, config=None, rules=RULES,
          program=None):  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    lengths_kv = lengths_q if lengths_kv is None else lengths_kv
    rows_kv = sum(lengths_kv) + tail
    rows_q = num_queries if kind == "broadcast_q" else sum(lengths_q) + (tail if kind == "self" else 3)
    q = torch.randn(rows_q, heads[0], dim, generator=generator).to(dtype)
    k, v = (torch.randn(rows_kv, heads[1], dim, generator=generator) for _ in range(2))
    if activation == "softmax":
        # Keys grow toward the front of each 300, and are taken from the end: some maxima outgrow the threshold.
        k *= 1 + 4 * ((-torch.arange(rows_kv) % 300) / 300)[:, None, None]
    k, v = k.to(dtype), v.to(dtype)
    offsets_kv = _offsets(lengths_kv)
    offsets_q = None if kind == "broadcast_q" else offsets_kv if kind == "self" else _offsets(lengths_q)
    spec = AttentionSpec(
        kind, dtype, *heads, dim, dim, mask or Full(), (activation,), dim**-0.5,
        1.0 if activation == "softmax" else 0.5, False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_forward, "num_processors", lambda device: processors)
        if config is not None:
            for module in (launch_forward, capability):
                patch.setattr(module, "forward_config", lambda *call: config)
        tables = tuple(_tables(capability.table_requests(spec, BLACKWELL), rows_q, rows_kv, offsets_q, offsets_kv))
        launch = Launch(
            checks=rules, arch=100, schedule=schedule, outputs=("desc_o", "lse"), scratch=("slots",), max_steps=60_000
        )
        with emulated_launches(launch, program):
            out, lse = launch_forward.forward(q, k, v, Geometry(offsets_q, offsets_kv, tables), spec)
    want, want_lse = reference.forward(q.double(), k.double(), v.double(), Geometry(offsets_q, offsets_kv, ()), spec)
    # The weights and the output are rounded to the dtype; sums are in fp32.
    limit = 2 * torch.finfo(dtype).eps * max(want.abs().max().item(), 1e-30)
    assert (out.double() - want).abs().max() <= limit
    if activation == "softmax":
        assert torch.equal(lse.isneginf(), want_lse.isneginf())
        finite = ~want_lse.isneginf()
        # A quarter of the exponentials are right to 1e-4.
        assert torch.allclose(lse[finite].double(), want_lse[finite], atol=2e-4)


# Every shipped configuration, small: three steps a stream and more, several items a CTA.
SHIPPED = {
    "self 64": {"lengths_q": (0, 65, 300, 1, 129), "processors": 2},
    "self 128": {"lengths_q": (0, 200, 1), "dim": 128, "processors": 1},
    "broadcast-Q 64": {"kind": "broadcast_q", "lengths_q": (0, 65, 700, 1, 0), "processors": 2},
    "broadcast-Q 128": {"kind": "broadcast_q", "lengths_q": (0, 65, 400, 1), "dim": 128, "processors": 2},
    "two CTAs, broadcast-Q 256": {
        "kind": "broadcast_q", "num_queries": 256, "lengths_q": (65, 400, 1), "dim": 128, "processors": 4,
        "heads": (1, 1),
    },
    "two CTAs, broadcast-Q 300": {
        "kind": "broadcast_q", "num_queries": 300, "lengths_q": (0, 200, 65), "dim": 128, "processors": 4,
        "heads": (1, 1),
    },
    "two CTAs, self 128": {
        "lengths_q": (300, 0, 1), "dim": 128, "processors": 2, "heads": (1, 1), "config": _TWO_PAIR,
    },
}  # fmt: skip


def test_all_configurations_are_among_them():
    chosen = {
        case.get("config") or forward_config(case.get("dim", 64), case.get("num_queries", 3), Full())
        for case in SHIPPED.values() if "kind" in case or "config" in case
    }  # fmt: skip
    assert chosen | {*_PAIR.values()} == {*_PAIR.values(), *_SPLIT.values(), _TWO_PAIR, _TWO_SPLIT}


@pytest.mark.emulator(seeds=1, roles=ROLES)
@pytest.mark.parametrize("name", ["self 64", "broadcast-Q 64", "two CTAs, self 128"])
def test_right_under_every_policy(schedule, name):
    check(schedule, **SHIPPED[name])


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configuration(name):
    check(Schedule("random", 1), **SHIPPED[name])


@pytest.mark.parametrize("name", SHIPPED)
def test_products_need_no_order_beyond_their_accumulators(name):
    check(Schedule("random", 2), **SHIPPED[name], rules=replace(RULES, strict_mma=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_policy_and_50_seeds(name):
    for schedule in standard_schedules(50, ROLES):
        check(schedule, **SHIPPED[name])


_SPLIT_128 = {"kind": "broadcast_q", "lengths_q": (0, 65, 300, 1), "dim": 128}
CASES = {
    "lengths around the tiles": {},
    "cross": {"kind": "cross", "lengths_kv": OTHERS},
    "grouped heads": {"heads": (4, 2), "lengths_q": (300, 0, 129, 65)},
    "width 128": {"dim": 128, "lengths_q": (300, 0, 129)},
    "fp16": {"dtype": torch.float16, "lengths_q": (300, 0, 129)},
    "causal": {"mask": Causal(), "lengths_q": (300, 1, 0, 129, 128)},
    "causal cross": {"kind": "cross", "mask": Causal(), "lengths_kv": OTHERS},
    "window": {"mask": SlidingWindow(100, 30), "lengths_q": (300, 1, 0, 129)},
    "window to the right": {"mask": SlidingWindow(3, None), "lengths_q": (300, 1, 0, 129)},
    "window cross top left": {"kind": "cross", "mask": SlidingWindow(10, 140, "top_left"), "lengths_kv": OTHERS},
    "blocks": {"mask": BlockDiagonal(64), "lengths_q": (300, 1, 0, 129)},
    "odd blocks": {"mask": BlockDiagonal(37), "lengths_q": (300, 1, 0, 129)},
    "relu": {"activation": "relu", "lengths_q": (300, 0, 129, 65)},
    "fast gelu, causal": {"activation": "fast_gelu", "mask": Causal(), "lengths_q": (300, 0, 129)},
    "no keys at all": {"kind": "cross", "lengths_q": (3, 65), "lengths_kv": (0, 0), "tail": 2},
    "all empty": {"lengths_q": (0, 0), "tail": 3},
    "broadcast-Q, two tiles of queries": {"kind": "broadcast_q", "num_queries": 200, "lengths_q": (130, 0, 70)},
    "broadcast-Q, more heads than CTAs": {**_SPLIT_128, "processors": 1},
    "broadcast-Q, all empty": {"kind": "broadcast_q", "lengths_q": (0, 0, 0), "tail": 2},
    "broadcast-Q, gelu": {**_SPLIT_128, "activation": "gelu"},
    "two CTAs, causal, grouped heads": {
        "dim": 128, "mask": Causal(), "lengths_q": (600, 1, 0, 129), "heads": (2, 1), "config": _TWO_PAIR,
        "processors": 4,
    },
    "two CTAs, relu": {"dim": 128, "lengths_q": (300, 1), "activation": "relu", "config": _TWO_PAIR, "processors": 2},
    "weights over scores": {"config": replace(_PAIR[64], p_over_s=True), "lengths_q": (300, 1, 0, 129)},
    "weights over scores, split": {**_SPLIT_128, "config": replace(_SPLIT[128], p_over_s=True)},
    "weights over scores, relu": {
        "config": replace(_PAIR[64], p_over_s=True), "lengths_q": (300, 1, 0, 129), "activation": "relu",
    },
    "dealt out": {"config": replace(_PAIR[64], deal="alternate"), "lengths_q": (300, 1, 0, 129, 128)},
    "dealt out, split": {**_SPLIT_128, "config": replace(_SPLIT[128], deal="alternate")},
    "plain arithmetic": {
        "config": replace(_PAIR[64], threshold=0.0, packed=False, polynomial=0), "lengths_q": (300, 1, 0, 129),
    },
    "polynomials only": {"config": replace(_PAIR[64], polynomial=4), "lengths_q": (300, 1, 0, 129)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    check(Schedule("random", 0), **CASES[name])


def test_a_config_that_is_not_legal_is_refused_with_a_reason(monkeypatch):
    assert "head dim 128" in replace(_PAIR[64], two_ctas=True).refusal(64, 2)
    assert "256 shared queries" in _TWO_PAIR.refusal(128, 2, 130)
    assert "columns of tensor memory" in replace(_PAIR[128], block_kv=128, k_stages=2, v_stages=2).refusal(128, 2)
    assert "bytes of shared memory" in replace(_PAIR[128], k_stages=4).refusal(128, 2)
    forward_config.cache_clear()
    monkeypatch.setenv("JAGGED_ATTN_BLACKWELL_FORWARD", "two_ctas=1,k_stages=6,v_stages=6")
    assert forward_config(128, None, Full()) == _TWO_PAIR
    with pytest.raises(ValueError, match="head dim 128"):
        forward_config(64, None, Full())
    monkeypatch.setenv("JAGGED_ATTN_BLACKWELL_FORWARD", "two=1")
    with pytest.raises(ValueError, match="must name some of"):
        forward_config(128, 3, Full())
    forward_config.cache_clear()


# Teeth: what each configuration's faults are hunted with. A fault has to be found with one of them.
HUNTED = {
    "self 64": {"lengths_q": (300, 65), "processors": 1, "heads": (1, 1), "tail": 1, "mask": SlidingWindow(140, 0)},
    "broadcast-Q 128": {**SHIPPED["broadcast-Q 128"], "lengths_q": (400, 65), "heads": (3, 3), "processors": 1},
    "two CTAs, self 128": {**SHIPPED["two CTAs, self 128"], "lengths_q": (300, 65)},
    "relu": {"lengths_q": (300, 65), "processors": 1, "heads": (1, 1), "activation": "relu"},
    "short": {"lengths_q": (65, 60, 1), "processors": 1, "heads": (1, 1)},
}
SEEDS = range(4)
MUTANTS = [
    *standard_mutants(kernel, {"arrive": "barrier_arrive"}),
    *standard_mutants(rings.publish),
    *standard_mutants(rings.open_slot),
]
# Mutants that change nothing, with the reason.
_GUARDED = "a step that a stream does not have issues nothing and waits for nothing"
_FENCE = "in the emulator an arrival in another CTA publishes all stores before it; PTX promises that for one CTA only"
EQUIVALENT = {
    "one trip too many | mma: range(steps_0) #0": _GUARDED,
    "one trip too many | correct: range(1, steps_0) #0": _GUARDED,
    "fence dropped | _take: fence() #0": _FENCE,
    "arrival too early | _take: barrier_arrive(item_full) #0": _FENCE,
}


def _hangs(*_):
    raise EmulatorError(Verdict.LIVELOCK, "a loop without an operation in it")


def verdict(mutant, seed, **case):
    """What finds a mutant on a seed; ``None`` if nothing does."""
    previous = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(30)
    try:
        check(Schedule("random", seed), **case, program=mutant.program())
    except EmulatorError as error:
        return error.verdict
    except AssertionError:
        return Verdict.VALUE
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", HUNTED)
def test_without_a_fault_nothing_is_found(name, seed):
    check(Schedule("random", seed), **HUNTED[name])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_found(mutant):
    found = next((v for case in HUNTED.values() for seed in SEEDS if (v := verdict(mutant, seed, **case))), None)
    assert (found is None) == (mutant.name in EQUIVALENT)
