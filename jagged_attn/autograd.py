"""Autograd of the operators: what the forward keeps, and which gradients return.

One ``autograd.Function``, registered under the operator's Autograd key. ``torch.library.register_autograd`` would do
the same at four times the CPU time a call, because it flattens the list of tables as a tree each time.
"""

from typing import Any

import torch
from torch import Tensor

from .custom_ops import attention_backward_kernel, attention_kernel, library


class _Attention(torch.autograd.Function):
    """``out, lse`` from the operator below autograd; gradients from ``jagged_attn::attention_backward``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor,
        offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor], *static: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = _forward(q, k, v, offsets_q, offsets_kv, tables, *static)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        offsets = (_savable(x) for x in (offsets_q, offsets_kv, *tables))
        ctx.save_for_backward(q, k, v, out, lse, *offsets)
        ctx.static = static
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, offsets_q, offsets_kv, *tables = ctx.saved_tensors
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if dout is not None:
            is_plain = not torch.is_grad_enabled() and _is_plain(dout, q, k, v)
            backward = attention_backward_kernel if is_plain else torch.ops.jagged_attn.attention_backward
            grads = backward(dout, q, k, v, out, lse, offsets_q, offsets_kv, tables, *ctx.static)
        return (*grads, None, None, None, *(None for _ in ctx.static))


def _savable(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy of one that was made in inference mode, which autograd refuses to save."""
    if x is None or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


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


def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.jagged_attn.attention(q, k, v, *args)``, past the dispatcher where nothing would see it.

    Its way from Python to Python and back costs more CPU time than the launch of a kernel. Whatever watches operators
    (a compiler, a dispatch mode, a tensor subclass) gets the operator.
    """
    if torch.compiler.is_compiling():
        return torch.ops.jagged_attn.attention(q, k, v, *args)
    if torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(
            "jagged_attn does not support forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad): "
            "use backward(), torch.autograd.grad() or torch.autograd.functional.jacobian()."
        )
    return _differentiable(q, k, v, *args)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, *args)
    return _forward(q, k, v, *args)


def _forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    if _is_plain(q, k, v):
        return attention_kernel(q, k, v, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.jagged_attn.attention(q, k, v, *args)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether nothing watches operators on these tensors."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta for x in tensors)
    )


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    return _AttentionBackward.apply(*args)


library.impl("attention", _differentiable, "Autograd")
library.impl("attention_backward", _attention_backward, "Autograd")
