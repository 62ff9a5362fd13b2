"""The Blackwell backward by pairs of CTAs in the emulator, beside a float64 reference, under every schedule."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import test_blackwell_backward as one
import test_blackwell_broadcast_q as broadcast
import torch

from jagged_attn.activations import ELEMENTWISE
from jagged_attn.backends.base import Arch
from jagged_attn.backends.tlx_blackwell import capability, launch_backward
from jagged_attn.bench.workloads import Workload
from jagged_attn.masks import BlockDiagonal, Causal, SlidingWindow
from jagged_attn.perfmodel import blackwell
from jagged_attn.perfmodel.machine import B200
from jagged_attn.perfmodel.predict import Lengths
from jagged_attn.schedule.blackwell import ROWS
from jagged_attn.schedule.blackwell_backward import TWO_CTAS, backward_config, block_kv
from jagged_attn.schedule.tiles import TableRequest, tile_table
from jagged_attn.testing.emulator import Schedule
from jagged_attn.testing.emulator.schedules import standard_schedules

# "remote" is the engine that carries dS and arrivals to the other CTA; "task2" issues the products, or relays.
ROLES = ("default", "gradients", "task2", "load_pair", "remote")


def _case(*lengths: tuple[int, ...], **facts: Any) -> one.Case:
    return one.Case(*lengths, dim=128, **facts)


def _check(
    case: one.Case, schedule: Schedule = one.RANDOM, processors: int = 4, **more: Any
) -> dict[str, torch.Tensor]:
    return one.check(case, schedule, processors=processors, config=TWO_CTAS, **more)


# Three query tiles and a pair of key tiles of which the second is nearly empty; two items for one cluster.
@pytest.mark.emulator(seeds=2, roles=ROLES)
def test_right_under_every_policy(schedule):
    _check(_case((129, 5), (300, 1), mask=Causal("top_left"), extra_rows=3), schedule, processors=2)


SWEEP = {
    "self": _case((257, 0, 130), heads=(2, 1), mask=Causal()),
    "cross": _case((129, 300), (257, 5), mask=SlidingWindow(100, 60)),
    "element-wise": _case((257, 1), activation="gelu", mask=BlockDiagonal(100)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_right_over_all_policies_and_many_seeds(name):
    for schedule in standard_schedules(seeds=50, roles=ROLES):
        _check(SWEEP[name], schedule)


CASES = {
    "self": _case(one.EDGES, extra_rows=130),
    "cross with rows of no sequence": _case((1, 0, 129), (0, 200, 64), heads=(2, 2), extra_rows=1),
    "fp16": _case((130, 0, 64), dtype=torch.float16),
    "multi-query": _case((70, 0, 5), heads=(3, 1)),
    "causal": _case((300,), mask=Causal()),
    "causal, cross": _case((129, 5, 0, 300), (200, 300, 3, 65), mask=Causal()),
    "window": _case((1, 400), mask=SlidingWindow(70, 5)),
    "blocks": _case((5, 0, 300), mask=BlockDiagonal(64)),
    "softmax with factors": _case((70, 9), scale=0.3, out_scale=-1.7),
    "element-wise, masked": _case((130, 9), activation="gelu", mask=Causal(), out_scale=-2.0),
    "element-wise": _case((9,), (300,), activation="silu", out_scale=0.25),
}
MORE = {
    **{name: replace(case, dim=128) for name, case in {**one.EXTENTS, **one.MASKS, **one.MORE, **one.FACTORS}.items()},
    **{name: _case((9,), activation=name) for name in ELEMENTWISE},
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    _check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_cases(name):
    _check(MORE[name])


@pytest.mark.parametrize("case", [_case((0, 0), extra_rows=70), _case((3, 70), (0, 0)), _case((0, 5), (5, 0))], ids=str)
def test_hardly_anything(case):
    for gradient in _check(case).values():
        assert not gradient.any()


def test_a_neighbour_that_is_not_a_number_changes_no_bit():
    case = _case((9, 65, 70), extra_rows=2)
    clean, poisoned = case.tensors(), case.tensors()
    for x in poisoned.values():
        x[9 : 9 + 65] = torch.nan
        x[-2:] = torch.nan
    rows = [*range(9), *range(9 + 65, 9 + 65 + 70)]
    want, got = (one.run(case, one.RANDOM, x, 4, TWO_CTAS)[0] for x in (clean, poisoned))
    for name in want:
        assert torch.equal(got[name][rows], want[name][rows]), name
        assert not got[name][-2:].any(), name


def test_deterministic_means_the_same_bits_in_any_order():
    case = _case((130,), (300,), deterministic=True)
    one.check_repeats(case, (Schedule("random", 1),), TWO_CTAS)


# Clusters that wait their turn poll, so a run that keeps others from theirs takes minutes.
@pytest.mark.slow
@pytest.mark.parametrize("name", one.MORE_DETERMINISTIC)
def test_deterministic_under_more_schedules(name):
    case = replace(one.MORE_DETERMINISTIC[name], dim=128)
    schedules = Schedule("starve_cta:0", 1), Schedule("lazy", 2), Schedule("starve:remote", 3)
    one.check_repeats(case, schedules, TWO_CTAS)


def test_256_shared_queries():
    case = broadcast.problem(256, (129, 0, 5), tail=3, dim=128)
    offsets, rows = case.inputs.layout_kv.offsets, case.inputs.k.shape[0]
    tables = tuple(tile_table(offsets, offsets, rows, rows, n) for n in (ROWS, 2 * ROWS))
    with mock.patch.object(launch_backward, "backward_config", return_value=TWO_CTAS):
        case.check(case.run(ctas=4, tables=tables, outputs=()))


def test_a_switch_asks_for_pairs_and_their_tables(monkeypatch):
    monkeypatch.setenv("JAGGED_ATTN_BLACKWELL_BACKWARD", "two_ctas=1,q_stages=1")
    for cached in (backward_config, block_kv):
        cached.cache_clear()
    assert backward_config(128) == backward_config(128, None, 256) == TWO_CTAS
    requests = [
        capability.table_requests(spec, Arch("cuda", (10, 0)))[1:]
        for spec in (CASES["self"].spec, broadcast.problem(1, (1,), dim=128).spec)
    ]
    assert requests[0] == (TableRequest("kv", 2 * ROWS, "q"),)
    assert requests[1] == (TableRequest("kv", ROWS, "kv"), TableRequest("kv", 2 * ROWS, "kv"))
    monkeypatch.undo()
    for cached in (backward_config, block_kv):
        cached.cache_clear()


@pytest.mark.parametrize("hop", [0.0, 400.0])
def test_the_performance_model_of_pairs_does_the_work_of_one_cta(hop):
    workload = Workload("two", "self", 2, 512, "constant", num_heads=1)
    lengths = Lengths((512, 300), (512, 300))
    alone = blackwell.predict_backward(B200, workload, lengths)
    with mock.patch.object(blackwell, "backward_config", return_value=TWO_CTAS):
        pairs = blackwell.predict_backward(B200, workload, lengths, hop)
    # 300 keys are three tiles, and two pairs of tiles.
    assert pairs.flop / alone.flop == pytest.approx((2 * 2 * 4 + 2 * 2 * 3) / (4 * 4 + 3 * 3))
