"""The Hopper forward kernel in the emulator, launched by the library's own launch code."""

from dataclasses import replace

import pytest
import torch

from jagged_attn import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.backends import reference
from jagged_attn.backends.base import Arch, Geometry
from jagged_attn.backends.tlx_hopper import capability, launch_forward
from jagged_attn.backends.tlx_hopper.capability import table_requests
from jagged_attn.bench.workloads import Workload
from jagged_attn.functional import _tables
from jagged_attn.perfmodel.hopper import Forward
from jagged_attn.perfmodel.machine import H200
from jagged_attn.perfmodel.predict import Lengths, Tile, forward_items
from jagged_attn.perfmodel.simulate import Processor, Rates
from jagged_attn.schedule.hopper import (
    _PAIR,
    _SINGLE,
    _TRIPLE,
    RUN,
    are_short,
    forward_config,
    forward_run,
    has_few_keys,
)
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import Schedule
from jagged_attn.testing.inputs import lower_scores

HOPPER = Arch("cuda", (9, 0))
LENGTHS = (0, 1, 63, 300, 64, 65, 127, 128, 129, 0)
OTHERS = (5, 0, 64, 129, 300, 1, 128, 0, 65, 2)
# Up to six tiles of queries against up to five blocks of keys, of which the rings hold four at D = 128.
MANY_QUERIES = (0, 1, 63, 64, 65, 192, 193, 300, 577, 1000)
FEW_KEYS = (257, 0, 1, 127, 128, 129, 256, 257, 256, 127)


def _offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def _geometry(spec, q, k, offsets_q, offsets_kv):
    """Offsets with the tables that the backend asks for."""
    tables = _tables(table_requests(spec, HOPPER), q.shape[0], k.shape[0], offsets_q, offsets_kv)
    return Geometry(offsets_q, offsets_kv, tuple(tables))


def check(schedule, kind="self", lengths_q=LENGTHS, lengths_kv=None, tail=5, num_queries=3, heads=(2, 2), dim=64,
          mask=None, activation="softmax", dtype=torch.bfloat16, processors=3, short=True, run=1, config=None,
          mean_score=0.0, monkeypatch=None):  # fmt: skip
    """Run the forward and compare it with the reference; returns the asynchronous operations by engine.

    ``short`` and ``run`` are in the place of what the launch would find; ``config`` in that of what is shipped. For
    ``mean_score`` see ``lower_scores``.
    """
    if config is not None:
        for module in (capability, launch_forward):
            monkeypatch.setattr(module, "forward_config", lambda *_: config)
        monkeypatch.setattr(launch_forward, "_plan", launch_forward._plan.__wrapped__)
    generator = torch.Generator().manual_seed(0)
    lengths_kv = lengths_q if lengths_kv is None else lengths_kv
    rows_kv = sum(lengths_kv) + tail
    rows_q = num_queries if kind == "broadcast_q" else sum(lengths_q) + (tail if kind == "self" else 3)
    q = torch.randn(rows_q, heads[0], dim, generator=generator).to(dtype)
    k, v = (torch.randn(rows_kv, heads[1], dim, generator=generator).to(dtype) for _ in range(2))
    if mean_score:
        lower_scores(q, k, mean_score)
    offsets_kv = _offsets(lengths_kv)
    offsets_q = None if kind == "broadcast_q" else offsets_kv if kind == "self" else _offsets(lengths_q)
    spec = AttentionSpec(
        kind, dtype, *heads, dim, dim, mask or Full(), (activation,), dim**-0.5,
        1.0 if activation == "softmax" else 0.5, False,
    )  # fmt: skip
    geometry = _geometry(spec, q, k, offsets_q, offsets_kv)
    monkeypatch.setattr(launch_forward, "num_processors", lambda device: processors)
    monkeypatch.setattr(launch_forward, "are_short", lambda *_: short)
    monkeypatch.setattr(launch_forward, "forward_run", lambda *_: run)
    launch = Launch(checks=HOUSE_RULES, arch=90, schedule=schedule, outputs=("desc_o", "lse"))
    with emulated_launches(launch) as reports:
        out, lse = launch_forward.forward(q, k, v, geometry, spec)
    want, want_lse = reference.forward(q.double(), k.double(), v.double(), Geometry(offsets_q, offsets_kv, ()), spec)
    # The weights and the output are rounded to the dtype; sums are in fp32.
    limit = 2 * torch.finfo(dtype).eps * max(want.abs().max().item() if want.numel() else 0.0, 1e-30)
    assert ((out.double() - want).abs() <= limit).all()
    if activation == "softmax":
        assert torch.equal(lse.isneginf(), want_lse.isneginf())
        finite = ~want_lse.isneginf()
        assert torch.allclose(lse[finite].double(), want_lse[finite], atol=1e-4)
    return reports[-1].ops if reports else {}


@pytest.mark.emulator(seeds=1, roles=("load", "attend"))
def test_self_attention(schedule, monkeypatch):
    check(schedule, lengths_q=(0, 65, 300, 1, 129), monkeypatch=monkeypatch)


@pytest.mark.emulator(seeds=1, roles=("load", "attend"))
@pytest.mark.parametrize("num_queries", [3, 65])
def test_broadcast_q(schedule, num_queries, monkeypatch):
    check(schedule, "broadcast_q", (0, 65, 300, 1, 0), num_queries=num_queries, monkeypatch=monkeypatch)


@pytest.mark.emulator(seeds=1, roles=("load", "attend"))
def test_runs(schedule, monkeypatch):
    lengths = {"lengths_q": (300, 0, 65, 513), "lengths_kv": (129, 5, 0, 256)}
    check(schedule, "cross", **lengths, heads=(2, 1), run=4, processors=2, monkeypatch=monkeypatch)


_RANDOM = Schedule("random", 0)
_FEW_KEYS = {"kind": "cross", "lengths_q": MANY_QUERIES, "lengths_kv": FEW_KEYS}
CASES = {
    "lengths around the tiles": {},
    "cross": {"kind": "cross", "lengths_kv": OTHERS},
    "grouped heads": {"heads": (4, 2)},
    "width 128": {"dim": 128, "lengths_q": (300, 0, 129)},
    "fp16": {"dtype": torch.float16, "lengths_q": (300, 0, 129)},
    "causal": {"mask": Causal()},
    "causal cross": {"kind": "cross", "mask": Causal(), "lengths_kv": OTHERS},
    "window": {"mask": SlidingWindow(100, 30)},
    "window to the right": {"mask": SlidingWindow(3, None)},
    "window cross top left": {"kind": "cross", "mask": SlidingWindow(10, 140, "top_left"), "lengths_kv": OTHERS},
    "blocks": {"mask": BlockDiagonal(64)},
    "odd blocks": {"mask": BlockDiagonal(37)},
    "relu": {"activation": "relu"},
    "fast gelu, causal": {"activation": "fast_gelu", "mask": Causal()},
    "fast gelu, fp16": {"activation": "fast_gelu", "dtype": torch.float16, "lengths_q": (300, 0, 129)},
    "fast gelu, width 128": {"activation": "fast_gelu", "dim": 128, "lengths_q": (300, 0, 129)},
    "no keys at all": {"kind": "cross", "lengths_q": (3, 65), "lengths_kv": (0, 0), "tail": 2},
    "all empty": {"lengths_q": (0, 0), "tail": 3},
    "broadcast-Q, two tiles of queries": {"kind": "broadcast_q", "num_queries": 200, "lengths_q": (130, 0, 70)},
    "broadcast-Q, three groups": {"kind": "broadcast_q", "num_queries": 300, "lengths_q": (130, 0, 70)},
    "broadcast-Q, all empty": {"kind": "broadcast_q", "lengths_q": (0, 0, 0), "tail": 2},
    "long": {"short": False, "dim": 128, "lengths_q": (300, 0, 129), "heads": (2, 1)},
    "long, causal": {"short": False, "dim": 128, "lengths_q": (400, 0, 129), "mask": Causal()},
    "long, causal cross": {"short": False, "kind": "cross", "mask": Causal(), "lengths_kv": OTHERS},
    "long, fast gelu": {"short": False, "dim": 128, "lengths_q": (300, 0, 129), "activation": "fast_gelu"},
    "three groups, causal": {"dim": 128, "lengths_q": (500, 0, 129), "mask": Causal()},
    "three groups, a window to the right": {
        "dim": 128, "lengths_q": (700, 0, 129), "mask": SlidingWindow(70, None), "config": _TRIPLE[128]
    },
    "three groups, fast gelu": {"lengths_q": (500, 0, 129), "mask": Causal(), "activation": "fast_gelu"},
    # Blocks of keys that one group passes by, and more of them than the rings hold.
    "three groups, large blocks": {
        "dim": 128, "lengths_q": (900, 0, 65), "mask": BlockDiagonal(350), "config": _TRIPLE[128], "processors": 1
    },
    "three groups, window": {"lengths_q": (900, 0, 65), "mask": SlidingWindow(100, 50), "config": _TRIPLE[64]},
    "three groups in turns": {
        "lengths_q": (500, 0, 129), "mask": Causal(), "config": replace(_TRIPLE[64], turns=True)
    },
    "pairs, window": {"mask": SlidingWindow(900, 200), "lengths_q": (1300, 0, 65)},
    # Where an activation nearly cancels: a tanh in bfloat16 would be off by a tenth of the result.
    "fast gelu, negative": {"activation": "fast_gelu", "lengths_q": (300, 0, 129), "mean_score": -2.5},
    "fast gelu, negative, fp16": {
        "activation": "fast_gelu", "lengths_q": (300, 0, 129), "mean_score": -2.5, "dtype": torch.float16
    },
    "runs, grouped heads": {**_FEW_KEYS, "heads": (4, 2), "run": 4},
    "runs, one CTA": {**_FEW_KEYS, "run": 4, "processors": 1},
    "runs, a CTA each": {**_FEW_KEYS, "run": 4, "processors": 99},
    "runs, width 128": {**_FEW_KEYS, "dim": 128, "heads": (2, 1), "run": 4, "processors": 2},
    "runs, fast gelu": {**_FEW_KEYS, "activation": "fast_gelu", "heads": (3, 1), "run": 4, "processors": 2},
    "runs, fast gelu, width 128": {**_FEW_KEYS, "activation": "fast_gelu", "dim": 128, "run": 4, "processors": 1},
    "runs of more keys than the rings hold": {"lengths_q": (700, 300, 129), "heads": (2, 1), "run": 4},
    "runs longer than the table": {"lengths_q": (65, 300), "run": 16, "processors": 1},
    "runs of nothing": {"lengths_q": (0, 0), "tail": 300, "run": 4, "processors": 1},
    "broadcast-Q, gelu": {"kind": "broadcast_q", "activation": "gelu", "lengths_q": (130, 0, 70)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name, monkeypatch):
    check(_RANDOM, **CASES[name], monkeypatch=monkeypatch)


@pytest.mark.parametrize(("keys", "brought"), [(256, 2), (385, 6)])
def test_keys_that_fit_the_rings_are_loaded_once_a_run(keys, brought, monkeypatch):
    # Six tiles of queries are a run of four and one of two; at D = 64 the rings hold six blocks of 64 keys.
    ops = check(_RANDOM, "cross", (1100,), (keys,), heads=(1, 1), run=4, processors=1, monkeypatch=monkeypatch)
    queries, rows_of_no_sequence = 3 * 6, 3 + 2
    assert ops["tma_load"] == queries + brought * 2 * -(-keys // 64) + rows_of_no_sequence


def test_the_performance_model_issues_what_runs_issue(monkeypatch):
    lengths = (700, 300, 3), (256, 129, 0)
    ops = check(_RANDOM, "cross", *lengths, heads=(1, 1), dim=128, run=4, processors=1, monkeypatch=monkeypatch)
    # The three queries of no sequence are one more.
    workload, tile = Workload("runs", "cross", 4, 256, num_heads=1), Tile(64, 64, 3, run=4, fitting=256)
    items = forward_items(workload, Lengths((*lengths[0], 3), (*lengths[1], 0)), tile)
    sm = Processor(H200, Rates(32, 19))
    Forward(sm, forward_config(128, None, Full()), "softmax", items, 0).start()
    sm.clock.run()
    assert (sm.products, sm.loads, sm.stores) == (ops["wgmma"], ops["tma_load"], ops["tma_store"])


def _chosen(kind, mask, rows, num_sequences, items):
    """Whether a call has few keys, and the run it is given if so."""
    few = has_few_keys(128, mask, rows[1], num_sequences)
    return few, forward_run(kind, 128, few, rows[0], num_sequences, items, processors=132)


_LARGE = {"kind": "cross", "mask": Full(), "rows": (592_000, 295_000), "num_sequences": 1152, "items": 23_000}
OTHER_CALLS = {
    "self-attention": ({"kind": "self", "rows": (295_000, 295_000)}, True),
    "shared queries": ({"kind": "broadcast_q"}, True),
    "a mask": ({"mask": Causal()}, False),
    "a narrow mask": ({"mask": BlockDiagonal(64)}, False),
    "more keys than the rings hold": ({"rows": (592_000, 340_000)}, False),
    "few queries": ({"rows": (220_000, 290_000)}, True),
    "few items": ({"items": 8_000}, True),
}


REFUSED = {
    "turns of one group": (replace(_SINGLE[128], turns=True), "one group has nobody to take turns with"),
    "a run of one group": (replace(_SINGLE[128], run=4), "no second tile of queries for runs"),
    "two blocks of keys more": (replace(_PAIR[128], k_stages=4), "bytes of shared memory"),
    "two warps that load": (replace(_TRIPLE[128], load_warps=2), "load_warps must be 1 or 4, got 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_config_refuses(name):
    config, why = REFUSED[name]
    assert why in config.refusal(128, 2)


def test_runs_are_for_many_queries_of_few_keys():
    assert _chosen(**_LARGE) == (True, RUN)
    assert RUN > 1


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_have_no_runs(name):
    other, few_keys = OTHER_CALLS[name]
    assert _chosen(**(_LARGE | other)) == (few_keys, 1)


LAUNCHES = {
    "runs": ("cross", (99_000, 60_000, 20_000), (256, 300, 1), None, (True, RUN)),
    "few queries": ("cross", (300, 5, 70), (256, 300, 1), None, (True, 1)),
    "more keys than stay": ("cross", (99_000, 60_000, 20_000), (700, 300, 1), None, (True, 1)),
    "many keys": ("cross", (99_000, 60_000, 20_000), (1900, 300, 1), None, (False, 1)),
    "self": ("self", (256, 300, 1), None, None, (True, 1)),
    "self, many keys": ("self", (256, 1300, 700), None, None, (False, 1)),
    "shared queries": ("broadcast_q", (256, 300, 1), None, 70, (True, 1)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_chooses_by_its_own_sizes(name, monkeypatch):
    kind, lengths_q, lengths_kv, shared, want = LAUNCHES[name]
    chosen = []

    class Chosen(Exception):
        """Nothing is launched."""

    def plan(spec, num_queries, short, run):
        chosen.append((num_queries, short, run))
        raise Chosen

    monkeypatch.setattr(launch_forward, "_plan", plan)
    monkeypatch.setattr(launch_forward, "num_processors", lambda device: 1)
    rows_kv = sum(lengths_kv or lengths_q)
    q = torch.zeros(shared or sum(lengths_q), 4, 128, dtype=torch.bfloat16)
    k, v = torch.zeros(2, rows_kv, 4, 128, dtype=torch.bfloat16)
    offsets_kv = _offsets(lengths_kv or lengths_q)
    offsets_q = None if shared else _offsets(lengths_q)
    spec = AttentionSpec(kind, q.dtype, 4, 4, 128, 128, Full(), ("softmax",), 1.0, 1.0, False)
    with pytest.raises(Chosen):
        launch_forward.forward(q, k, v, _geometry(spec, q, k, offsets_q, offsets_kv), spec)
    assert chosen == [(shared, *want)]


@pytest.mark.parametrize("dim", [64, 128])
def test_one_group_takes_windows_of_up_to_1024_keys(dim):
    assert [forward_config(dim, None, SlidingWindow(1000, n)).groups for n in (23, 24)] == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("activation", ["softmax", "gelu", "fast_gelu"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_neighbour_that_is_not_a_number_changes_no_bit(kind, activation, value, monkeypatch):
    # The second sequence and rows of no sequence are poisoned; in cross attention the last one has no keys.
    lengths_q, lengths_kv, tail = (9, 65, 70, 5), (9, 65, 70, 5) if kind == "self" else (40, 30, 20, 0), 2
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths_q) + tail, 1, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, sum(lengths_kv) + tail, 1, 64, generator=generator).bfloat16()
    offsets_kv = _offsets(lengths_kv)
    offsets_q = offsets_kv if kind == "self" else _offsets(lengths_q)
    spec = AttentionSpec(kind, q.dtype, 1, 1, 64, 64, Full(), (activation,), 0.125, 1.0, False)
    monkeypatch.setattr(launch_forward, "num_processors", lambda device: 2)

    def run():
        with emulated_launches(Launch(checks=HOUSE_RULES, arch=90, schedule=_RANDOM)):
            return launch_forward.forward(q, k, v, _geometry(spec, q, k, offsets_q, offsets_kv), spec)[0]

    clean = run()
    for x, offsets in ((q, offsets_q), (k, offsets_kv), (v, offsets_kv)):
        x[offsets[1] : offsets[2]] = value
        x[offsets[-1] :] = value
    without_keys = slice(int(offsets_q[4 if kind == "self" else 3]), None)
    q[without_keys] = value
    poisoned = run()
    rows = [*range(9), *range(74, 144)]
    assert torch.equal(poisoned[rows], clean[rows])
    assert not poisoned[without_keys].any()


def test_at_head_dim_64_all_are_short_and_at_128_the_mean_decides():
    assert are_short(64, 10**9, 1)
    assert [are_short(128, rows, 100) for rows in (0, 64_000, 64_001)] == [True, True, False]
