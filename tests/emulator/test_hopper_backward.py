"""The Hopper backward in the emulator: right under every schedule, without a report, beside a float64 reference."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backward_case import BackwardCase

from jagged_attn import functional
from jagged_attn.activations import ELEMENTWISE
from jagged_attn.backends import reference
from jagged_attn.backends.base import Arch, Geometry
from jagged_attn.backends.tlx_hopper import capability, launch_backward
from jagged_attn.masks import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.schedule.hopper_backward import adds_up_dq
from jagged_attn.testing.emulator import Schedule
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch

RANDOM = Schedule("random", 0)
SHORT = (65, 0, 130, 1)
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 0, 300)


@dataclass(frozen=True)
class Case(BackwardCase):
    """One call, of short sequences unless it says otherwise; ``apart``: dQ by a kernel of its own, few keys or not."""

    lengths_kv: tuple[int, ...] = SHORT
    apart: bool = False


def _tables(case: "Case", tensors: dict[str, torch.Tensor], geometry: Geometry) -> tuple[torch.Tensor, ...]:
    requests = capability.table_requests(case.spec, Arch("cuda", (9, 0)))[1:]
    rows = tensors["q"].shape[0], tensors["k"].shape[0]
    return tuple(functional._tables(requests, *rows, geometry.offsets_q, geometry.offsets_kv))


def _run(
    case: Case, schedule: Schedule, tensors: dict[str, torch.Tensor] | None = None, processors: int = 2
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The kernels' gradients and the float64 reference's, by name."""
    tensors, geometry, spec = tensors or case.tensors(), case.geometry(), case.spec
    wide = {name: x.double() for name, x in tensors.items()}
    out, lse = reference.forward(wide["q"], wide["k"], wide["v"], geometry, spec)
    want = reference.backward(*wide.values(), out, lse, geometry, spec)
    # Written once, each element; the descriptors are those of dK and dV. dQ begins as NaN.
    outputs = ("stats", "desc_dk", "desc_dv", "dq")
    launch = Launch(schedule, HOUSE_RULES, outputs=outputs, arch=90)
    with pytest.MonkeyPatch.context() as patch, emulated_launches(launch):
        patch.setattr(launch_backward, "num_processors", lambda device: processors)
        patch.setattr(launch_backward, "adds_up_dq", lambda *call: not case.apart)
        patch.setattr(launch_backward, "new_gradients", lambda *like: [x.new_full(x.shape, torch.nan) for x in like])
        got = launch_backward.backward(
            *tensors.values(), out.to(case.dtype), lse.float(), geometry, spec, _tables(case, tensors, geometry)
        )
    names = ("dq", "dk", "dv")
    return dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True))


def _check(case: Case, schedule: Schedule = RANDOM, **more: Any) -> dict[str, torch.Tensor]:
    got, want = _run(case, schedule, **more)
    # O, P and dS are rounded to the dtype before they are multiplied and summed, the gradient after.
    tolerance = 4 * torch.finfo(case.dtype).eps
    for name, exact in want.items():
        assert got[name].dtype == case.dtype
        assert got[name].shape == exact.shape
        if exact.numel():
            error = (got[name].double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
            assert error <= tolerance, f"{name}: {error:.2g}, {tolerance:.2g} allowed"
    return got


@pytest.mark.emulator(seeds=1, roles=("load", "gradients", "query_gradients"))
@pytest.mark.parametrize("dim", [64, 128])
def test_right_under_every_policy(schedule, dim):
    _check(Case((130,), heads=(2, 1), dim=dim, mask=Causal(), extra_rows=3), schedule)


EXTENTS = {
    "self": Case(EDGES, extra_rows=130),
    "cross": Case(EDGES, (65, 300, 0, 129, 64, 1, 3, 63, 0, 128)),
    "cross with rows of no sequence": Case((1, 0, 129), (0, 200, 64), heads=(2, 2), extra_rows=1),
    "head dim 128": Case((130,), dim=128),
    "fp16": Case((130, 0, 64), dtype=torch.float16, heads=(2, 2)),
    "multi-query": Case((70, 0, 5), heads=(3, 1)),
    "grouped, cross": Case((129, 1, 64), (64, 130, 0), heads=(4, 2)),
}
MASKS = {
    "causal": Case((0, 65, 300), mask=Causal()),
    "causal, cross": Case((129, 5, 0, 200), (200, 70, 3, 65), mask=Causal()),
    "causal, cross, top left": Case((129, 5, 0, 200), (200, 70, 3, 65), mask=Causal("top_left")),
    "causal, grouped": Case((5, 150), heads=(2, 1), mask=Causal()),
    "window": Case((1, 200, 70), mask=SlidingWindow(70, 5)),
    "window, cross": Case((129, 5, 300), (300, 70, 65), mask=SlidingWindow(4, 2)),
    "window, open left": Case((130, 9), mask=SlidingWindow(None, 2)),
    "window, open right": Case((130, 9), mask=SlidingWindow(1, None)),
    "two keys": Case((130, 9), mask=SlidingWindow(1, 0)),
    "blocks of 64": Case((5, 0, 200), mask=BlockDiagonal(64)),
    "blocks of 13": Case((5, 0, 70), mask=BlockDiagonal(13)),
}
FACTORS = {
    "softmax": Case((70, 9), scale=0.3, out_scale=-1.7),
    "negative scale": Case((70, 9), scale=-0.4),
    "no scale": Case((70, 9), scale=0.0),
    "no out_scale": Case((70, 9), out_scale=0.0),
    "element-wise": Case((130, 9), (70, 65), activation="fast_gelu", scale=0.5, out_scale=0.25),
    "element-wise, masked": Case((70, 0, 9), activation="gelu", mask=Causal(), out_scale=-2.0),
    "element-wise, window, head dim 128": Case((70, 9), activation="silu", mask=SlidingWindow(9, 5), dim=128),
}


# Who makes dQ: a role of its own, at head dim 64; the groups, at 128; a kernel of its own.
MAKERS = {"role": {"dim": 64}, "groups": {"dim": 128}, "kernel": {"apart": True}}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", EXTENTS)
def test_extents(name, maker):
    _check(replace(EXTENTS[name], **MAKERS[maker]))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, maker):
    _check(replace(MASKS[name], **MAKERS[maker]))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", FACTORS)
def test_factors(name, maker):
    _check(replace(FACTORS[name], **MAKERS[maker]))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_activations(name, maker):
    _check(Case((70, 9), activation=name, **MAKERS[maker]))


@pytest.mark.parametrize(
    "case",
    [Case(()), Case((0, 0)), Case((), extra_rows=3), Case((0, 0), extra_rows=70), Case((0, 0), (3, 70)),
     Case((3, 70), (0, 0)), Case((0, 5), (5, 0), extra_rows=2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("apart", [False, True])
def test_hardly_anything(case, apart):
    for gradient in _check(replace(case, apart=apart)).values():
        assert not gradient.any()


DETERMINISTIC = {
    "self": Case((64, 0, 300), extra_rows=130, deterministic=True),
    "cross": Case((1, 0, 129), (5, 3, 65), dim=128, deterministic=True),
    "causal, cross": Case((129, 5, 0, 200), (200, 70, 3, 65), mask=Causal(), deterministic=True),
    "window, fp16": Case((1, 200, 70), mask=SlidingWindow(70, 5), dtype=torch.float16, deterministic=True),
    "blocks, element-wise": Case((5, 0, 70), mask=BlockDiagonal(13), activation="silu", dim=128, deterministic=True),
    "factors": Case((70, 9), scale=-0.3, out_scale=-1.7, deterministic=True),
}


@pytest.mark.parametrize("policy", ["eager", "lazy", "starve:tma_load", "starve:wgmma", "starve:load", "starve:sum"])
def test_deterministic_under_policies(policy):
    _check(Case((65,), (130,), deterministic=True), Schedule(policy, 0))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic(name):
    _check(DETERMINISTIC[name])


@pytest.mark.parametrize("asked", [{"deterministic": True}, {"apart": True}], ids=str)
def test_dq_apart_means_the_same_bits_in_any_order(asked):
    case = Case((130, 5), heads=(2, 1), **asked)
    first, again = _check(case), _check(case, Schedule("random", 1), processors=5)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("mask", "dim", "rows_kv", "adds_up"),
    [(Full(), 128, 4 * 320, False), (Full(), 128, 4 * 320 + 1, True), (Full(), 64, 4, True),
     (SlidingWindow(100, 100), 128, 10**6, False), (SlidingWindow(500, 0), 128, 10**6, True),
     (SlidingWindow(100, None), 128, 10**6, True), (SlidingWindow(100, 100), 64, 10**6, True)],
    ids=str,
)  # fmt: skip
def test_which_calls_add_dq_up(mask, dim, rows_kv, adds_up):
    assert adds_up_dq(dim, mask, rows_kv, 4) is adds_up


def test_the_statistics_of_many_sequences():
    # More than are tried at once for the sequence of a block of row statistics, empty ones among them.
    _check(Case((1, 0, 2, 66, 0, 0, 1) * 30, extra_rows=3))


def test_far_more_processors_than_items():
    _check(Case((70,)), processors=7)


def test_views_of_wider_buffers_and_an_expanded_gradient():
    case = Case((70, 3), heads=(2, 2))
    fused = torch.randn(73, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    heads_first = torch.randn(2, 73, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    dout = torch.ones(1, dtype=torch.bfloat16).expand(73, 2, 64)
    _check(case, tensors={"dout": dout, "q": fused[:, :2], "k": fused[:, 2:4], "v": heads_first.transpose(0, 1)})


def test_keys_past_the_end_where_all_scores_are_very_negative():
    # exp(-lse) overflows: rows of zeros, whose score is 0, must not become infinite.
    case, tensors = Case((70, 9)), Case((70, 9)).tensors()
    tensors["q"] = tensors["q"].abs() * 8
    tensors["k"] = -tensors["k"].abs() * 8
    _check(case, tensors=tensors)


@pytest.mark.parametrize(
    ("activation", "value", "deterministic"),
    [("softmax", float("nan"), False), ("gelu", float("inf"), False), ("softmax", float("nan"), True),
     ("gelu", float("inf"), True)],
)  # fmt: skip
def test_a_neighbour_that_is_not_a_number_changes_no_bit(activation, value, deterministic):
    case = Case((9, 65, 70), activation=activation, extra_rows=2, deterministic=deterministic)
    clean, poisoned = case.tensors(), case.tensors()
    for x in poisoned.values():
        x[9 : 9 + 65] = value
        x[-2:] = value
    rows = [*range(9), *range(9 + 65, 9 + 65 + 70)]
    want, got = _run(case, RANDOM, clean)[0], _run(case, RANDOM, poisoned)[0]
    for name in want:
        assert torch.equal(got[name][rows], want[name][rows]), name
        assert not got[name][-2:].any(), name


@pytest.mark.parametrize("offsets", [(0, 90, 40, 70), (-5, 20, 1000), (60, 10), (0, 200, 3)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_bad_offsets_reach_nothing_outside(offsets, deterministic):
    case = Case((70,), mask=Causal(), deterministic=deterministic)
    tensors, bad = case.tensors(), torch.tensor(offsets)
    geometry = Geometry(bad, bad, ())
    lse = torch.zeros(70, 1)
    # Sequences that overlap race for their rows.
    with emulated_launches(Launch(RANDOM, replace(HOUSE_RULES, races=False), arch=90)):
        tables = _tables(case, tensors, geometry)
        launch_backward.backward(*tensors.values(), tensors["q"], lse, geometry, case.spec, tables)
