"""Autograd of the operators: what the forward keeps, and which gradients return.

One ``autograd.Function``, registered under the operator's Autograd key. ``torch.library.register_autograd`` would do
the same at four times the CPU time a call, because it flattens the list of tables as a tree each time.
"""

from typing import Any

import torch
from torch import Tensor

from .custom_ops import library


class _Attention(torch.autograd.Function):
    """``out, lse`` from the operator below autograd; gradients from ``jagged_attn::attention_backward``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor,
        offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor], *static: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.jagged_attn.attention(q, k, v, offsets_q, offsets_kv, tables, *static)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, offsets_q, offsets_kv, *tables)
        ctx.static = static
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, offsets_q, offsets_kv, *tables = ctx.saved_tensors
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if dout is not None:
            grads = torch.ops.jagged_attn.attention_backward(
                dout, q, k, v, out, lse, offsets_q, offsets_kv, tables, *ctx.static
            )
        return (*grads, None, None, None, *(None for _ in ctx.static))


class _AttentionBackward(torch.autograd.Function):
    """The gradients, themselves not differentiable."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.jagged_attn.attention_backward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(
            "jagged_attn does not support double backward: the gradients of an attention operator are not "
            "differentiable. Call backward() or torch.autograd.grad() without create_graph=True."
        )


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.jagged_attn.attention(q, k, v, *args)


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    return _AttentionBackward.apply(*args)


library.impl("attention", _attention, "Autograd")
library.impl("attention_backward", _attention_backward, "Autograd")
