"""Pairs of columns turned by angles: one operator with a kernel of its own, its gradients, and the formula.

``(a, b) → (a cos θ - b sin θ, a sin θ + b cos θ)`` for the columns ``(j, j + D/2)`` of every head. The transpose turns
back, so the gradient is the same operation with the other sign. Written in PyTorch's operators it makes a dozen passes
over fp32 intermediates, which a compiler fuses and eager execution does not: the formula stays for the one, the
operator ``jagged_attn::rotate`` is for the other.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .autograd import fits_functions, is_plain
from .backends.base import arch_of
from .backends.triton import capability
from .custom_ops import library

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

library.define("rotate(Tensor heads, Tensor rotation, bool inverse) -> Tensor")


def rotate_heads(heads: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """Turn the pairs of columns of every head; the arguments are taken as checked.

    Args:
        heads: ``[T, H, D]``, D even, any strides.
        rotation: ``[2, T, D/2]``, cosines and sines; what is between is computed in its dtype.
        inverse: turn back.

    Returns:
        ``[T, H, D]`` in the dtype of ``heads``, rounded once.
    """
    if _takes_operator(heads, rotation):
        return _apply(heads, rotation, inverse)
    return _formula(heads, rotation, inverse)


def split_rotated(packed: Tensor, rotation: Tensor, sizes: Sequence[int], num_turned: int) -> tuple[Tensor, ...]:
    """``packed.split(sizes, 1)``, the first ``num_turned`` of them turned.

    The same numbers as ``rotate_heads`` of each part, in fewer passes: the parts are turned by one kernel, and their
    gradients are turned into their place in the gradient of ``packed``, where a split would copy them once more.

    Args:
        packed: ``[T, sum(sizes), D]``, D even, any strides.
        rotation: as for ``rotate_heads``.
        sizes: heads of each part.
        num_turned: at least 1.

    Returns:
        For each part ``[T, sizes[i], D]``: the turned ones views of a new tensor, the others views of ``packed``.
    """
    if _takes_operator(packed, rotation) and torch.is_grad_enabled() and packed.requires_grad:
        return _SplitRotated.apply(packed, rotation, tuple(sizes), num_turned)
    return _split_rotated(packed, rotation, sizes, num_turned)


def _split_rotated(packed: Tensor, rotation: Tensor, sizes: Sequence[int], num_turned: int) -> tuple[Tensor, ...]:
    turned, rest = list(sizes[:num_turned]), list(sizes[num_turned:])
    heads, *others = packed.split([sum(turned), *rest], 1)
    return (*rotate_heads(heads, rotation).split(turned, 1), *others)


def _operands(heads: Tensor, rotation: Tensor, inverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b, cosine and sine of the formula."""
    cos, sin = rotation.unsqueeze(2).unbind(0)
    a, b = heads.to(rotation.dtype).chunk(2, dim=-1)
    return a, b, cos, -sin if inverse else sin


def _formula(heads: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    a, b, cos, sin = _operands(heads, rotation, inverse)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(heads.dtype)


def _takes_operator(heads: Tensor, rotation: Tensor) -> bool:
    """Whether the operator may stand for the formula."""
    return fits_functions(heads, rotation) and not rotation.requires_grad


def _apply(heads: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """The operator, past the dispatcher where nothing would see it."""
    if torch.is_grad_enabled() and heads.requires_grad:
        return _Rotate.apply(heads, rotation, inverse)
    return _run(heads, rotation, inverse)


def _run(heads: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    if is_plain(heads, rotation):
        return _rotate(heads, rotation, inverse)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.jagged_attn.rotate(heads, rotation, inverse)


def _rotate(heads: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    out = heads.new_empty(heads.shape)
    _write(heads, rotation, inverse, out)
    return out


def _write(heads: Tensor, rotation: Tensor, inverse: bool, out: Tensor) -> None:
    """Into ``out``, whose last stride is 1."""
    if heads.dtype in _KERNEL_DTYPES and rotation.dtype == torch.float32 and has_kernel(heads.device):
        from .backends._jit.rotation import turn

        # A gradient of ``out.sum()`` has no strides at all.
        heads = heads if heads.stride(-1) == 1 else heads.contiguous()
        turn(heads, rotation.contiguous(), inverse, out)
        return
    a, b, cos, sin = _operands(heads, rotation, inverse)
    first, second = out.chunk(2, dim=-1)
    first.copy_((a * cos).addcmul_(b, sin, value=-1))
    second.copy_((a * sin).addcmul_(b, cos))


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return capability.refuses_device(arch_of(device)) is None and find_spec("triton") is not None


class _Rotate(torch.autograd.Function):
    """The operator; its gradient is itself, turned back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.inverse = inverse
        return _run(heads, rotation, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rotation,) = ctx.saved_tensors
        return rotate_heads(grad, rotation, not ctx.inverse), None, None


class _SplitRotated(torch.autograd.Function):
    """``split_rotated``."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, rotation: Tensor, sizes: tuple[int, ...], num_turned: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rotation)
        ctx.num_turned = num_turned
        return _split_rotated(packed, rotation, sizes, num_turned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rotation,) = ctx.saved_tensors
        count = ctx.num_turned
        # A compiler must be asked for first.
        if torch.is_grad_enabled() or not (_takes_operator(grads[0], rotation) and is_plain(*grads)):
            turned = (rotate_heads(grad, rotation, inverse=True) for grad in grads[:count])
            return torch.cat([*turned, *grads[count:]], 1), None, None, None
        rows, _, dim = grads[0].shape
        whole = grads[0].new_empty(rows, sum(grad.shape[1] for grad in grads), dim)
        for i, (grad, part) in enumerate(zip(grads, whole.split([g.shape[1] for g in grads], 1), strict=True)):
            if i < count:
                _write(grad, rotation, True, part)
            else:
                part.copy_(grad)
        return whole, None, None, None


library.impl("rotate", _rotate, "CompositeExplicitAutograd")
library.impl("rotate", rotate_heads, "Autograd")  # the formula's gradients where the operator has none
torch.library.register_fake("jagged_attn::rotate", lambda heads, *_: heads.new_empty(heads.shape), lib=library)
