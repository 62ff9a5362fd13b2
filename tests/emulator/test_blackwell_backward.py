"""The Blackwell backward in the emulator: right under every schedule, without a report, beside a float64 reference."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backward_case import BackwardCase

from jagged_attn.activations import ELEMENTWISE
from jagged_attn.backends import reference
from jagged_attn.backends.base import Geometry
from jagged_attn.backends.tlx_blackwell import launch_backward
from jagged_attn.masks import BlockDiagonal, Causal, SlidingWindow
from jagged_attn.schedule.blackwell import ROWS
from jagged_attn.schedule.blackwell_backward import BackwardConfig, backward_config
from jagged_attn.schedule.tiles import tile_table
from jagged_attn.testing.emulator import Schedule
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import standard_schedules

RANDOM = Schedule("random", 0)
# fbtriton ends a specialised kernel of a cluster with a barrier of the cluster.
RULES = replace(HOUSE_RULES, cluster_end=True)
ROLES = ("default", "gradients", "mma", "task3")
SHORT = (129, 0, 5)
EDGES = (0, 1, 127, 128, 129, 0, 300)


@dataclass(frozen=True)
class Case(BackwardCase):
    """One call, of short sequences unless it says otherwise."""

    lengths_kv: tuple[int, ...] = SHORT


def _table(geometry: Geometry, rows_kv: int, rows_q: int, block: int = ROWS) -> torch.Tensor:
    assert geometry.offsets_q is not None
    return tile_table(geometry.offsets_kv, geometry.offsets_q, rows_kv, rows_q, block)


def run(
    case: Case,
    schedule: Schedule,
    tensors: dict[str, torch.Tensor] | None = None,
    processors: int = 2,
    config: BackwardConfig | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The kernels' gradients and the float64 reference's, by name."""
    config = config or backward_config(case.dim)
    tensors, geometry, spec = tensors or case.tensors(), case.geometry(), case.spec
    wide = {name: x.double() for name, x in tensors.items()}
    out, lse = reference.forward(wide["q"], wide["k"], wide["v"], geometry, spec)
    want = reference.backward(*wide.values(), out, lse, geometry, spec)
    # Written once, each element; the descriptors are those of dK and dV. dQ begins as NaN.
    outputs = ("stats", "desc_dk", "desc_dv", "dq")
    launch = Launch(schedule, RULES, outputs=outputs, scratch=("slots",), arch=100)
    with pytest.MonkeyPatch.context() as patch, emulated_launches(launch):
        patch.setattr(launch_backward, "num_processors", lambda device: processors)
        patch.setattr(launch_backward, "backward_config", lambda *facts: config)
        patch.setattr(launch_backward, "new_gradients", lambda *like: [x.new_full(x.shape, torch.nan) for x in like])
        got = launch_backward.backward(
            *tensors.values(),
            out.to(case.dtype),
            lse.float(),
            geometry,
            spec,
            (_table(geometry, len(tensors["k"]), len(tensors["q"]), ROWS * config.ctas),),
        )
    names = ("dq", "dk", "dv")
    return dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True))


def check(case: Case, schedule: Schedule = RANDOM, **more: Any) -> dict[str, torch.Tensor]:
    got, want = run(case, schedule, **more)
    # O, P and dS are rounded to the dtype before they are multiplied and summed, the gradient after.
    tolerance = 4 * torch.finfo(case.dtype).eps
    for name, exact in want.items():
        assert got[name].dtype == case.dtype
        assert got[name].shape == exact.shape
        if exact.numel():
            error = (got[name].double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
            assert error <= tolerance, f"{name}: {error:.2g}, {tolerance:.2g} allowed"
    return got


@pytest.mark.emulator(seeds=1, roles=ROLES)
def test_right_under_every_policy(schedule):
    check(Case((130,), mask=Causal(), extra_rows=3), schedule)


SWEEP = {
    "head dim 64": Case((257, 0, 130), (300, 5, 129), heads=(2, 1), mask=Causal()),
    "head dim 128": Case((129, 300), (257, 5), dim=128, mask=SlidingWindow(100, 60)),
    "element-wise": Case((257, 1), dim=128, activation="gelu", mask=BlockDiagonal(100)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_right_over_all_policies_and_many_seeds(name):
    for schedule in (*standard_schedules(seeds=50, roles=ROLES),):
        check(SWEEP[name], schedule)


EXTENTS = {
    "self": Case(EDGES, extra_rows=130),
    "cross with rows of no sequence": Case((1, 0, 129), (0, 200, 64), heads=(2, 2), extra_rows=1),
    "head dim 128": Case((129, 0), (300, 5), dim=128),
    "fp16": Case((130, 0, 64), dtype=torch.float16),
    "multi-query": Case((70, 0, 5), heads=(3, 1)),
    "grouped, cross": Case((129, 1), (64, 130), heads=(4, 2)),
}
MASKS = {
    "causal, head dim 128": Case((257,), mask=Causal(), dim=128),
    "causal, cross": Case((129, 5, 0, 200), (200, 70, 3, 65), mask=Causal()),
    "causal, cross, top left": Case((129, 5, 0, 300), (300, 70, 3, 65), mask=Causal("top_left")),
    "window": Case((1, 300), mask=SlidingWindow(70, 5)),
    "window, open left": Case((130, 9), mask=SlidingWindow(None, 2)),
    "window, open right": Case((130, 9), mask=SlidingWindow(1, None)),
    "blocks of 64": Case((5, 0, 200), mask=BlockDiagonal(64)),
    "blocks of 13": Case((5, 0, 70), mask=BlockDiagonal(13)),
}
MORE = {
    "cross": Case(EDGES, (129, 300, 0, 127, 1, 3, 257)),
    "head dim 128": Case((129, 0, 300), (300, 5, 130), dim=128),
    "causal": Case((0, 65, 300), mask=Causal()),
    "causal, grouped": Case((5, 150), heads=(2, 1), mask=Causal()),
    "window, longer": Case((1, 400, 70), mask=SlidingWindow(70, 5)),
    "window, cross": Case((129, 5, 300), (300, 70, 65), mask=SlidingWindow(4, 2)),
    "two keys": Case((130, 9), mask=SlidingWindow(1, 0)),
}
FACTORS = {
    "softmax": Case((70, 9), scale=0.3, out_scale=-1.7),
    "no out_scale": Case((70, 9), out_scale=0.0),
    "element-wise": Case((130, 9), (70, 65), activation="fast_gelu", scale=0.5, out_scale=0.25),
    "element-wise, masked": Case((70, 0, 9), activation="gelu", mask=Causal(), out_scale=-2.0),
    "element-wise, window, head dim 128": Case((70, 9), activation="silu", mask=SlidingWindow(9, 5), dim=128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_extents_and_masks(name):
    check(MORE[name])


@pytest.mark.parametrize("name", EXTENTS)
def test_extents(name):
    check(EXTENTS[name])


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check(MASKS[name])


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name):
    check(FACTORS[name])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_activations(name):
    check(Case((9,), activation=name))


@pytest.mark.parametrize(
    "case",
    [Case(()), Case((0, 0)), Case((), extra_rows=3), Case((0, 0), extra_rows=70), Case((0, 0), (3, 70)),
     Case((3, 70), (0, 0)), Case((0, 5), (5, 0), extra_rows=2)],
    ids=str,
)  # fmt: skip
def test_hardly_anything(case):
    for gradient in check(case).values():
        assert not gradient.any()


DETERMINISTIC = {
    "causal, cross": Case((257, 5), (150, 70), mask=Causal(), deterministic=True),
}
MORE_DETERMINISTIC = {
    "self": Case((257, 5), deterministic=True),
    "grouped": Case((257, 0, 129), heads=(2, 1), extra_rows=130, deterministic=True),
    "head dim 128, element-wise": Case((1, 0, 300), (5, 3, 129), dim=128, activation="silu", deterministic=True),
    "causal, cross, longer": Case((300, 5, 0, 400), (500, 70, 3, 65), mask=Causal(), deterministic=True),
    "causal, cross, top left": Case((400, 5), (200, 70), mask=Causal("top_left"), deterministic=True),
    "window": Case((1, 400), (300, 200), mask=SlidingWindow(70, 5), deterministic=True),
    "blocks": Case((300,), mask=BlockDiagonal(130), deterministic=True),
}


def check_repeats(case: Case, schedules: tuple[Schedule, ...], config: BackwardConfig | None = None) -> None:
    first = check(case, config=config)
    for schedule in schedules:
        again = run(case, schedule, processors=3 * (config.ctas if config else 1), config=config)[0]
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_means_the_same_bits_in_any_order(name):
    check_repeats(DETERMINISTIC[name], (Schedule("random", 1),))


# CTAs that wait their turn poll, so a run that keeps others from theirs takes minutes.
@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_DETERMINISTIC)
def test_deterministic_under_more_schedules(name):
    check_repeats(MORE_DETERMINISTIC[name], (Schedule("starve_cta:0", 1), Schedule("lazy", 2), Schedule("random", 3)))


@pytest.mark.parametrize(
    ("facts", "changes", "reason"),
    [
        ((64, None), {"two_ctas": 1}, "head dim 128 and keys that stay"),
        ((128, 128), {"two_ctas": 1}, "head dim 128 and keys that stay"),
        ((128, None, 255), {"two_ctas": 1, "q_stages": 1}, "256 shared queries or more, got 255"),
        ((128, None), {"two_ctas": 1}, "one buffer of each"),
        ((128, None), {"two_ctas": 1, "q_stages": 1, "dq_stages": 3}, "bytes of shared memory"),
        ((128, None), {"scores": "first"}, "columns of tensor memory"),
        ((128, None), {"q_stages": 3}, "bytes of shared memory"),
        ((128, None), {"registers": 200}, "leave 80 of 512"),
        ((128, None), {"over_dp": "dk"}, "where the keys stay"),
        ((64, None), {"over_dp": "dq"}, "128 rows of head dim 64"),
        ((64, None), {"do_stages": 0}, "every ring needs a buffer"),
        ((64, 64), {"kv_stages": 1}, "keys that pass by two"),
        ((64, 64), {"polynomial": 1}, "must name some of"),
    ],
)
def test_configs_that_cannot_run_are_refused(monkeypatch, facts, changes, reason):
    text = ",".join(f"{name}={value}" for name, value in changes.items())
    monkeypatch.setenv("JAGGED_ATTN_BLACKWELL_BACKWARD", text)
    backward_config.cache_clear()
    with pytest.raises(ValueError, match=reason):
        backward_config(*facts)


@pytest.mark.parametrize("switches", ["scores=middle", "scores=last,q_stages=2,do_stages=1", "kv_stages=1,dq_stages=3"])
def test_switches(monkeypatch, switches):
    monkeypatch.setenv("JAGGED_ATTN_BLACKWELL_BACKWARD", switches)
    backward_config.cache_clear()
    launch_backward._kernels.cache_clear()
    check(Case((130,)))
    monkeypatch.delenv("JAGGED_ATTN_BLACKWELL_BACKWARD")
    backward_config.cache_clear()


def test_far_more_processors_than_items():
    check(Case((70,)), processors=7)


def test_views_of_wider_buffers_and_an_expanded_gradient():
    case = Case((70, 3), heads=(2, 2))
    fused = torch.randn(73, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    heads_first = torch.randn(2, 73, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    dout = torch.ones(1, dtype=torch.bfloat16).expand(73, 2, 64)
    check(case, tensors={"dout": dout, "q": fused[:, :2], "k": fused[:, 2:4], "v": heads_first.transpose(0, 1)})


def test_keys_past_the_end_where_all_scores_are_very_negative():
    # exp(-lse) overflows: rows of zeros, whose score is 0, must not become infinite.
    case, tensors = Case((70, 9)), Case((70, 9)).tensors()
    tensors["q"] = tensors["q"].abs() * 8
    tensors["k"] = -tensors["k"].abs() * 8
    check(case, tensors=tensors)


@pytest.mark.parametrize(("activation", "value"), [("softmax", float("nan")), ("gelu", float("inf"))])
def test_a_neighbour_that_is_not_a_number_changes_no_bit(activation, value):
    case = Case((9, 65, 70), activation=activation, extra_rows=2)
    clean, poisoned = case.tensors(), case.tensors()
    for x in poisoned.values():
        x[9 : 9 + 65] = value
        x[-2:] = value
    rows = [*range(9), *range(9 + 65, 9 + 65 + 70)]
    want, got = run(case, RANDOM, clean)[0], run(case, RANDOM, poisoned)[0]
    for name in want:
        assert torch.equal(got[name][rows], want[name][rows]), name
        assert not got[name][-2:].any(), name


@pytest.mark.parametrize("offsets", [(0, 90, 40, 70), (-5, 20, 1000), (60, 10), (0, 200, 3)])
def test_bad_offsets_reach_nothing_outside(offsets):
    case = Case((70,), mask=Causal())
    tensors, bad = case.tensors(), torch.tensor(offsets)
    geometry = Geometry(bad, bad, ())
    lse = torch.zeros(70, 1)
    # Sequences that overlap race for their rows.
    with emulated_launches(Launch(RANDOM, replace(HOUSE_RULES, races=False), arch=100)):
        launch_backward.backward(*tensors.values(), tensors["q"], lse, geometry, case.spec, (_table(geometry, 70, 70),))
