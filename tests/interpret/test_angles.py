"""Cosines and sines of rows' angles: the kernel against the formula in float64, and where the formula stands for it."""

import importlib
import itertools

import pytest
import torch
from targets import INTERPRETED
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from waiting import no_waiting

from jagged_attn.angles import Angles, _formula, bounds_of_rows, rotation_of
from jagged_attn.jagged_tensor import to_jagged_tensor
from jagged_attn.modules import RotaryTemporalEmbedding

_ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
_IN_INTERPRETER = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (make test-interpret)"),
]
on_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreter", marks=_IN_INTERPRETER),
        pytest.param("cuda", id="gpu", marks=_ON_GPU),
    ],
)
# The last rows belong to no sequence; 64 columns take 32 rows a program.
LENGTHS, REST = [0, 1, 31, 0, 32, 33, 0, 7, 0], 5
ROWS = sum(LENGTHS) + REST
EPS = torch.finfo(torch.float32).eps


def angles(head_dim: int = 64, gap: str = "previous", combine: str = "sum") -> Angles:
    return Angles(head_dim, 10_000.0, 86_400.0, gap, combine)  # type: ignore[arg-type]


def offsets_of(lengths: list[int], device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=dtype)


def times(device: str, dtype: torch.dtype) -> Tensor:
    """Seconds since 1970 where the dtype tells them apart; ascending, also from one sequence to the next."""
    steps = torch.rand(ROWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(14).exp()
    first = 0 if dtype == torch.float32 else 1_700_000_000
    return (steps.cumsum(0) + first).to(dtype).to(device)


def assert_right(actual: Tensor, offsets: Tensor, timestamps: Tensor | None, options: Angles) -> None:
    """Four roundings of an angle (of logarithm, sum, frequency and product) and one of a function of it."""
    values = torch.empty(actual.shape[1], 1, dtype=torch.float64, device=actual.device)
    exact = _formula(values, timestamps, options, bounds_of_rows(offsets, len(values)))
    # What the angles are at most: the largest number of turns by each frequency, of which the first is 1.
    most = actual.shape[1] + 8
    columns = torch.arange(options.head_dim // 2, device=actual.device)
    if timestamps is not None and options.combine == "split":
        columns %= options.head_dim // 4
    largest = most * options.base ** (columns * -2.0 / options.head_dim)
    assert actual.dtype == torch.float32
    assert actual.shape == exact.shape
    assert ((actual - exact).abs() <= EPS * (2 * largest + 1)).all()


@on_device
@pytest.mark.parametrize("options", [{}, {"gap": "to_last"}, {"combine": "split"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64, None], ids=str)
@pytest.mark.parametrize("head_dim", [4, 64, 12])
@pytest.mark.usefixtures("poisoned")
def test_angles_are_those_of_the_formula(
    device: str, options: dict[str, str], dtype: torch.dtype | None, head_dim: int
) -> None:
    timestamps = None if dtype is None else times(device, dtype)
    values, facts = torch.empty(ROWS, 1, device=device), angles(head_dim, **options)
    for offsets_dtype in (torch.int32, torch.int64):
        offsets = offsets_of(LENGTHS, device, offsets_dtype)
        assert_right(rotation_of(values, offsets, timestamps, facts), offsets, timestamps, facts)


@on_device
@pytest.mark.parametrize("gap", ["previous", "to_last"])
@pytest.mark.parametrize("lengths", [[], [ROWS], [0, 0, 0], [1] * ROWS, [ROWS - 1, 1]], ids=str)
def test_any_number_of_sequences(device: str, lengths: list[int], gap: str) -> None:
    values, timestamps, facts = torch.empty(ROWS, 1, device=device), times(device, torch.int64), angles(4, gap)
    offsets = offsets_of(lengths, device)
    expected = rotation_of(values, offsets, timestamps, facts)
    assert_right(expected, offsets, timestamps, facts)
    assert rotation_of(values[:0], offsets, timestamps[:0], facts).shape == (2, 0, 2)
    if not lengths:
        assert torch.equal(rotation_of(values, offsets[:0], timestamps, facts), expected)


@on_device
def test_gaps_that_descend_count_as_none_and_nan_stays(device: str) -> None:
    values, offsets = torch.empty(4, 1, device=device), offsets_of([4], device)
    options = angles(4)
    for dtype in (torch.int32, torch.float64):
        down = torch.tensor([9, 7, 7, 2], device=device, dtype=dtype)
        assert_right(rotation_of(values, offsets, down, options), offsets, down, options)
    gone = torch.tensor([1.0, torch.nan, 3.0, 4.0], device=device)
    assert rotation_of(values, offsets, gone, options).isnan().any(2)[0].tolist() == [False, True, True, False]


@on_device
def test_differences_are_taken_in_the_dtype_of_the_timestamps(device: str) -> None:
    values, offsets, facts = torch.empty(3, 1, device=device), offsets_of([3], device), angles(4, combine="split")
    late = torch.tensor([2**60, 2**60 + 1, 2**60 + 3], device=device)
    small = rotation_of(values, offsets, late - 2**60, facts)
    assert torch.equal(rotation_of(values, offsets, late, facts), small)


@on_device
@pytest.mark.parametrize("offsets", [[0, 3, 99], [5, 1, 4], [-7, 2, -1], [0, 99, 2]], ids=str)
def test_offsets_that_are_none_stay_within_the_rows(device: str, offsets: list[int]) -> None:
    timestamps = torch.arange(7, device=device)
    for gap in ("previous", "to_last"):
        out = rotation_of(
            torch.empty(7, 1, device=device), torch.tensor(offsets, device=device), timestamps, angles(4, gap)
        )
        assert out.isfinite().all()


@on_device
def test_the_module_runs_the_kernel_where_it_can(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, calls = importlib.import_module("jagged_attn.backends._jit.angles"), []
    write = kernels.write_rotation
    monkeypatch.setattr(kernels, "write_rotation", lambda *args: (calls.append(args), write(*args)))
    offsets, timestamps = offsets_of(LENGTHS, device), times(device, torch.float64)
    module = RotaryTemporalEmbedding(6, gap="to_last")
    x = to_jagged_tensor(torch.empty(ROWS, 1, device=device, requires_grad=True), offsets)
    strided = torch.stack([timestamps, timestamps], 1)[:, 0]
    expected = module(x, timestamps)
    assert torch.equal(module(x, strided), expected)
    assert torch.equal(module(x, to_jagged_tensor(timestamps, offsets)), expected)
    assert_right(expected, offsets, timestamps, Angles(6, module.base, module.time_scale, "to_last", "sum"))
    assert len(calls) == 3
    assert not expected.requires_grad
    assert module(to_jagged_tensor(x.values().double(), offsets), timestamps).dtype == torch.float64
    assert module(x, timestamps.clone().requires_grad_()).requires_grad
    assert len(calls) == 3


def test_graphs_hold_the_formula() -> None:
    offsets, timestamps = offsets_of([3, 0, 2], "cpu"), torch.arange(5) * 1000
    values = torch.empty(5, 1)
    expected = _formula(values, timestamps, angles(4), bounds_of_rows(offsets, 5))

    def run(x: Tensor, bounds: Tensor, at: Tensor) -> Tensor:
        return rotation_of(x, bounds, at, angles(4))

    traced = make_fx(run)(values, offsets, timestamps)
    assert torch.ops.aten.cos.default in {node.target for node in traced.graph.nodes}
    assert torch.equal(traced(values, offsets, timestamps), expected)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(values, offsets, timestamps), expected)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_ON_GPU)])
class TestOnDevice:
    def test_nothing_waits_and_a_graph_of_it_can_be_replayed(self, device: str) -> None:
        x = to_jagged_tensor(torch.empty(ROWS, 1, device=device), offsets_of(LENGTHS, device))
        timestamps, module = times(device, torch.int64), RotaryTemporalEmbedding(64)
        expected = module(x, timestamps)
        with no_waiting():
            module(x, timestamps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x, timestamps)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)

    def test_it_is_one_launch(self, device: str) -> None:
        x = to_jagged_tensor(torch.empty(ROWS, 1, device=device), offsets_of(LENGTHS, device))
        timestamps, module = times(device, torch.int64), RotaryTemporalEmbedding(64)
        module(x, timestamps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            module(x, timestamps)
            torch.cuda.synchronize()
        assert sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA") == 1


@on_device
@pytest.mark.parametrize("gap", ["previous", "to_last"])
def test_int32_timestamps_may_be_further_apart_than_an_int32(device: str, gap: str) -> None:
    values, offsets, facts = torch.empty(2, 1, device=device), offsets_of([2], device), angles(4, gap=gap)
    far = torch.tensor([-(2**31), 2**31 - 1], device=device)
    assert torch.equal(rotation_of(values, offsets, far.int(), facts), rotation_of(values, offsets, far.long(), facts))
