"""The eager backend's own promises: buckets, chunks, tiles, what is not copied, and both ways to compute a chunk."""

import dataclasses
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from cases import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_attn as ja
from jagged_attn.backends import _padded, eager
from jagged_attn.backends._buckets import Chunk, Cost, Plan, plan_sync
from jagged_attn.backends._rows import RowIndex, RowRange, SequenceIndex
from jagged_attn.backends.base import Geometry
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.inputs import AttentionInputs, attention_inputs, draw_lengths
from jagged_attn.testing.tolerance import assert_within

# Both sides of the ends of classes (16, 32, 128, 144), equal lengths that follow one another, and none.
LENGTHS = torch.tensor([0, 1, 15, 16, 17, 17, 17, 31, 33, 0, 127, 128, 129, 143, 145, 1, 0])
MIX = ("gelu", "softmax", "softmax", "relu_square", "softmax", "silu")
OPTIONS: dict[str, dict[str, Any]] = {
    "flash": {},
    "flash-causal": {"mask": ja.Causal()},
    "matmul": {"out_scale": 0.7},
    "matmul-causal": {"mask": ja.Causal(), "out_scale": 0.7},
    "window": {"mask": ja.SlidingWindow(5, 2)},
    "block-diagonal": {"mask": ja.BlockDiagonal(11)},
    "gelu": {"activation": "gelu"},
    "mix": {"activation": MIX},
    "mix-window": {"activation": MIX, "mask": ja.SlidingWindow(3, 1)},
}
KINDS = ("self", "cross", "broadcast_q")


def inputs_of(kind: str, lengths: Tensor = LENGTHS, **dims: Any) -> AttentionInputs:
    dims = {"num_heads": 6, "num_kv_heads": 6, "head_dim": 13, "extra_rows": 3} | dims
    return attention_inputs(
        lengths,
        lengths.roll(5) if kind == "cross" else None,
        num_shared_queries=7 if kind == "broadcast_q" else None,
        **dims,
    )


def spec_of(inputs: AttentionInputs, **fields: Any) -> AttentionSpec:
    kind: Any = "broadcast_q" if inputs.layout_q is None else "self"
    heads = (inputs.q.shape[1], inputs.k.shape[1], inputs.k.shape[2], inputs.v.shape[2])
    return dataclasses.replace(
        AttentionSpec(kind, inputs.q.dtype, *heads, ja.Full(), ("softmax",), 0.3, 1.0, False), **fields
    )


def run_directly(inputs: AttentionInputs, **fields: Any) -> tuple[Tensor, ...]:
    """Forward and backward without the operators, so that a dispatch mode sees the steps."""
    spec = spec_of(inputs, **fields)
    offsets_q = None if inputs.layout_q is None else inputs.layout_q.offsets
    geometry = Geometry(offsets_q, inputs.layout_kv.offsets, ())
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = eager.forward(q, k, v, geometry, spec)
    return eager.backward(inputs.dout, q, k, v, out, lse, geometry, spec)


class Observer(TorchDispatchMode):
    """Counts operations, and keeps the size of the largest tensor that one of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and not func.is_view:
                self.largest = max(self.largest, x.numel())
        return result


def check(inputs: AttentionInputs, **options: Any) -> None:
    """Compare with the reference in float64: as close as the reference itself is in the dtype of the inputs."""
    exact = run(inputs.to(torch.float64), "reference", **options)
    rounded = run(inputs, "reference", **options)
    actual = run(inputs, "eager", **options)
    for name in exact:
        assert_within(name, actual[name], exact[name], rounded[name])


def check_exactly(inputs: AttentionInputs, **options: Any) -> None:
    """Compare with the reference, both in float64."""
    exact, actual = (run(inputs, backend, **options) for backend in ("reference", "eager"))
    for name in exact:
        torch.testing.assert_close(actual[name], exact[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in OPTIONS for kind in KINDS if kind == "self" or name != "block-diagonal"]
)
def test_buckets_of_many_lengths_equal_the_reference_in_float64(name: str, kind: str) -> None:
    check_exactly(inputs_of(kind, dtype=torch.float64), **OPTIONS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["flash", "flash-causal", "matmul", "window", "gelu", "mix"])
def test_accumulates_in_float32(name: str, dtype: torch.dtype) -> None:
    check(inputs_of("self", dtype=dtype), **OPTIONS[name])


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_take_both_ways(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(kind, num_kv_heads=2, dtype=torch.float64)
    check_exactly(inputs)
    monkeypatch.setattr(_padded, "flash_runs", lambda spec, device_type: False)
    check_exactly(inputs)


@pytest.mark.parametrize("mask", [ja.Full(), ja.Causal()], ids=str)
def test_without_flash_kernels_the_numbers_stay(mask: ja.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("self", dtype=torch.float64)
    flash = run(inputs, "eager", mask=mask)
    monkeypatch.setattr(_padded, "flash_runs", lambda spec, device_type: False)
    for name, x in run(inputs, "eager", mask=mask).items():
        torch.testing.assert_close(x, flash[name], rtol=1e-12, atol=1e-12)


def test_flash_kernels_run_where_they_are_meant_to(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    real = _padded.flash_forward
    monkeypatch.setattr(_padded, "flash_forward", lambda *args: used.append(1) or real(*args))
    for options, expected in (({}, True), ({"mask": ja.Causal()}, True), ({"mask": ja.SlidingWindow(5, 0)}, False)):
        used.clear()
        run(inputs_of("self"), "eager", **options)
        assert bool(used) == expected, options


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_tiles_that_see_no_key(align: Any) -> None:
    inputs = attention_inputs(
        torch.tensor([1, 3, 300]), torch.tensor([300, 270, 5]), num_heads=2, head_dim=5, dtype=torch.float64
    )
    for mask in (ja.Causal(align), ja.SlidingWindow(2, 1, align)):
        check_exactly(inputs, mask=mask)
        check_exactly(inputs, mask=mask, activation="gelu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["matmul", "matmul-causal", "window", "mix-window", "gelu"])
def test_sequences_too_long_for_one_tile(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_padded, "_TILE_SCORES", 1500)
    monkeypatch.setitem(eager._BUDGET, "cpu", 1500)
    check_exactly(inputs_of(kind, torch.tensor([0, 1, 130, 129, 40, 40, 7]), dtype=torch.float64), **OPTIONS[name])


def repeated_row(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def columns_of_a_wide_buffer(x: Tensor) -> Tensor:
    return torch.cat([torch.full_like(x, torch.nan), x], dim=2)[..., x.shape[2] :]


@pytest.mark.parametrize("strided", [repeated_row, columns_of_a_wide_buffer])
@pytest.mark.parametrize("name", ["flash", "matmul", "gelu"])
def test_sequences_of_one_length_in_any_strides(name: str, strided: Callable[[Tensor], Tensor]) -> None:
    inputs = inputs_of("self", torch.full((5,), 17), extra_rows=0, dtype=torch.float64)
    fields = {x: strided(getattr(inputs, x)) for x in ("q", "k", "v", "dout")}
    views = dataclasses.replace(inputs, **fields)
    # run() clones its leaves, which keeps strides but not overlaps: the steps are called with the views themselves.
    options = {"flash": {}, "matmul": {"out_scale": 0.7}, "gelu": {"activation": ("gelu",)}}[name]
    packed = dataclasses.replace(inputs, **{x: y.contiguous() for x, y in fields.items()})
    for got, expected in zip(run_directly(views, **options), run_directly(packed, **options), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def plan_of(lengths_q: list[int] | int, lengths_kv: list[int], cost: Cost, is_self: bool = False) -> Plan:
    offsets_kv = ja.JaggedLayout.from_lengths(torch.tensor(lengths_kv, dtype=torch.int64)).offsets
    if isinstance(lengths_q, int):
        return plan_sync(None, offsets_kv, lengths_q, sum(lengths_kv), cost)
    if is_self:
        return plan_sync(offsets_kv, offsets_kv, sum(lengths_kv), sum(lengths_kv), cost)
    offsets_q = ja.JaggedLayout.from_lengths(torch.tensor(lengths_q, dtype=torch.int64)).offsets
    return plan_sync(offsets_q, offsets_kv, sum(lengths_q), sum(lengths_kv), cost)


def rows_of(chunk: Chunk, side: str, total_rows: int) -> list[list[int]]:
    """The packed rows of each sequence of a chunk."""
    rows = chunk.rows_q if side == "q" else chunk.rows_kv
    if isinstance(rows, RowRange):
        index = torch.arange(rows.first, rows.first + rows.count * rows.length)
    else:
        assert isinstance(rows, RowIndex)
        index = rows.targets
        is_padding = torch.zeros_like(index, dtype=torch.bool).index_fill_(0, rows.padding, True)
        assert torch.equal(is_padding, index == total_rows)
        assert torch.equal(rows.sources[~is_padding], index[~is_padding])
        assert ((rows.sources >= 0) & (rows.sources < total_rows)).all()
    return [[r for r in line if r < total_rows] for line in index.view(rows.count, rows.length).tolist()]


LENGTH_PAIRS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=40)


@settings(max_examples=60)
@given(pairs=LENGTH_PAIRS, is_self=st.booleans(), budget=st.sampled_from([1, 5_000, 1 << 19]))
def test_every_row_with_work_is_in_exactly_one_chunk(pairs: list[tuple[int, int]], is_self: bool, budget: int) -> None:
    lengths_kv = [pair[1] for pair in pairs]
    lengths_q = lengths_kv if is_self else [pair[0] for pair in pairs]
    plan = plan_of(lengths_q, lengths_kv, Cost(budget, 3, 7, True), is_self)
    has_work = [q > 0 and kv > 0 for q, kv in zip(lengths_q, lengths_kv, strict=True)]
    for side, lengths, fills in (("q", lengths_q, plan.fills_q), ("kv", lengths_kv, plan.fills_kv)):
        total = sum(lengths)
        found = [rows for chunk in plan.chunks for rows in rows_of(chunk, side, total)]
        starts = [sum(lengths[:b]) for b in range(len(lengths))]
        expected = [
            list(range(start, start + n)) for start, n, works in zip(starts, lengths, has_work, strict=True) if works
        ]
        assert sorted(found) == sorted(expected)
        assert fills == (len(list(chain(*found))) == total)


@settings(max_examples=60)
@given(pairs=LENGTH_PAIRS, budget=st.sampled_from([1, 5_000, 1 << 19]))
def test_padding_and_chunks_are_bounded(pairs: list[tuple[int, int]], budget: int) -> None:
    lengths_q, lengths_kv = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for chunk in plan_of(lengths_q, lengths_kv, Cost(budget, 3, 7, False)).chunks:
        n, longest = chunk.rows_q.count, (chunk.rows_q.length, chunk.rows_kv.length)
        for lengths, most in zip((chunk.lengths_q, chunk.lengths_kv), longest, strict=True):
            shortest = lengths if isinstance(lengths, int) else int(lengths.min())
            assert most < shortest + 16 or most <= 1.125 * shortest
        assert n == 1 or n * (3 * longest[0] * longest[1] + 7 * sum(longest)) <= budget


@pytest.mark.parametrize("extra", [0, 4])
def test_sequences_of_one_length_are_taken_as_views(extra: int) -> None:
    lengths = [0, 17, 17, 17] + [0] * extra
    (chunk,) = plan_of(lengths, lengths, Cost(1, 1, 1, True), is_self=True).chunks
    assert chunk.rows_q is chunk.rows_kv
    assert isinstance(chunk.rows_q, RowRange)
    assert (chunk.rows_q.count, chunk.rows_q.length, chunk.rows_q.first) == (3, 17, 0)


def test_shared_queries_index_whole_sequences() -> None:
    plan = plan_of(5, [20, 0, 2, 19], Cost(1 << 19, 1, 1, True))
    taken = [chunk.rows_q for chunk in plan.chunks]
    assert all(isinstance(rows, SequenceIndex) and rows.length == 5 for rows in taken)
    assert sorted(torch.cat([rows.sequences for rows in taken]).tolist()) == [0, 2, 3]
    assert not plan.fills_q


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["flash", "flash-causal", "matmul", "window", "gelu"])
def test_a_bad_sequence_does_not_reach_its_own_bucket(name: str, bad: float) -> None:
    lengths = torch.tensor([43, 48, 47, 48, 41])
    inputs = inputs_of("self", lengths, extra_rows=0)
    assert len(plan_of(lengths.tolist(), lengths.tolist(), Cost(1 << 19, 6, 6, True)).chunks) == 1
    clean = run(inputs, "eager", **OPTIONS[name])
    start, end = inputs.layout_kv.offsets[2:4].tolist()
    fields = {x: getattr(inputs, x).clone() for x in ("q", "k", "v", "dout")}
    for x in fields.values():
        x[start:end] = bad
    for key, x in run(dataclasses.replace(inputs, **fields), "eager", **OPTIONS[name]).items():
        assert not x[start:end].isfinite().all()
        assert torch.equal(x[:start], clean[key][:start])
        assert torch.equal(x[end:], clean[key][end:])


@pytest.mark.parametrize("activation", [("softmax",), ("gelu",)])
def test_the_number_of_steps_does_not_grow_with_the_batch(activation: tuple[str, ...]) -> None:
    calls = []
    for num_sequences in (64, 1024):
        lengths = draw_lengths("uniform", num_sequences, 31)
        inputs = attention_inputs(lengths, num_heads=1, head_dim=3)
        with Observer() as observer:
            run_directly(inputs, activation=activation)
        calls.append(observer.calls)
    assert calls[1] < 2 * calls[0]


def test_nothing_of_the_size_of_all_sequences_times_shared_queries_but_the_output() -> None:
    num_sequences, num_queries = 3000, 31
    inputs = attention_inputs(torch.full((num_sequences,), 2), num_shared_queries=num_queries, num_heads=3, head_dim=16)
    spec, geometry = spec_of(inputs), Geometry(None, inputs.layout_kv.offsets, ())
    out, lse = eager.forward(inputs.q, inputs.k, inputs.v, geometry, spec)
    with Observer() as observer:
        eager.backward(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, geometry, spec)
    assert observer.largest <= eager._BUDGET["cpu"] < out.numel() / 8


def test_scores_of_a_long_sequence_are_never_whole() -> None:
    inputs = attention_inputs(torch.tensor([3000]), num_heads=2, head_dim=5, value_head_dim=7)
    with Observer() as observer:
        run_directly(inputs)
    assert observer.largest <= _padded._TILE_SCORES < 2 * 3000**2 / 8


def test_keys_outside_the_window_are_not_computed() -> None:
    inputs = attention_inputs(torch.tensor([2001]), num_heads=2, head_dim=5)
    with Observer() as observer:
        run_directly(inputs, mask=ja.SlidingWindow(20, 3))
    tile = _padded._MASKED_TILE
    assert observer.largest <= 2 * tile * (tile + 20 + 3)


def test_one_plan_serves_a_stack_of_layers_and_their_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def counted(*args: Any) -> Plan:
        plans.append(args)
        return plan_sync(*args)

    monkeypatch.setattr(eager, "plan_sync", counted)
    inputs = inputs_of("self")
    x = inputs.q.requires_grad_()
    for _ in range(3):
        x = ja.jagged_attention(x, x, x, ja.JaggedLayout(inputs.layout_kv.offsets), backend="eager")
    x.sum().backward()
    assert len(plans) == 1


def test_plans_stay_on_the_host_whatever_the_default_device() -> None:
    inputs = inputs_of("self")
    expected = run(inputs, "eager")
    layout = ja.JaggedLayout(inputs.layout_kv.offsets.clone())
    with torch.device("meta"):
        out = ja.jagged_attention(inputs.q, inputs.k, inputs.v, layout, backend="eager")
    assert torch.equal(out, expected["out"])
