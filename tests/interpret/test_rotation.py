"""Pairs of columns turned by angles: the operator, its kernel, its gradients, and where the formula stands for it."""

import importlib

import pytest
import torch
from targets import INTERPRETED
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from waiting import no_waiting

from jagged_attn import rotation as rotations
from jagged_attn.checkpointing import keep_attention
from jagged_attn.rotation import rotate_heads, split_rotated

_ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
_IN_INTERPRETER = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (make test-interpret)"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 3, 4), (1, 1, 2), (7, 3, 6), (129, 1, 10), (67, 5, 64), (37, 2, 256), (3, 2, 258), (5, 0, 8)]
OPERATOR = torch.ops.jagged_attn.rotate.default


@pytest.fixture(
    params=[
        pytest.param("cpu", id="formula"),
        pytest.param("cpu", id="interpreter", marks=_IN_INTERPRETER),
        pytest.param("cuda", id="gpu", marks=_ON_GPU),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def angles(rows: int, dim: int, device: str = "cpu") -> Tensor:
    angle = torch.rand(rows, dim // 2, device=device) * 100
    return torch.stack([angle.cos(), angle.sin()])


def turned(heads: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """The definition, in float64."""
    cos, sin = rotation.double()[:, :, None]
    a, b = heads.double().chunk(2, -1)
    sin = -sin if inverse else sin
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def assert_turned(actual: Tensor, heads: Tensor, rotation: Tensor, inverse: bool = False) -> None:
    """Off by one rounding to the dtype of ``heads`` and three to fp32, of the products and of their sum."""
    exact, info = turned(heads, rotation, inverse), torch.finfo(heads.dtype)
    products = turned(heads.abs(), torch.stack([rotation[0].abs(), rotation[1].abs()]), inverse=False)
    # |a cos θ| + |b sin θ| is what the first columns have turned back, and the second ones turned forward.
    products = torch.maximum(*(turned(heads.abs(), rotation.abs(), inverse=back) for back in (True, False)))
    rounding = info.eps / 2 * (exact.abs() + info.smallest_normal)
    assert actual.dtype == heads.dtype
    assert actual.shape == heads.shape
    assert ((actual.double() - exact).abs() <= rounding + 1.5 * torch.finfo(torch.float32).eps * products).all()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in other places."""
    rows, heads, dim = x.shape
    wide = x.new_full((rows, 3 * heads + 1, dim + 5), torch.nan)
    part = wide[:, heads : 2 * heads, 3 : 3 + dim]
    return {
        "contiguous": x.clone(),
        "part of a wider tensor": part.copy_(x),
        "heads first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "columns first": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_heads_of_any_strides_turn_and_gradients_turn_back(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rotation = angles(shape[0], shape[2], device)
    numbers = torch.randn(shape, device=device).to(dtype)
    grads = layouts(torch.randn(shape, device=device).to(dtype))
    for name, heads in layouts(numbers).items():
        heads.requires_grad_()
        out = rotate_heads(heads, rotation)
        assert_turned(out.detach(), numbers, rotation)
        (back,) = torch.autograd.grad(out, heads, grads[name])
        assert_turned(back, grads[name], rotation, inverse=True)
        assert torch.equal(rotate_heads(numbers, rotation), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_the_gradient_turns_forward(device: str, dtype: torch.dtype) -> None:
    rotation = angles(7, 6, device)
    heads, grad, second = (torch.randn(7, 3, 6, device=device).to(dtype) for _ in range(3))
    heads.requires_grad_()
    grad.requires_grad_()
    (back,) = torch.autograd.grad(rotate_heads(heads, rotation), heads, grad, create_graph=True)
    (again,) = torch.autograd.grad(back, grad, second)
    assert_turned(again, second, rotation)


def test_gradients_in_float64_are_those_of_finite_differences(device: str) -> None:
    heads = torch.randn(5, 6, 6, device=device, dtype=torch.float64, requires_grad=True)
    rotation = angles(5, 6, device).double()
    for call in (
        lambda x: rotate_heads(x, rotation),
        lambda x: split_rotated(x, rotation, [1, 2, 3], 2),
        lambda x: split_rotated(x, rotation, [1, 5], 2),
    ):
        assert torch.autograd.gradcheck(call, heads)
        assert torch.autograd.gradgradcheck(call, heads)
    rotation.requires_grad_()
    assert torch.autograd.gradcheck(rotate_heads, (heads, rotation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_turned", [1, 2, 3])
@pytest.mark.usefixtures("poisoned")
def test_parts_are_turned_and_their_gradients_joined(device: str, num_turned: int, dtype: torch.dtype) -> None:
    sizes, rotation = [3, 2, 1], angles(13, 10, device)
    packed = torch.randn(13, 6, 10, device=device).to(dtype).requires_grad_()
    grads = [torch.randn(13, size, 10, device=device).to(dtype) for size in sizes]
    parts = split_rotated(packed, rotation, sizes, num_turned)
    (joined,) = torch.autograd.grad(parts, packed, grads)
    for i, (part, given, grad, back) in enumerate(
        zip(parts, packed.detach().split(sizes, 1), grads, joined.split(sizes, 1), strict=True)
    ):
        if i < num_turned:
            assert_turned(part.detach(), given, rotation)
            assert_turned(back, grad, rotation, inverse=True)
        else:
            assert torch.equal(part, given)
            assert torch.equal(back, grad)
    for part, again in zip(parts, split_rotated(packed.detach(), rotation, sizes, num_turned), strict=True):
        assert torch.equal(part, again)


def test_a_part_without_a_gradient_adds_nothing(device: str) -> None:
    packed = torch.randn(5, 3, 4, device=device, requires_grad=True)
    rotation = angles(5, 4, device)
    _, k, _ = split_rotated(packed, rotation, [1, 1, 1], 2)
    # The gradient of a sum has strides of 0.
    (joined,) = torch.autograd.grad(k.sum(), packed)
    assert not joined[:, [0, 2]].any()
    assert_turned(joined[:, 1:2], torch.ones(5, 1, 4, device=device), rotation, inverse=True)


def test_a_rotation_of_any_strides(device: str) -> None:
    heads, rotation = torch.randn(9, 2, 8, device=device), angles(9, 8, device)
    strided = rotation.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(rotate_heads(heads, strided), rotate_heads(heads, rotation))


def test_the_operator_keeps_the_rules_of_operators(device: str) -> None:
    heads = torch.randn(5, 2, 6, device=device, requires_grad=True)
    for inverse in (False, True):
        torch.library.opcheck(torch.ops.jagged_attn.rotate, (heads, angles(5, 6, device), inverse))


def test_transforms_and_batched_gradients_get_the_formula(device: str) -> None:
    heads, rotation = torch.randn(5, 2, 6, device=device), angles(5, 6, device)
    vectors = torch.randn(3, 5, 2, 6, device=device)
    expected = torch.stack([rotate_heads(v, rotation, inverse=True) for v in vectors])
    out, pull = torch.func.vjp(lambda x: rotate_heads(x, rotation), heads)
    torch.testing.assert_close(out, rotate_heads(heads, rotation))
    torch.testing.assert_close(torch.func.vmap(pull)(vectors)[0], expected)
    leaf = heads.clone().requires_grad_()
    for parts in (rotate_heads(leaf, rotation), torch.cat(split_rotated(leaf, rotation, [1, 1], 2), 1)):
        (back,) = torch.autograd.grad(parts, leaf, vectors, is_grads_batched=True)
        torch.testing.assert_close(back, expected)
    _, tangent = torch.func.jvp(lambda x: rotate_heads(x, rotation), (heads,), (vectors[0],))
    torch.testing.assert_close(tangent, rotate_heads(vectors[0], rotation))


def test_graphs_of_a_compiler_hold_the_formula_and_traced_ones_the_operator() -> None:
    heads, rotation = torch.randn(5, 2, 6), angles(5, 6)
    program = torch.export.export(_Rotation(), (heads, rotation))
    assert OPERATOR not in {node.target for node in program.graph.nodes}
    traced = make_fx(lambda x, angle: rotate_heads(x, angle))(heads, rotation)
    assert OPERATOR in {node.target for node in traced.graph.nodes}
    expected = rotate_heads(heads, rotation)
    torch.testing.assert_close(program.module()(heads, rotation), expected)
    assert torch.equal(traced(heads, rotation), expected)


class _Rotation(torch.nn.Module):
    def forward(self, heads: Tensor, rotation: Tensor) -> Tensor:
        return torch.cat(split_rotated(heads, rotation, [1, 1], 2), 1)


@pytest.mark.parametrize("options", [{}, {"context_fn": keep_attention}], ids=["all", "selective"])
def test_checkpointed_rotations_have_the_same_gradients(device: str, options: dict[str, object]) -> None:
    packed = torch.randn(5, 3, 4, device=device, requires_grad=True)
    rotation = angles(5, 4, device)

    def run(x: Tensor) -> Tensor:
        q, k, v = split_rotated(x.sin(), rotation, [1, 1, 1], 2)
        return (q * k * v * rotate_heads(v, rotation)).sum()

    (expected,) = torch.autograd.grad(run(packed), packed)
    (actual,) = torch.autograd.grad(checkpoint(run, packed, use_reentrant=False, **options), packed)
    torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=_IN_INTERPRETER), pytest.param("cuda", marks=_ON_GPU)])
def test_the_kernel_runs_where_it_can(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, calls = importlib.import_module("jagged_attn.backends._jit.rotation"), []
    turn = kernels.turn
    monkeypatch.setattr(kernels, "turn", lambda *args: (calls.append(args), turn(*args)))
    packed, rotation = torch.randn(5, 3, 4, device=device, requires_grad=True), angles(5, 4, device)
    parts = split_rotated(packed, rotation, [1, 1, 1], 2)
    assert len(calls) == 1
    torch.autograd.grad(parts, packed, [torch.ones_like(part) for part in parts])
    assert len(calls) == 3
    rotate_heads(packed.double(), rotation)
    rotate_heads(packed, rotation.double())
    assert len(calls) == 3


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_views_of_any_alignment_turn_after_aligned_ones(device: str, shift: int) -> None:
    rotation = angles(9, 64, device)
    numbers = torch.randn(9, 2, 64, device=device).bfloat16()
    for _ in range(2):
        assert_turned(rotate_heads(numbers, rotation), numbers, rotation)
        shifted = torch.cat([numbers.new_zeros(shift), numbers.flatten()])[shift:].view(numbers.shape)
        assert_turned(rotate_heads(shifted, rotation), numbers, rotation)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_ON_GPU)])
class TestOnDevice:
    def test_offsets_past_two_to_the_31_elements(self, device: str) -> None:
        rows, dim = 2**17 + 3, 64
        packed = torch.empty(rows, 260, dim, dtype=torch.bfloat16, device=device)
        heads = packed[:, 257:259]
        numbers = torch.randn(rows, 2, dim, device=device).bfloat16()
        heads.copy_(numbers)
        rotation = angles(rows, dim, device)
        assert_turned(rotate_heads(heads, rotation), numbers, rotation)

    def test_nothing_waits_and_a_graph_of_it_can_be_replayed(self, device: str) -> None:
        packed, rotation = torch.randn(65, 6, 64, device=device, requires_grad=True), angles(65, 64, device)

        def step() -> Tensor:
            q, k, v = split_rotated(packed, rotation, [2, 2, 2], 2)
            return torch.autograd.grad((q * k * v).sum(), packed)[0]

        expected = step()
        with no_waiting():
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_only_devices_with_triton_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotations, "find_spec", lambda name: None)
    monkeypatch.setattr(rotations.capability, "is_interpreted", lambda: True)
    assert not rotations.has_kernel.__wrapped__(torch.device("cpu"))


def test_the_operator_has_all_gradients_when_it_is_called_by_its_name() -> None:
    for needs in ((True, True), (False, True), (True, False)):
        heads = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=needs[0])
        rotation = angles(5, 6).double().requires_grad_(needs[1])
        wanted = [x for x in (heads, rotation) if x.requires_grad]
        grads = torch.autograd.grad(OPERATOR(heads, rotation, False).square().sum(), wanted)
        expected = torch.autograd.grad(rotate_heads(heads, rotation).square().sum(), wanted)
        for actual, right in zip(grads, expected, strict=True):
            torch.testing.assert_close(actual, right)


def test_a_traced_graph_of_the_operator_has_its_tangent() -> None:
    heads, rotation, tangent = torch.randn(5, 2, 6), angles(5, 6), torch.randn(5, 2, 6)
    graph = make_fx(lambda x: rotate_heads(x, rotation))(heads)
    _, found = torch.func.jvp(graph, (heads,), (tangent,))
    torch.testing.assert_close(found, rotate_heads(tangent, rotation))
