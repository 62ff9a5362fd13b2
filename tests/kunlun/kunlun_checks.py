"""Comparing a jagged module with its padded formulation: outputs and every gradient, with a derived tolerance."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor

Tensors = dict[str, Tensor]


def pad(values: Tensor, lengths: Tensor, extra: int = 2, fill: str = "noise") -> Tensor:
    """``[T, ...]`` to ``[B, longest + extra, ...]``; what is padded holds noise, which nothing may read."""
    longest = max(lengths.tolist(), default=0) + extra
    shape = (len(lengths), longest, *values.shape[1:])
    out = torch.randn(shape, dtype=values.dtype) if values.is_floating_point() else torch.zeros(shape).to(values.dtype)
    here = torch.arange(longest) < lengths[:, None]
    return out.index_put((here,), values)


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    return padded[torch.arange(padded.shape[1]) < lengths[:, None]]


def jagged(values: Tensor, lengths: Tensor) -> JaggedTensor:
    return JaggedTensor(values, lengths=lengths)


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64 with every parameter normal, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            fan = p.shape[-1] if p.dim() > 1 else 1
            p.copy_(torch.randn(p.shape, generator=generator) / fan**0.5)
    return module.double()


def assert_same(
    actual: Callable[[nn.Module, Tensors], Tensor],
    formulation: Callable[[Tensors, Tensors], Tensor],
    module: nn.Module,
    inputs: Tensors,
) -> None:
    """Output and gradients of ``actual(module, inputs)`` are those of ``formulation(parameters, inputs)``, in float64.

    What is allowed, relative to the largest element of each tensor: for each of the two, twice the largest such error
    that it has in float32, scaled to the roundings of float64.
    """
    exact = _solve(formulation, dict(module.named_parameters()), inputs)
    result = _solve(lambda _, x: actual(module, x), dict(module.named_parameters()), inputs)
    relative = sum(
        max(_relative_error(r, exact) for r in rough) for rough in _in_float32(actual, formulation, module, inputs)
    )
    relative *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert relative < 1e-11  # a gradient that vanishes but for roundings would make the comparison empty
    for name in exact:
        _assert_close(name, result[name], exact[name], 2 * relative + torch.finfo(torch.float64).eps)


def _solve(compute: Callable[[Tensors, Tensors], Tensor], params: Tensors, inputs: Tensors) -> Tensors:
    """The output and the gradient of every parameter and input, by name."""
    torch.manual_seed(17)  # the noise in the padding
    out = compute(params, inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    leaves = {**params, **inputs}
    return {"output": out, **dict(zip(leaves, torch.autograd.grad(out, leaves.values(), cotangent), strict=True))}


def _in_float32(actual: Callable, formulation: Callable, module: nn.Module, inputs: Tensors) -> list[list[Tensors]]:
    """What the formulation and the module give in float32, three times each.

    One run's error may be small by luck, so in each the parameters and inputs are moved by less than a rounding, which
    makes all later roundings fall differently.
    """
    generator = torch.Generator().manual_seed(11)
    results: list[list[Tensors]] = [[], []]
    for _ in range(3):
        module32, inputs32 = copy.deepcopy(module).float(), {name: x.detach().float() for name, x in inputs.items()}
        params32 = dict(module32.named_parameters())
        with torch.no_grad():
            for x in [*params32.values(), *inputs32.values()]:
                x *= 1 + torch.finfo(torch.float32).eps * (2 * torch.rand(x.shape, generator=generator) - 1)
        for x in inputs32.values():
            x.requires_grad_()
        results[0].append(_solve(formulation, params32, inputs32))
        results[1].append(_solve(lambda _, x, m=module32: actual(m, x), params32, inputs32))
    return results


def _relative_error(rough: Tensors, exact: Tensors) -> float:
    """Largest error over largest element, of the tensor where that is most; nothing where all is 0."""
    ratios = [0.0]
    for name, e in exact.items():
        largest = e.abs().max().item() if e.numel() else 0.0
        if largest:
            ratios.append((rough[name].double() - e).abs().max().item() / largest)
    return max(ratios)


def _assert_close(name: str, actual: Tensor, exact: Tensor, relative: float) -> None:
    assert actual.dtype == torch.float64, name
    assert actual.shape == exact.shape, name
    if exact.numel() == 0:
        return
    allowed = relative * exact.abs().max().item()
    error = (actual - exact).abs().max().item()
    assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}"
