"""The products of a ``WukongLayer``, made at once: the formula's numbers and gradients, and where the formula runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagged_attn.modules import TokenLinear, WukongExperts, WukongLayer, wukong_products

SIZES = {"same tokens": (5, 3, 2), "fewer tokens": (7, 3, 2), "more tokens": (3, 3, 1)}
ON_EVERY_DEVICE = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ],
)


def layer_of(sizes: tuple[int, int, int], **made: object) -> WukongLayer:
    num_tokens, num_fmb, num_lcb = sizes
    return WukongLayer(num_tokens, 8, num_fmb=num_fmb, num_lcb=num_lcb, rank=4, hidden=6, **made)  # type: ignore[arg-type]


def solve(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x)
    names, params = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, [x, *params], grad)
    return dict(zip(["out", "x", *names], [out.detach(), *grads], strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The products made at once: context, tokens, Y and maps of each."""
    made: list[tuple[Any, ...]] = []
    function = wukong_products._Products
    run = function.forward
    monkeypatch.setattr(function, "forward", staticmethod(lambda *args: (made.append(args), run(*args))[1]))
    return made


def num_maps(arguments: tuple[Any, ...]) -> int:
    return len(arguments) - 3


@ON_EVERY_DEVICE
@pytest.mark.parametrize("samples", [0, 1, 11])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_numbers_and_gradients_are_those_of_the_formula(
    device: str,
    sizes: tuple[int, int, int],
    samples: int,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of(sizes, device=device)
    whole = torch.randn(samples, sizes[0], 3, 8, device=device)
    grad = torch.randn(8, samples, sum(sizes[1:]), device=device).permute(1, 2, 0)
    for x in (whole[:, :, 1], whole[:, :, 1].contiguous()):
        actual = solve(layer, x, grad)
        with torch.no_grad():
            assert torch.equal(layer(x), actual["out"])
        assert len(calls) == 1
        with monkeypatch.context() as patch:
            patch.setattr(wukong_products, "fits_functions", lambda *args: False)
            expected, exact = solve(layer, x, grad), solve(layer.double(), x.double(), grad.double())
            layer.float()
        assert len(calls) == 1
        calls.clear()
        for name, number in exact.items():
            allowed = 4 * (expected[name] - number).norm() + 4 * torch.finfo(torch.float32).eps * number.norm()
            assert (actual[name] - number).norm() <= allowed, name


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_and_theirs_are_those_of_finite_differences(
    sizes: tuple[int, int, int], calls: list[tuple[Any, ...]]
) -> None:
    layer = layer_of(sizes, dtype=torch.float64)
    x = torch.randn(3, sizes[0], 8, dtype=torch.float64, requires_grad=True)
    weights = dict(layer.named_parameters())

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(weights, tensors, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *weights.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *weights.values()), fast_mode=True)
    assert calls


@pytest.mark.parametrize("trained", ["x", "y", "lcb.weight", "residual.weight", "mlp.2.bias"])
def test_what_needs_no_gradient_gets_none(trained: str, calls: list[tuple[Any, ...]]) -> None:
    layer, x = layer_of(SIZES["fewer tokens"]), torch.randn(5, 7, 8)
    expected = solve(layer, x, torch.ones(5, 5, 8))
    layer.requires_grad_(False)
    leaf = x.requires_grad_() if trained == "x" else layer.get_parameter(trained).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).sum(), leaf)
    torch.testing.assert_close(grad, expected[trained])
    assert len(calls) == 2


def test_gradients_share_no_memory() -> None:
    layer = layer_of(SIZES["fewer tokens"])
    layer(torch.randn(5, 7, 8)).sum().backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    before = [grad.clone() for grad in grads]
    for grad in grads:
        grad.mul_(2)
    assert all(map(torch.equal, grads, [2 * grad for grad in before]))


@pytest.mark.parametrize("name", ["lcb", "residual"])
def test_a_part_that_is_more_than_its_weight_is_called(name: str, calls: list[tuple[Any, ...]]) -> None:
    x = torch.randn(5, 7, 8)
    layer = layer_of(SIZES["fewer tokens"])
    expected, seen = layer(x), []
    handle = layer.get_submodule(name).register_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(layer(x), expected)
    assert len(seen) == 1
    handle.remove()
    setattr(layer, name, _Twice(layer.get_submodule(name)))
    assert not torch.allclose(layer(x), expected)
    assert [num_maps(arguments) for arguments in calls] == [2, 0, 0]


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def test_a_part_with_another_forward_of_its_own_is_called(calls: list[tuple[Any, ...]]) -> None:
    layer, x = layer_of(SIZES["fewer tokens"]), torch.randn(5, 7, 8)
    expected = layer(x)
    nn.utils.parametrizations.weight_norm(layer.lcb)
    torch.testing.assert_close(layer(x), expected)
    layer = layer_of(SIZES["same tokens"])
    layer.residual.forward = torch.zeros_like  # type: ignore[method-assign]
    layer(torch.randn(5, 5, 8))
    assert type(layer.lcb) is TokenLinear
    assert [num_maps(arguments) for arguments in calls] == [2, 0, 0]


def test_autocast_compilers_and_transforms_get_the_formula(calls: list[tuple[Any, ...]]) -> None:
    layer, x = layer_of(SIZES["fewer tokens"]), torch.randn(5, 7, 8)
    expected = layer(x)
    assert len(calls) == 1
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    layer(x[None])
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer)(x), expected)
    torch.testing.assert_close(torch.func.vmap(layer)(x[:, None])[:, 0], expected)
    torch.func.jvp(layer, (x,), (x,))
    torch.func.grad(lambda t: layer(t).sum())(x)
    assert len(calls) == 1


def test_batches_of_gradients() -> None:
    layer, x = layer_of(SIZES["fewer tokens"]), torch.randn(5, 7, 8, requires_grad=True)
    vectors = torch.randn(3, 5, 5, 8)
    leaves, out = [x, layer.y, layer.lcb.weight, layer.residual.weight], layer(x)
    expected = [torch.autograd.grad(out, leaves, v, retain_graph=True) for v in vectors]
    actual = torch.autograd.grad(out, leaves, vectors, is_grads_batched=True)
    for i, grads in enumerate(expected):
        for grad, batch in zip(grads, actual, strict=True):
            torch.testing.assert_close(batch[i], grad)


def test_experts_of_parts_of_tokens(calls: list[tuple[Any, ...]]) -> None:
    experts = WukongExperts(14, 8, 8, num_experts=2)
    experts(torch.randn(5, 14, 8, requires_grad=True)).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_backward_under_autocast_of_a_forward_without(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    layer, x, grad = layer_of(sizes), torch.randn(4, sizes[0], 8), torch.randn(4, sum(sizes[1:]), 8)
    expected = solve(layer, x, grad)
    x.requires_grad_()
    total = (layer(x) * grad).sum()
    with torch.autocast("cpu", dtype):
        total.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    error = (x.grad - expected["x"]).norm() / expected["x"].norm()
    assert error < 8 * torch.finfo(dtype).eps


def test_weights_may_change_before_a_backward_that_does_not_read_them() -> None:
    layer, x = layer_of(SIZES["fewer tokens"]), torch.randn(4, 7, 8)
    total = layer(x).sum()
    with torch.no_grad():
        layer.lcb.weight.mul_(0.9)
    total.backward()
    total = layer(x.requires_grad_()).sum()
    with torch.no_grad():
        layer.lcb.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_tracer_sees_the_parts_called() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, TokenLinear) or super().is_leaf_module(m, module_qualified_name)

    layer = layer_of(SIZES["fewer tokens"])
    graph = Tracer().trace(layer)
    assert {"lcb", "residual"} <= {node.target for node in graph.nodes if node.op == "call_module"}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of PyTorch, which looks at it itself
def test_compiled_autograd_takes_the_step_whole() -> None:
    layer, x, grad = layer_of(SIZES["fewer tokens"]), torch.randn(4, 7, 8), torch.randn(4, 5, 8)
    expected = solve(layer, x, grad)
    x.requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        (layer(x) * grad).sum().backward()
    torch.testing.assert_close(x.grad, expected["x"])
    torch._dynamo.reset()
