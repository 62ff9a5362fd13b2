"""The products of tokens in a ``WukongLayer``, as one step of autograd.

PyTorch's own derivatives take a dozen more operators: each place that reads the tokens makes a gradient of them, to be
added to the others. These layers are small, and what a GPU waits for is their operators on the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
        # The gradients of y and maps ask for x alone: whoever wants no other may change them meanwhile.
        ctx.save_for_backward(x, *((mixed, joined, y, *maps) if ctx.needs_input_grad[0] else ()))
        return results

    @staticmethod
    def backward(ctx: Any, d_products: Tensor, *d_mapped: Tensor) -> tuple[Tensor | None, ...]:
        x, *for_dx = ctx.saved_tensors
        grads = (d_products, *d_mapped)
        dx = dw = None
        # Autocast would take some of these operators and leave others. A compiler must be asked for first.
        may_differ = torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()
        if may_differ or not (fits_functions(*grads) and is_plain(*grads)):
            turned = d_products.transpose(-1, -2) @ x
            d_joined = torch.cat([turned, *d_mapped], -2)
            if for_dx:
                # To be differentiable, of y and maps themselves.
                joined = _joined(for_dx[2], for_dx[3:])
                dx = d_products @ (joined[: ctx.rows[0]] @ x) + joined.t() @ d_joined
            dw = (d_joined @ x.transpose(-1, -2)).sum(0)
        else:
            turned = torch.bmm(d_products.transpose(1, 2), x)
            d_joined = torch.cat([turned, *d_mapped], 1)
            if for_dx:
                mixed, joined = for_dx[:2]
                # Both terms in one buffer, where their sum would be an operator more.
                dx = torch.bmm(d_products, mixed).baddbmm_(joined.t().expand(len(x), -1, -1), d_joined)
            if any(ctx.needs_input_grad[1:]):
                dw = torch.bmm(d_joined, x.transpose(1, 2)).sum(0)
        if dw is None:
            return dx, *(None for _ in grads)
        dy, *d_maps = dw.split(ctx.rows)
        return dx, dy.t(), *d_maps
