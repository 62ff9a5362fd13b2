"""The products of tokens in a ``WukongLayer``, as one step of autograd.

PyTorch's own derivatives take a dozen more operators: each place that reads the tokens makes a gradient of them, to be
added to the others. These layers are small, and what a GPU waits for is their operators on the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..autograd import fits_functions, is_plain
from .projections import mix_tokens, multiply


def token_products(x: Tensor, y: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
    """``X (Xᵀ Y)`` and ``W X`` of each map: all that reads X does so at once, forward and backward.

    Args:
        x: ``[B, n, E]``; other tensors get PyTorch's operators alone, for a compiler or whatever else reads them.
        y: ``[n, k]``.
        maps: ``[m, n]`` each.

    Returns:
        ``[B, n, k]``, and ``[B, m, E]`` for each map.
    """
    weights = (y, *maps)
    fits = fits_functions(x, *weights) and not torch._C._is_any_autocast_enabled()
    if not fits or x.dim() != 3 or any(w.dtype != x.dtype for w in weights):
        mixed = mix_tokens(y.t(), x)
        return multiply(x, mixed.transpose(-1, -2)), *(mix_tokens(w, x) for w in maps)
    if torch.is_grad_enabled():
        return _Products.apply(x, *weights)
    return _products(x, _joined(y, maps), _rows(y, maps))[0]


def is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is its class's forward and nothing else, so that its weights stand for it."""
    if type(module) is not kind or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _joined(y: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """``[k + m + ..., n]``: everything that tokens are multiplied by."""
    return torch.cat([y.t(), *maps]) if maps else y.t()


def _rows(y: Tensor, maps: Sequence[Tensor]) -> list[int]:
    return [y.shape[1], *(w.shape[0] for w in maps)]


def _products(x: Tensor, joined: Tensor, rows: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The results, and ``Yᵀ X``."""
    mixed, *mapped = mix_tokens(joined, x).split(rows, 1)
    return (torch.bmm(x, mixed.transpose(1, 2)), *mapped), mixed


class _Products(torch.autograd.Function):
    """``token_products`` of ``[B, n, E]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        joined, ctx.rows = _joined(y, maps), _rows(y, maps)
        results, mixed = _products(x, joined, ctx.rows)
        ctx.save_for_backward(x, mixed, joined, y, *maps)
        return results

    @staticmethod
    def backward(ctx: Any, d_products: Tensor, *d_mapped: Tensor) -> tuple[Tensor | None, ...]:
        x, mixed, joined, y, *maps = ctx.saved_tensors
        grads = (d_products, *d_mapped)
        if torch.is_grad_enabled() or not (is_plain(*grads) and fits_functions(*grads)):
            # To be differentiable, of y and maps themselves.
            joined = _joined(y, maps)
            mixed = joined[: y.shape[1]] @ x
            turned = d_products.transpose(-1, -2) @ x
            d_joined = torch.cat([turned, *d_mapped], -2)
            dx = d_products @ mixed + joined.t() @ d_joined
            dw = (d_joined @ x.transpose(-1, -2)).sum(0)
        else:
            turned = torch.bmm(d_products.transpose(1, 2), x)
            d_joined = torch.cat([turned, *d_mapped], 1)
            dx = dw = None
            if ctx.needs_input_grad[0]:
                # Both terms in one buffer, where their sum would be an operator more.
                dx = torch.bmm(d_products, mixed).baddbmm_(joined.t().expand(len(x), -1, -1), d_joined)
            if any(ctx.needs_input_grad[1:]):
                dw = torch.bmm(d_joined, x.transpose(1, 2)).sum(0)
        if dw is None:
            return dx, *(None for _ in grads)
        dy, *d_maps = dw.split(ctx.rows)
        return dx, dy.t(), *d_maps
