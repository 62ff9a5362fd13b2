"""The Blackwell kernel of the broadcast-Q backward, through their host function, against the reference in float64."""

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from broadcast_q_case import TAIL, BroadcastQCase

from jagged_attn.backends.base import Geometry
from jagged_attn.backends.tlx_blackwell import launch_backward
from jagged_attn.backends.tlx_blackwell import launch_broadcast_q as launch
from jagged_attn.schedule.blackwell import ROWS
from jagged_attn.schedule.tiles import tile_table
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import Schedule, standard_schedules

LENGTHS = (0, 1, 127, 128, 129, 300, 0)
# Tiles enough that CTAs compete for chunks, and that rings wrap.
SHORT = (129, 0, 1, 300)
ROLES = ("default", "gradients", "mma", "task3")
RANDOM = Schedule("random", 0)
# fbtriton ends a specialised kernel of a cluster with a barrier of the cluster.
RULES = replace(HOUSE_RULES, cluster_end=True)
# Every element is written once, whatever was there; `desc_dq` is the workspace.
OUTPUTS = ("desc_dk", "desc_dv", "desc_dq", "dq")


class Problem(BroadcastQCase):
    def run(self, schedule=RANDOM, ctas=2, chunk=2, config=None, outputs=OUTPUTS, **changes):
        """The gradients from ``ctas`` CTAs a head, with ``changes`` to the arguments of the host function."""
        x = self.inputs
        offsets, rows = x.layout_kv.offsets, x.k.shape[0]
        arguments = {
            **{name: getattr(x, name) for name in ("dout", "q", "k", "v")},
            "out": self.out,
            "lse": self.lse,
            "geometry": Geometry(None, offsets, ()),
            "spec": self.spec,
            "tables": (tile_table(offsets, offsets, rows, rows, ROWS),),
        }
        chosen = launch.backward_config
        with (
            mock.patch.object(launch, "split_chunks", return_value=(ctas, chunk)),
            mock.patch.object(launch_backward, "num_processors", return_value=ctas),
            mock.patch.object(launch, "backward_config", lambda *facts: config or chosen(*facts)),
            emulated_launches(Launch(schedule, RULES, outputs=outputs, scratch=("slots",), arch=100)),
        ):
            return launch.backward(**{**arguments, **changes})


@functools.cache
def problem(num_queries, lengths=LENGTHS, act="softmax", **facts):
    return Problem.make(num_queries, lengths, act, **facts)


@pytest.mark.emulator(seeds=1, roles=ROLES)
def test_up_to_64_queries_under_every_policy(schedule):
    case = problem(40, SHORT, tail=3)
    case.check(case.run(schedule))


@pytest.mark.emulator(seeds=1, roles=ROLES)
def test_up_to_128_queries_under_every_policy(schedule):
    case = problem(72, (129, 0, 130), tail=3, dim=128)
    case.check(case.run(schedule))


@pytest.mark.slow
@pytest.mark.parametrize(("num_queries", "dim"), [(40, 64), (72, 64), (40, 128), (72, 128)])
def test_right_over_all_policies_and_many_seeds(num_queries, dim):
    case = problem(num_queries, SHORT, tail=3, dim=dim)
    for schedule in standard_schedules(seeds=50, roles=ROLES):
        case.check(case.run(schedule))


@pytest.mark.parametrize("num_queries", [1, 65, pytest.param(64, marks=pytest.mark.slow), 128])
def test_numbers_of_queries(num_queries):
    case = problem(num_queries)
    case.check(case.run(chunk=3))


@pytest.mark.parametrize("num_queries", [64, 128])
def test_head_dim_of_128_and_two_heads(num_queries):
    case = problem(num_queries, (65,), heads=2, dim=128, tail=3)
    case.check(case.run())


@pytest.mark.parametrize("num_queries", [30, 100])
@pytest.mark.parametrize("act", ["silu", "relu_square"])
def test_element_wise_activations_and_out_scale(num_queries, act):
    case = problem(num_queries, (1, 100), act, out_scale=0.25)
    case.check(case.run())


@pytest.mark.parametrize("num_queries", [50, 100])
def test_softmax_with_out_scale_in_fp16(num_queries):
    case = problem(num_queries, (1, 100), dtype=torch.float16, out_scale=0.25)
    case.check(case.run())


@pytest.mark.parametrize("num_queries", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_one_cta_takes_all(num_queries):
    case = problem(num_queries, SHORT)
    case.check(case.run(ctas=1, chunk=8))


@pytest.mark.parametrize("num_queries", [40, 100])
@pytest.mark.parametrize("tail", [0, 70])
def test_no_keys_at_all(num_queries, tail):
    case = problem(num_queries, (0, 0), tail=tail)
    # Without rows nothing is launched.
    grads = case.run(outputs=OUTPUTS if tail else ())
    assert all(not x.any() for x in grads)


def test_no_sequences():
    case = problem(8, ())
    assert all(not x.any() for x in case.run())


def test_no_queries():
    assert all(not x.any() for x in problem(0, SHORT).run())


@pytest.mark.parametrize("num_queries", [40, 100])
def test_static_chunks_repeat_bit_for_bit_and_dk_dv_always_do(num_queries):
    case = problem(num_queries, (65, 0, 1, 64), tail=3)
    spec = replace(case.spec, deterministic=True)
    first, second = (case.run(s, spec=spec) for s in (Schedule("eager", 0), Schedule("random", 7)))
    case.check(first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    dynamic = case.run(Schedule("lazy", 0), ctas=3, chunk=1)
    assert all(torch.equal(a, b) for a, b in zip(first[1:], dynamic[1:], strict=True))


@pytest.mark.parametrize("num_queries", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_a_sequence_keeps_its_nan_to_itself(num_queries):
    case = problem(num_queries, (5, 10, 30), tail=0)
    spec = replace(case.spec, deterministic=True)
    x = case.inputs
    k, v, dout = x.k.clone(), x.v.clone(), x.dout.clone()
    k[5:15], v[5:15], dout[1] = float("nan"), float("inf"), float("nan")
    _, dk, dv = case.run(spec=spec, k=k, v=v, dout=dout)
    _, want_dk, want_dv = case.run(spec=spec)
    others = torch.ones(len(k), dtype=torch.bool)
    others[5:15] = False
    assert torch.equal(dk[others], want_dk[others])
    assert torch.equal(dv[others], want_dv[others])
    assert not dk[5:15].isfinite().any()


@pytest.mark.parametrize("num_queries", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_rows_of_no_sequence_give_nothing(num_queries):
    case = problem(num_queries, (3, 0))
    spec = replace(case.spec, deterministic=True)
    k, v = case.inputs.k.clone(), case.inputs.v.clone()
    k[-TAIL:], v[-TAIL:] = float("nan"), float("inf")
    got, want = case.run(spec=spec, k=k, v=v), case.run(spec=spec)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not got[1][-TAIL:].any()
    assert not got[2][-TAIL:].any()


@pytest.mark.parametrize("num_queries", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_offsets_beyond_the_rows_are_clamped(num_queries):
    case = problem(num_queries, (65, 0, 1), tail=0)
    offsets = case.inputs.layout_kv.offsets.clone()
    offsets[-1] += 1000
    case.check(case.run(geometry=Geometry(None, offsets, ())))


@pytest.mark.parametrize("num_queries", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_strided_inputs(num_queries):
    case = problem(num_queries, (65, 0), heads=2, tail=3)
    x = case.inputs
    rows, heads, dim = x.k.shape
    fused = torch.full((rows, 3 * heads, dim), float("nan"), dtype=x.k.dtype)
    fused[:, :heads], fused[:, heads : 2 * heads] = x.k, x.v
    q = x.q.transpose(0, 1).contiguous().transpose(0, 1)
    dout = x.dout.permute(2, 1, 3, 0).contiguous().permute(3, 1, 0, 2)
    case.check(case.run(k=fused[:, :heads], v=fused[:, heads : 2 * heads], q=q, dout=dout))


def test_an_expanded_gradient():
    case = problem(40, (65, 3), act="relu", tail=0)
    dout = torch.ones((), dtype=torch.bfloat16)
    expanded, plain = (x for x in (dout.expand(2, 40, 1, 64), torch.ones(2, 40, 1, 64, dtype=torch.bfloat16)))
    spec = replace(case.spec, deterministic=True)
    got, want = case.run(spec=spec, dout=expanded), case.run(spec=spec, dout=plain)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_many_sequences_make_few_tiles():
    case = problem(20, (1,) * 20 + (0,) * 40, act="silu", tail=0)
    case.check(case.run(chunk=8))


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_queries_than_fit_a_tile(deterministic):
    case = problem(130, (129, 0, 5), tail=3)
    case.check(case.run(spec=replace(case.spec, deterministic=deterministic), outputs=()))


def test_a_chunk_is_whole_where_there_is_work():
    with mock.patch.object(launch, "num_processors", return_value=132):
        assert launch.split_chunks(5000, 4, launch.num_processors(torch.device("cpu")), launch._CHUNK_TILES) == (33, 4)
        assert launch.split_chunks(40, 4, launch.num_processors(torch.device("cpu")), launch._CHUNK_TILES) == (33, 1)
        assert launch.split_chunks(300, 200, launch.num_processors(torch.device("cpu")), launch._CHUNK_TILES) == (1, 4)
