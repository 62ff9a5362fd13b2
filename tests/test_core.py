"""The core values: layouts, masks, activations, specs, and the errors of the public operations."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_attn as ja
from jagged_attn.activations import ACTIVATIONS, ELEMENTWISE, normalize_activation
from jagged_attn.layout import _DERIVED, _MOST_ENTRIES, derived, row_bounds
from jagged_attn.masks import parse_mask
from jagged_attn.schedule.tiles import max_tiles, tile_table

MASKS = [
    ja.Full(), ja.Causal(), ja.Causal("top_left"), ja.SlidingWindow(3, 0), ja.SlidingWindow(None, 5, "top_left"),
    ja.SlidingWindow(2, None), ja.BlockDiagonal(7),
]  # fmt: skip


def qkv(rows: int = 5, heads: int = 3, dim: int = 8) -> list[torch.Tensor]:
    return list(torch.randn(3, rows, heads, dim).unbind(0))


LAYOUT = ja.JaggedLayout(torch.tensor([0, 2, 2, 5]))


class TestLayout:
    def test_lengths_and_offsets_are_two_views_of_one_thing(self) -> None:
        lengths = torch.tensor([3, 0, 4], dtype=torch.int32)
        layout = ja.JaggedLayout.from_lengths(lengths)
        assert layout.offsets.tolist() == [0, 3, 3, 7]
        assert layout.offsets.dtype == torch.int32
        assert torch.equal(layout.lengths, lengths)
        assert layout.num_sequences == 3

    def test_uniform(self) -> None:
        assert ja.JaggedLayout.uniform(3, 4).offsets.tolist() == [0, 4, 8, 12]
        assert ja.JaggedLayout.uniform(0, 4).num_sequences == 0
        assert ja.JaggedLayout.uniform(3, 0).offsets.tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize(
        ("sizes", "error", "words"),
        [
            (("3", 2), TypeError, "num_sequences must be a non-negative int, got '3'"),
            ((True, 2), TypeError, "num_sequences must be a non-negative int, got True"),
            ((2, 1.5), TypeError, "length must be a non-negative int, got 1.5"),
            ((2, -1), ValueError, "length must not be negative, got -1"),
        ],
    )
    def test_uniform_wants_two_sizes(self, sizes: tuple[int, int], error: type, words: str) -> None:
        with pytest.raises(error, match=words):
            ja.JaggedLayout.uniform(*sizes)

    def test_offsets_with_gaps_are_copied(self) -> None:
        layout = ja.JaggedLayout(torch.tensor([0, 9, 2, 9, 5, 9])[::2])
        assert layout.offsets.tolist() == [0, 2, 5]
        assert layout.offsets.is_contiguous()

    @pytest.mark.parametrize(
        ("offsets", "error", "words"),
        [
            ([0, 1], TypeError, "offsets must be a torch.Tensor, got list"),
            (torch.zeros(3), ValueError, "offsets must be int32 or int64, got torch.float32"),
            (torch.zeros(1, 3, dtype=torch.int64), ValueError, "offsets must have one dimension"),
        ],
    )
    def test_what_is_no_offsets_tensor_is_refused(self, offsets: object, error: type, words: str) -> None:
        with pytest.raises(error, match=words):
            ja.JaggedLayout(offsets)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("offsets", "words"),
        [
            ([1, 2], "offsets must begin with 0, got 1"),
            ([0, 3, 2], r"offsets must not decrease, got offsets\[1\] = 3 and offsets\[2\] = 2"),
            ([0, 3, 9], "offsets must end within the 7 rows of the values, got 9"),
        ],
    )
    def test_validate_sync_names_what_is_wrong(self, offsets: list[int], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            ja.JaggedLayout(torch.tensor(offsets)).validate_sync(7)

    def test_validate_sync_returns_a_good_layout(self) -> None:
        assert LAYOUT.validate_sync(5) is LAYOUT
        assert LAYOUT.validate_sync() is LAYOUT

    @given(st.lists(st.integers(-(2**40), 2**40), max_size=9), st.integers(0, 50))
    def test_row_bounds_are_always_inside(self, offsets: list[int], rows: int) -> None:
        starts, ends = row_bounds(torch.tensor(offsets, dtype=torch.int64), rows)
        assert ((starts >= 0) & (starts <= ends) & (ends <= rows)).all()

    def test_derived_values_live_as_long_as_both_tensors_are_unchanged(self) -> None:
        calls = itertools.count()
        offsets, other = torch.tensor([0, 2]), torch.tensor([0, 3])

        def get(key: str = "a", other: torch.Tensor = other) -> int:
            return derived(offsets, other, key, lambda: next(calls))

        assert [get(), get()] == [0, 0]
        assert get("b") == 1
        other[1] = 4
        assert [get(), get()] == [2, 2]
        offsets[1] = 1
        assert [get(), get()] == [3, 3]
        assert get(other=other.clone()) == 4
        assert get(other=other.clone()) == 5

    def test_a_buffer_that_is_written_each_step_keeps_no_old_values(self) -> None:
        offsets = torch.tensor([0, 2, 5])
        for step in range(9):
            offsets[1] = step % 5
            derived(offsets, offsets, ("key", step), lambda: 0)
        assert len(_DERIVED[id(offsets)].entries) == 1

    def test_derived_values_die_with_their_tensor(self) -> None:
        class Value:
            alive = 0

            def __init__(self) -> None:
                Value.alive += 1

            def __del__(self) -> None:
                Value.alive -= 1

        offsets = torch.tensor([0, 2])
        derived(offsets, offsets, "key", Value)
        assert Value.alive == 1
        address = id(offsets)
        del offsets
        assert Value.alive == 0
        assert address not in _DERIVED

    def test_what_is_derived_beside_one_tensor_has_a_bound(self) -> None:
        offsets = torch.tensor([0, 2])
        for scale in range(3 * _MOST_ENTRIES):
            assert derived(offsets, offsets, scale, lambda scale=scale: scale) == scale  # type: ignore[misc]
        assert len(_DERIVED[id(offsets)].entries) <= _MOST_ENTRIES

    def test_what_an_inference_call_remembers_serves_a_training_step(self) -> None:
        offsets = torch.tensor([0, 2, 5])
        with torch.inference_mode():
            value = derived(offsets, offsets, "key", lambda: offsets.diff())
        assert not value.is_inference()
        assert derived(offsets, offsets, "key", lambda: offsets.diff()) is value

    def test_nothing_is_remembered_for_inference_tensors(self) -> None:
        calls = itertools.count()
        with torch.inference_mode():
            offsets = torch.tensor([0, 2])
        assert [derived(offsets, offsets, "key", lambda: next(calls)) for _ in range(2)] == [0, 1]


class TestTileTable:
    @given(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12),
        st.integers(0, 20),
        st.sampled_from([1, 3, 16, 64]),
    )
    def test_every_row_lies_in_exactly_one_tile(self, lengths: list[tuple[int, int]], extra: int, block: int) -> None:
        rows, cost = (torch.tensor([pair[i] for pair in lengths], dtype=torch.int64) for i in (0, 1))
        layout, cost_layout = ja.JaggedLayout.from_lengths(rows), ja.JaggedLayout.from_lengths(cost)
        total = int(rows.sum()) + extra
        table = tile_table(layout.offsets, cost_layout.offsets, total, int(cost.sum()), block)
        assert table.dtype == torch.int32
        assert len(table) == max_tiles(total, len(lengths), block)
        starts = [*layout.offsets[:-1].tolist(), int(rows.sum())]
        ends = [*layout.offsets[1:].tolist(), total]
        covered, costs, past_the_end = [], [], False
        for sequence, first_row in table.tolist():
            if sequence == -1:
                past_the_end = True
                assert first_row == 0
                continue
            assert not past_the_end
            first = starts[sequence] + first_row
            assert first < ends[sequence]
            covered += range(first, min(first + block, ends[sequence]))
            costs.append(cost[sequence].item() if sequence < len(lengths) else -1)
        assert sorted(covered) == list(range(total))
        assert costs == sorted(costs, reverse=True)

    def test_no_offsets_at_all(self) -> None:
        empty = torch.zeros(0, dtype=torch.int32)
        assert tile_table(empty, empty, 0, 0, 64).tolist() == [[-1, 0]]
        assert tile_table(empty, empty, 70, 70, 64).tolist() == [[0, 0], [0, 64]]


class TestMasks:
    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_code_reads_back(self, mask: ja.Mask) -> None:
        again = parse_mask(mask.code)
        assert again.code == mask.code
        assert again.key_range(5, 9, 4) == mask.key_range(5, 9, 4)

    def test_key_ranges_written_out(self) -> None:
        def seen(mask: ja.Mask, len_q: int, len_kv: int) -> list[list[int]]:
            return [
                [j for j in range(len_kv) if lo <= j < hi]
                for lo, hi in (mask.key_range(i, len_q, len_kv) for i in range(len_q))
            ]

        assert seen(ja.Full(), 2, 3) == [[0, 1, 2]] * 2
        assert seen(ja.Causal(), 3, 3) == [[0], [0, 1], [0, 1, 2]]
        assert seen(ja.Causal(), 2, 4) == [[0, 1, 2], [0, 1, 2, 3]]
        assert seen(ja.Causal(), 4, 2) == [[], [], [0], [0, 1]]
        assert seen(ja.Causal("top_left"), 2, 4) == [[0], [0, 1]]
        assert seen(ja.SlidingWindow(1, 0), 3, 3) == [[0], [0, 1], [1, 2]]
        assert seen(ja.SlidingWindow(0, 1), 2, 4) == [[2, 3], [3]]
        assert seen(ja.SlidingWindow(0, 1, "top_left"), 2, 4) == [[0, 1], [1, 2]]
        assert seen(ja.SlidingWindow(None, None), 2, 3) == [[0, 1, 2]] * 2
        assert seen(ja.BlockDiagonal(2), 3, 3) == [[0, 1], [0, 1], [2]]

    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: ja.SlidingWindow(-1, 0), ValueError, r"left must be in \[0, 2\*\*30\), got -1"),
            (lambda: ja.SlidingWindow(0, 1.5), TypeError, "right must be a non-negative int or None"),
            (lambda: ja.SlidingWindow(0, 2**31), ValueError, "right must be in"),
            (lambda: ja.Causal("left"), ValueError, "align must be one of 'bottom_right', 'top_left', got 'left'"),
            (lambda: ja.BlockDiagonal(0), ValueError, r"size must be in \[1, 2\*\*30\), got 0"),
            (lambda: ja.BlockDiagonal(True), TypeError, "size must be a positive int, got True"),
        ],
    )
    def test_impossible_masks_are_refused(self, make: object, error: type, words: str) -> None:
        with pytest.raises(error, match=words):
            make()  # type: ignore[operator]


@pytest.fixture
def default_dtype() -> Iterator[None]:
    """The default dtype is what it was, whatever the test sets."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


class TestActivations:
    @pytest.mark.parametrize("name", ELEMENTWISE)
    def test_derivative_is_that_of_the_value(self, name: str) -> None:
        x = torch.linspace(-9.03, 9.01, 151, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(ELEMENTWISE[name].value(x).sum(), x)
        torch.testing.assert_close(ELEMENTWISE[name].derivative(x.detach()), slope, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("name", ELEMENTWISE)
    @pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
    def test_neither_knows_the_default_dtype(self, name: str, default: torch.dtype, default_dtype: None) -> None:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            x = torch.linspace(-9.03, 9.01, 151, dtype=torch.float64).to(dtype)
            for shaped in (x, x[70]):
                torch.set_default_dtype(torch.float32)
                expected = [f(shaped) for f in ELEMENTWISE[name]]
                torch.set_default_dtype(default)
                actual = [f(shaped) for f in ELEMENTWISE[name]]
                assert all(y.dtype == dtype for y in actual)
                assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_gradients_in_float64_are_exact_whatever_the_default_dtype(self, name: str, default_dtype: None) -> None:
        torch.manual_seed(0)  # no score at a kink
        q, k, v = (x.double().requires_grad_() for x in qkv(dim=4))
        torch.set_default_dtype(torch.bfloat16)
        # eps and tolerances that an error of fp32 in any constant does not pass
        assert torch.autograd.gradcheck(
            lambda *x: ja.jagged_attention(*x, LAYOUT, activation=name), (q, k, v), eps=1e-6, atol=3e-9, rtol=1e-9
        )

    @pytest.mark.parametrize(
        ("name", "peer"),
        [
            ("relu", torch.nn.functional.relu),
            ("leaky_relu", torch.nn.functional.leaky_relu),
            ("gelu", torch.nn.functional.gelu),
            ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
            ("silu", torch.nn.functional.silu),
            ("hardswish", torch.nn.functional.hardswish),
            ("identity", lambda x: x),
            ("relu_square", lambda x: torch.relu(x) ** 2),
        ],
    )
    def test_value_is_what_pytorch_means_by_the_name(self, name: str, peer: object) -> None:
        x = torch.linspace(-9, 9, 181, dtype=torch.float64)
        torch.testing.assert_close(ELEMENTWISE[name].value(x), peer(x))  # type: ignore[operator]

    def test_names_of_heads_become_one_where_they_agree(self) -> None:
        assert normalize_activation("gelu", 4) == ("gelu",)
        assert normalize_activation(["gelu"] * 4, 4) == ("gelu",)
        assert normalize_activation(("gelu", "softmax"), 2) == ("gelu", "softmax")
        assert len(ACTIVATIONS) == len(set(ACTIVATIONS))


class OwnMask(ja.Mask):
    """A mask that no backend knows."""


class TestErrors:
    """Each names the argument, what it must be, and what it got."""

    def test_kinds_of_objects(self) -> None:
        q, k, v = qkv()
        for args, words in [
            ((q.numpy(), k, v, LAYOUT), "q must be a torch.Tensor, got ndarray"),
            ((q, k, v, [0, 2, 5]), "layout_q must be a JaggedLayout or an offsets tensor, got list"),
            ((q, k, v, LAYOUT, (0, 5)), "layout_kv must be a JaggedLayout or an offsets tensor, got tuple"),
        ]:
            with pytest.raises(TypeError, match=words):
                ja.jagged_attention(*args)
        for options, words in [
            ({"mask": "causal"}, "mask must be Full"),
            ({"mask": ja.Mask()}, "mask must be Full"),
            ({"activation": [["gelu"]] * 3}, "activation must be a name or a tuple of names"),
            ({"backend": ["eager"]}, "backend must be a string, got list"),
            ({"activation": 3}, "activation must be a name or a tuple of names"),
            ({"scale": "1"}, "scale must be a float, got str"),
            ({"backend": None}, "backend must be a string, got NoneType"),
            ({"deterministic": "no"}, "deterministic must be True or False, got 'no'"),
            ({"deterministic": None}, "deterministic must be True or False, got None"),
            ({"return_lse": "False"}, "return_lse must be True or False, got 'False'"),
            ({"return_lse": 0}, "return_lse must be True or False, got 0"),
            ({"mask": OwnMask()}, "mask must be Full"),
        ]:
            with pytest.raises(TypeError, match=words):
                ja.jagged_attention(q, k, v, LAYOUT, **options)

    def test_shapes_dtypes_and_strides(self) -> None:
        q, k, v = qkv()
        other = ja.JaggedLayout(torch.tensor([0, 1, 3, 4]))
        for args, words in [
            ((q[0], k, v, LAYOUT), r"q must have shape \[T_q, H, D\], got \[3, 8\]"),
            ((q, k, v[..., None], LAYOUT), r"v must have shape \[T_kv, H_kv, Dv\]"),
            ((q.int(), k, v, LAYOUT), "q must be bfloat16, float16, float32 or float64, got torch.int32"),
            ((q, k.double(), v, LAYOUT), "k must have q's dtype torch.float32, got torch.float64"),
            ((q, k, v.to("meta"), LAYOUT), "v must be on q's device cpu, got meta"),
            ((q, k[..., :4], v, LAYOUT), "k must have q's head dim D = 8, got 4"),
            ((q, k, v[:, :1], LAYOUT), r"v must have k's rows and heads \[5, 3\], got \[5, 1\]"),
            ((q, k[:, :2], v[:, :2], LAYOUT), "q must have a multiple of k's 2 heads, got 3"),
            (
                (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, LAYOUT),
                "q must be contiguous in its last dimension",
            ),
            ((q[:, :, :0], k, v, LAYOUT), "q must have at least one head and one column"),
            ((q, k[:4], v[:4], LAYOUT), "k must have q's 5 rows when both have one layout, got 4"),
            ((q, k, v, LAYOUT, ja.JaggedLayout.uniform(2, 2)), "layout_kv must have layout_q's 3 sequences, got 2"),
            ((q, k, v, torch.tensor([0, 5], device="meta")), "layout_q must be on q's device cpu, got offsets on meta"),
        ]:
            with pytest.raises(ValueError, match=words):
                ja.jagged_attention(*args)
        for options, words in [
            ({"activation": "gleu"}, "activation must be one of softmax, identity, .*got 'gleu'"),
            ({"activation": ("gelu", "relu")}, "activation must have one name for each of the 3 heads, got 2 names"),
            ({"scale": float("nan")}, "scale must be finite, got nan"),
            ({"out_scale": float("inf")}, "out_scale must be finite, got inf"),
            ({"scale": 10**400}, "scale must be finite as a float, got an int that is too large"),
            ({"out_scale": -(10**400)}, "out_scale must be finite as a float, got an int that is too large"),
            ({"activation": "gelu", "return_lse": True}, "return_lse must be False unless every head is a softmax"),
            ({"activation": ("gelu", "softmax", "softmax"), "return_lse": True}, "return_lse must be False"),
            ({"backend": "cuda"}, "backend must be one of auto, .*got 'cuda'"),
            ({"mask": ja.BlockDiagonal(2), "layout_kv": other}, r"mask must not be BlockDiagonal\(size=2\) unless"),
        ]:
            with pytest.raises(ValueError, match=words):
                ja.jagged_attention(q, k, v, LAYOUT, **options)
        with pytest.raises(ValueError, match=r"q must have shape \[S, H, D\]"):
            ja.broadcast_q_attention(q[0], k, v, LAYOUT)
        with pytest.raises(ValueError, match="mask must not be BlockDiagonal"):
            ja.broadcast_q_attention(q, k, v, LAYOUT, mask=ja.BlockDiagonal(2))


class TestRememberedCalls:
    """What was decided of a call is kept beside its offsets: a later call must not take it for another's."""

    def test_a_call_that_was_right_hides_no_error_of_one_like_it(self) -> None:
        q, k, v = qkv()
        ja.jagged_attention(q, k, v, LAYOUT, scale=1.0, deterministic=True)
        for options, words in [
            ({"scale": True}, "scale must be a float, got bool"),
            ({"scale": 1.0, "out_scale": True}, "out_scale must be a float, got bool"),
            ({"scale": [1.0]}, "scale must be a float, got list"),
            ({"scale": 1.0, "mask": {}}, "mask must be Full"),
            ({"scale": 1.0, "deterministic": 1}, "deterministic must be True or False, got 1"),
            ({"scale": 1.0, "activation": {}}, "activation must be a name or a tuple of names, one a head, got {}"),
        ]:
            with pytest.raises(TypeError, match=words) as caught:
                ja.jagged_attention(q, k, v, LAYOUT, **{"deterministic": True, **options})
            assert caught.value.__context__ is None
        wide = torch.randn(5, 3, 16)[..., ::2]
        for args, words in [
            ((wide, k, v), "q must be contiguous in its last dimension"),
            ((q, k, wide), "v must be contiguous in its last dimension"),
            ((q, k.double(), v), "k must have q's dtype"),
            ((q.int(), k, v), "q must be bfloat16, float16, float32 or float64"),
        ]:
            with pytest.raises(ValueError, match=words):
                ja.jagged_attention(*args, LAYOUT, scale=1.0, deterministic=True)
        ja.jagged_attention(q, k, v, LAYOUT, mask=ja.BlockDiagonal(2))
        with pytest.raises(ValueError, match="mask must not be BlockDiagonal"):
            ja.broadcast_q_attention(q, k, v, LAYOUT, mask=ja.BlockDiagonal(2))

    def test_calls_on_one_layout_give_what_each_gives_on_its_own(self) -> None:
        q, k, v = qkv()
        other = ja.JaggedLayout(torch.tensor([0, 1, 3, 5]))
        names = ("gelu", "softmax", "silu")
        variants: list[dict[str, object]] = [{"mask": mask} for mask in MASKS]
        variants += [{"activation": x} for x in ("gelu", names, list(names), list(reversed(names)))]
        variants += [{"scale": x} for x in (None, 1, 1.0, 0.5)] + [{"out_scale": x} for x in (1, 2, 2.0)]
        variants += [{"layout_kv": other}, {"layout_kv": LAYOUT}, {"backend": "reference"}]
        for options in variants * 2:
            expected = ja.jagged_attention(q, k, v, ja.JaggedLayout(LAYOUT.offsets.clone()), **own_layout(options))
            assert torch.equal(ja.jagged_attention(q, k, v, LAYOUT, **options), expected), options
            shared = ja.broadcast_q_attention(q, k, v, LAYOUT)
            assert shared.shape == (3, 5, 3, 8)

    def test_autocast_is_looked_at_in_every_call(self) -> None:
        q, k, v = qkv()
        dtypes = []
        for enabled in (False, True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                dtypes.append(ja.jagged_attention(q, k, v, LAYOUT).dtype)
        assert dtypes == [torch.float32, torch.bfloat16] * 2


def own_layout(options: dict[str, object]) -> dict[str, object]:
    """Options that share no offsets tensor with ``LAYOUT``."""
    return {name: None if x is LAYOUT else x for name, x in options.items()}


class TestBackendChoice:
    def test_auto_on_a_cpu_is_eager(self) -> None:
        q, k, v = qkv()
        assert torch.equal(ja.jagged_attention(q, k, v, LAYOUT), ja.jagged_attention(q, k, v, LAYOUT, backend="eager"))

    def test_a_named_backend_is_run_or_refused_with_its_reason(self) -> None:
        q, k, v = (x.double() for x in qkv())
        with pytest.raises(ja.UnsupportedError, match="backend 'triton' does not run this call") as caught:
            ja.jagged_attention(q, k, v, LAYOUT, backend="triton")
        assert [report.backend for report in caught.value.refusals] == ["triton"]
        assert caught.value.refusals[0].refusal
        assert isinstance(caught.value, ja.JaggedAttentionError)

    def test_auto_raises_with_every_reason_where_no_backend_may_run(self) -> None:
        q, k, v = (x.to("meta") for x in qkv())
        with pytest.raises(ja.UnsupportedError, match="no backend that backend='auto' may choose on 'meta'") as caught:
            ja.jagged_attention(q, k, v, torch.tensor([0, 2, 5], device="meta"))
        assert [report.backend for report in caught.value.refusals] == list(ja.backends.BACKENDS)
        assert all(report.refusal for report in caught.value.refusals)

    def test_explain_backend_lists_all_without_raising(self) -> None:
        q, k, v = (x.double() for x in qkv())
        reports = {report.backend: report for report in ja.explain_backend(q, k, v, LAYOUT)}
        assert list(reports) == list(ja.backends.BACKENDS)
        assert reports["eager"].supported
        assert reports["reference"].supported
        assert reports["triton"].refusal
        shared = ja.explain_backend(q, k, v, None, LAYOUT)
        assert [report.backend for report in shared] == list(reports)
        with pytest.raises(TypeError, match="layout_kv must be"):
            ja.explain_backend(q, k, v, None)


def test_importing_the_library_imports_torch_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import jagged_attn; "
        "assert not torch.cuda.is_initialized(); new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "sys.exit(', '.join(new & {'triton', 'torchrec', 'fbgemm_gpu', 'matplotlib', 'tqdm', 'networkx'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_backends_are_imported_only_when_they_run() -> None:
    code = (
        "import sys, torch, jagged_attn as ja; q = torch.randn(5, 2, 8); "
        "ja.jagged_attention(q, q, q, torch.tensor([0, 2, 5])); "
        "own = [m for m in sys.modules if m.startswith('jagged_attn.')]; "
        "sys.exit(', '.join(m for m in own if 'testing' in m or 'launch' in m) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
