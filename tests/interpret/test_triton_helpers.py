"""Device helpers against the definitions in PyTorch: masks, activations, bounds, tile counts."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged_attn.activations import ELEMENTWISE
from jagged_attn.backends._jit import tile_tables
from jagged_attn.layout import row_bounds
from jagged_attn.masks import BlockDiagonal, Causal, Full, Mask, SlidingWindow
from jagged_attn.schedule.tiles import tile_table

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
if os.environ.get("TRITON_INTERPRET") == "1":
    import helper_kernels

    from jagged_attn.backends._jit.interpreter import quiet_arithmetic

MASKS = [
    Full(),
    Causal(),
    Causal("top_left"),
    SlidingWindow(5, 3),
    SlidingWindow(0, 0, "top_left"),
    SlidingWindow(None, 2),
    SlidingWindow(4, None),
    BlockDiagonal(7),
]


def allowed_pairs(mask: Mask, len_q: int, len_kv: int) -> torch.Tensor:
    i, j = torch.arange(len_q)[:, None], torch.arange(len_kv)[None, :]
    lo, hi = mask.key_range(i, len_q, len_kv)
    return (lo <= j) & (j < hi)


@pytest.mark.parametrize(("len_q", "len_kv"), [(23, 23), (11, 29), (31, 13)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_key_ranges_and_query_ranges_hold_the_same_pairs(mask: Mask, len_q: int, len_kv: int) -> None:
    if isinstance(mask, BlockDiagonal) and len_q != len_kv:
        pytest.skip("block-diagonal is self-attention")
    expected = allowed_pairs(mask, len_q, len_kv)
    ranges = torch.full((4, 32), -7, dtype=torch.int32)
    helper_kernels.ranges[(1,)](ranges, len_q, len_kv, MASK=mask.code, BLOCK=32)
    by_query = torch.zeros_like(expected)
    for i in range(len_q):
        by_query[i, ranges[0, i] : ranges[1, i]] = True
    by_key = torch.zeros_like(expected)
    for j in range(len_kv):
        by_key[ranges[2, j] : ranges[3, j], j] = True
    assert torch.equal(by_query, expected)
    assert torch.equal(by_key, expected)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_split_covers_every_allowed_pair_and_masks_none_of_the_main_part(mask: Mask) -> None:
    block_q, block_kv, length = 16, 8, 45
    allowed = allowed_pairs(mask, length, length)
    for first in range(0, length, block_q):
        rows = allowed[first : first + block_q]
        cuts = torch.zeros(4, dtype=torch.int32)
        helper_kernels.split[(1,)](cuts, first, length, MASK=mask.code, BLOCK_Q=block_q, BLOCK_KV=block_kv)
        begin, main_begin, main_end, end = cuts.tolist()
        assert not rows[:, : max(begin, 0)].any()
        assert not rows[:, max(end, 0) :].any()
        assert rows[:, main_begin:main_end].all()
        assert begin % block_kv == main_begin % block_kv == main_end % block_kv == 0


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_activations_and_derivatives_are_those_of_the_reference(name: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 505), torch.tensor([0.0, -0.0, 3.0, -3.0, 1e-3, -1e-3, 100.0])])
    value, slope = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    with quiet_arithmetic():
        helper_kernels.activation[(1,)](x, value, slope, ACT=name, BLOCK=512)
    # In fp32, a few roundings of numbers as large as x.
    bound = 8 * torch.finfo(torch.float32).eps * x.abs().clamp_min(1.0)
    exact = ELEMENTWISE[name]
    assert ((value.double() - exact.value(x.double())).abs() <= bound * x.abs().clamp_min(1.0)).all()
    assert ((slope.double() - exact.derivative(x.double())).abs() <= bound).all()


@pytest.mark.parametrize("offsets", [[0, 3, 3, 10], [0, 99, 5, 7], [-4, 2, -1, 400], [0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bounds_stay_within_the_rows_that_exist(offsets: list[int], dtype: torch.dtype) -> None:
    total, tensor = 12, torch.tensor(offsets, dtype=dtype)
    count = len(offsets) - 1
    rows = torch.full((count + 1, 2), -7, dtype=torch.int64)
    helper_kernels.bounds[(count + 1,)](rows, tensor, count, total)
    starts, ends = row_bounds(tensor, total)
    assert torch.equal(rows[:count, 0], starts)
    assert torch.equal(rows[:count, 0] + rows[:count, 1], ends)
    assert rows[count].tolist() == [ends[-1].item() if count else 0, total - (ends[-1].item() if count else 0)]


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [16, 0, 17, 15], [40]], ids=str)
def test_tiles_are_counted_up_to_the_padding(lengths: list[int]) -> None:
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()])
    total = int(offsets[-1]) + 3
    table = tile_table(offsets, offsets, total, total, 16)
    count = torch.full((1,), -7, dtype=torch.int32)
    helper_kernels.tiles[(1,)](count, table, table.shape[0])
    assert count.item() == sum(-(-n // 16) for n in lengths) + 1


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3)), max_size=70),
    st.integers(0, 20),
    st.sampled_from([1, 16, 64]),
)
def test_the_kernel_of_tile_tables_counts_what_pytorch_sorts(
    lengths: list[tuple[int, int]], extra: int, block: int
) -> None:
    rows, costs = (torch.tensor([0, *(pair[i] for pair in lengths)], dtype=torch.int32).cumsum(0) for i in (0, 1))
    sizes = int(rows[-1]) + extra, int(costs[-1])
    got = tile_tables.tile_table(rows, costs.int(), *sizes, block)
    assert torch.equal(got, tile_table(rows, costs, *sizes, block))


@pytest.mark.parametrize("offsets", [(), (0,), (5, 4, 3, 2), (0, 90, 40, 100), (-3, 7, 2**40, 9)], ids=str)
def test_the_kernel_of_tile_tables_clamps_offsets_as_pytorch_does(offsets: tuple[int, ...]) -> None:
    bad = torch.tensor(offsets, dtype=torch.int64)
    assert torch.equal(tile_tables.tile_table(bad, bad, 64, 64, 16), tile_table(bad, bad, 64, 64, 16))
