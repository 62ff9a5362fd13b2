"""Autograd of the operators: what the forward keeps, and which gradients return."""

from typing import Any

import torch
from torch import Tensor

from .custom_ops import _library


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_kv, tables, *static = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, offsets_q, offsets_kv, *tables)
    ctx.static = static


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, offsets_q, offsets_kv, *tables = ctx.saved_tensors
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if dout is not None:
        grads = torch.ops.jagged_attn.attention_backward(
            dout, q, k, v, out, lse, offsets_q, offsets_kv, tables, *ctx.static
        )
    # The shape of the inputs: q, k, v, two offsets, the list of tables, the static facts.
    return (*grads, None, None, [None] * len(tables), *(None for _ in ctx.static))


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "jagged_attn does not support double backward: the gradients of an attention operator are not differentiable. "
        "Call backward() or torch.autograd.grad() without create_graph=True."
    )


torch.library.register_autograd("jagged_attn::attention", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("jagged_attn::attention_backward", _refuse_double_backward, lib=_library)
