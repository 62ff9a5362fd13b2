"""What only a GPU shows of the portable backend: wide strides, capture, alignment, the hardware's tanh."""

import pytest
import torch
from torch import Tensor
from waiting import no_waiting

import jagged_attn as ja
from jagged_attn.activations import ELEMENTWISE
from jagged_attn.testing.inputs import AttentionInputs, attention_inputs
from jagged_attn.testing.tolerance import assert_within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENGTHS = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 0, 301])


def gradients(inputs: AttentionInputs, backend: str, **options: object) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if inputs.layout_q is None:
        out = ja.broadcast_q_attention(*leaves, inputs.layout_kv, backend=backend, **options)
    else:
        out = ja.jagged_attention(*leaves, inputs.layout_q, backend=backend, **options)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def check(inputs: AttentionInputs, **options: object) -> None:
    longest = inputs.k.shape[0] if inputs.layout_q is None else int(inputs.layout_kv.lengths.max())
    exact = gradients(inputs.to(torch.float64), "reference", **options)
    eager = gradients(inputs, "eager", **options)
    for name, actual in gradients(inputs, "triton", **options).items():
        # The longest sums: over the head dim, and over a sequence (dQ of broadcast-Q: over all of them).
        assert_within(name, actual, exact[name], eager[name], terms=longest + inputs.q.shape[2])


@pytest.mark.parametrize("num_queries", [1, 32, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_every_number_of_shared_queries_has_a_right_kernel(num_queries: int, long: bool) -> None:
    lengths = torch.cat([LENGTHS, torch.tensor([5000] * 2)]) if long else LENGTHS
    check(
        attention_inputs(
            lengths, num_shared_queries=num_queries, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda"
        )
    )


@pytest.mark.parametrize("dims", [(8, 8), (72, 40), (96, 128), (128, 64), (192, 256), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_head_dims_up_to_256(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for shared in (None, 33):
        check(
            attention_inputs(
                LENGTHS, num_shared_queries=shared, num_heads=2, head_dim=dims[0], value_head_dim=dims[1],
                dtype=dtype, device="cuda",
            )
        )  # fmt: skip


def test_offsets_past_two_to_the_31_elements_in_a_narrow_block_of_a_wide_buffer() -> None:
    rows, stride = 300, 2**23
    wide = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda")
    inputs = attention_inputs(torch.tensor([1, 0, 299]), num_heads=2, head_dim=16, dtype=torch.bfloat16, device="cuda")

    def spread(x: Tensor, first: int) -> Tensor:
        view = wide.as_strided(x.shape, (stride, x.shape[2], 1), first)
        view.copy_(x)
        return view

    strided = AttentionInputs(
        spread(inputs.q, 0), spread(inputs.k, 64), spread(inputs.v, 128),
        inputs.layout_q, inputs.layout_kv, spread(inputs.dout, 192),
    )  # fmt: skip
    expected = gradients(inputs, "triton")
    for name, actual in gradients(strided, "triton").items():
        assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_views_of_any_alignment_are_right_after_an_aligned_call(shift: int) -> None:
    inputs = attention_inputs(LENGTHS, num_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    expected = gradients(inputs, "triton")

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(shift), x.flatten()])[shift:].view(x.shape)

    views = AttentionInputs(
        *map(shifted, (inputs.q, inputs.k, inputs.v)), inputs.layout_q, inputs.layout_kv, inputs.dout
    )
    for _ in range(2):
        for name, actual in gradients(views, "triton").items():
            assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("shared", [None, 33, 200])
def test_neither_direction_waits_for_the_device(shared: int | None) -> None:
    inputs = attention_inputs(
        LENGTHS, num_shared_queries=shared, num_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda"
    )
    gradients(inputs, "triton")
    with no_waiting():
        gradients(inputs, "triton")


@pytest.mark.parametrize("shared", [None, 33, 200])
def test_a_captured_graph_is_right_for_other_lengths_of_the_same_capacity(shared: int | None) -> None:
    first = torch.tensor([40, 0, 130, 7, 64])
    second = torch.tensor([0, 150, 1, 70, 3])  # fewer rows: the last ones belong to no sequence
    inputs = attention_inputs(
        first, num_shared_queries=shared, num_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda"
    )
    gradients(inputs, "triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(inputs, "triton")
    inputs.layout_kv.offsets.copy_(torch.cat([torch.zeros(1, dtype=torch.long), second.cumsum(0)]))
    for x in captured.values():
        x.fill_(torch.nan)
    graph.replay()
    expected = gradients(inputs, "triton")
    for name, actual in captured.items():
        assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("shared", [None, 100, 200])
def test_gradients_repeat_bit_for_bit(shared: int | None) -> None:
    lengths = torch.randint(0, 700, (50,), generator=torch.Generator().manual_seed(3))
    inputs = attention_inputs(
        lengths, num_shared_queries=shared, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    first, second = (gradients(inputs, "triton", deterministic=True) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("name", ["fast_gelu", "fast_silu"])
def test_fast_activations_stay_within_a_thousandth(name: str) -> None:
    x = torch.linspace(-50, 50, 200_003, device="cuda")
    q = torch.zeros(len(x), 1, 16, device="cuda")
    q[:, 0, 0] = x
    q.requires_grad_()
    k = torch.zeros(1, 1, 16, device="cuda")
    k[0, 0, 0] = 1.0
    offsets_q, offsets_kv = torch.tensor([0, len(x)], device="cuda"), torch.tensor([0, 1], device="cuda")
    v = torch.ones(1, 1, 1, device="cuda")
    out = ja.jagged_attention(q, k, v, offsets_q, offsets_kv, activation=name, scale=1.0, backend="triton")
    (slope,) = torch.autograd.grad(out.sum(), q)
    exact = ELEMENTWISE[name]
    assert (out[:, 0, 0].double() - exact.value(x.double())).abs().max() <= 1e-3
    assert (slope[:, 0, 0].double() - exact.derivative(x.double())).abs().max() <= 1e-3
