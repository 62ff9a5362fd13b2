"""Autograd of the operators: what the forward keeps, and which gradients return.

One ``autograd.Function``, registered under the operator's Autograd key. ``torch.library.register_autograd`` would do
the same at four times the CPU time a call, because it flattens the list of tables as a tree each time.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import _is_torch_function_mode_enabled, _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import TransformType, is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

from .backends.base import Geometry
from .custom_ops import attention_backward_kernel, launch_forward, library, spec_of
from .errors import UnsupportedError
from .spec import AttentionSpec


class _Attention(torch.autograd.Function):
    """``out, lse`` from the operator below autograd; gradients from ``jagged_attn::attention_backward``.

    Its arguments are those of ``attention`` below: few, because each argument of a Function costs time.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor,
        geometry: Geometry, static: tuple[Any, ...], spec: AttentionSpec | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = _forward(q, k, v, geometry, static, spec)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.static = static
        offsets_q, offsets_kv, tables = geometry
        ctx.save_for_backward(q, k, v, out, lse, _savable(offsets_q), _savable(offsets_kv), *tables)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, offsets_q, offsets_kv, *tables = ctx.saved_tensors
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if dout is not None:
            # Gradients in batches, as of torch.autograd.grad(is_grads_batched=True), come on no stack of interpreters.
            watched = is_legacy_batchedtensor(dout) or not is_plain(dout, q, k, v)
            if watched:
                _refuse_transforms(dout, needs_grad=False)
            plain = not (watched or torch.is_grad_enabled())
            backward = attention_backward_kernel if plain else torch.ops.jagged_attn.attention_backward
            grads = backward(dout, q, k, v, out, lse, offsets_q, offsets_kv, tables, *ctx.static)
        return (*grads, None, None, None)


# ``Function.apply`` without its own look at what ``is_plain`` has ruled out already, which takes a third of its time.
_apply_plain = super(torch.autograd.Function, _Attention).apply


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
        raise UnsupportedError(
            "jagged_attn does not support double backward: the gradients of an attention operator are not "
            "differentiable. Call backward() or torch.autograd.grad() without create_graph=True.",
            [],
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, static: tuple[Any, ...], spec: AttentionSpec | None
) -> tuple[Tensor, Tensor]:
    """``torch.ops.jagged_attn.attention(q, k, v, *geometry, *static)``, past the dispatcher where nothing would see it.

    Its way from Python to Python and back costs more CPU time than the launch of a kernel.

    Args:
        q: as for the operator.
        k: as for the operator.
        v: as for the operator.
        geometry: the operator's arguments up to the tables.
        static: those after the tables; the name of the backend is the last.
        spec: what the others of these spell out, if ``is_plain(q, k, v)``. ``None`` where something watches
            operators (a dispatch mode, a tensor subclass), which then gets the operator.

    Raises:
        UnsupportedError: the call is inside something that cannot have it, such as a transform of ``torch.func``.
    """
    if forward_ad._current_level >= 0:
        raise UnsupportedError(
            "jagged_attn does not support forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad): "
            "use backward(), torch.autograd.grad() or torch.autograd.functional.jacobian().",
            [],
        )
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if spec is None:
        _refuse_transforms(q, needs_grad)
    if needs_grad:
        return (_Attention.apply if spec is None else _apply_plain)(q, k, v, geometry, static, spec)
    return _forward(q, k, v, geometry, static, spec)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, static: tuple[Any, ...], spec: AttentionSpec | None
) -> tuple[Tensor, Tensor]:
    if spec is not None:
        return launch_forward(q, k, v, geometry, spec, static[-1])
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.jagged_attn.attention(q, k, v, *geometry, *static)


def refuse_tracing() -> None:
    """Raise ``UnsupportedError`` inside ``torch.jit.trace``; free to leave out where ``is_plain`` says yes."""
    if _is_tracing():
        raise UnsupportedError(
            "jagged_attn does not support torch.jit.trace, which does not see what its kernels do: "
            "use torch.export.export() or torch.compile().",
            [],
        )


def _refuse_transforms(x: Tensor, needs_grad: bool) -> None:
    """Raise ``UnsupportedError`` inside what would ask the operators for rules that they do not have."""
    refuse_tracing()
    interpreter = peek_interpreter_stack()
    is_transform = interpreter is not None and (needs_grad or interpreter.key() == TransformType.Vmap)
    if is_transform or is_legacy_batchedtensor(x):
        raise UnsupportedError(
            "jagged_attn does not support the transforms of torch.func (grad, vjp, jacrev, vmap) nor gradients in "
            "batches: use backward() or torch.autograd.grad(), and more sequences in place of a batch dimension.",
            [],
        )


def is_plain(*tensors: Tensor) -> bool:
    """Whether nothing watches operators on these tensors, all on one device."""
    if _len_torch_dispatch_stack() or _is_torch_function_mode_enabled() or peek_interpreter_stack() is not None:
        return False
    return not _is_tracing() and _are_ordinary(tensors)


def _are_ordinary(tensors: tuple[Any, ...]) -> bool:
    """Whether they are tensors, of no other class, and have memory; all on one device."""
    for x in tensors:
        if type(x) is not Tensor and type(x) is not Parameter:
            return False
    return not tensors[0].is_meta


def fits_functions(*tensors: Any) -> bool:
    """Whether an ``autograd.Function`` may stand for its formula: nothing wants rules that it does not have.

    Unlike ``is_plain``, where something watches operators too, which sees those inside.
    """
    if torch.compiler.is_compiling() or _is_tracing() or forward_ad._current_level >= 0:
        return False
    if peek_interpreter_stack() is not None or not _are_ordinary(tensors):
        return False
    return not any(map(is_legacy_batchedtensor, tensors))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor], *static: Any
) -> tuple[Tensor, Tensor]:
    spec = spec_of(q, v, offsets_q, offsets_kv, *static[:-1]) if is_plain(q, k, v) else None
    return attention(q, k, v, Geometry(offsets_q, offsets_kv, tuple(tables)), static, spec)


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    return _AttentionBackward.apply(*args)


library.impl("attention", _attention, "Autograd")
library.impl("attention_backward", _attention_backward, "Autograd")
