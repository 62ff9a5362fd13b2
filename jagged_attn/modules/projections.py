"""The linear maps around an attention: what makes q, k and v of jagged inputs, and what they are initialised with."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from ..functional import autocast_dtype
from ..jagged_tensor import Jagged, values_of

_CAST_BY_AUTOCAST = (torch.bfloat16, torch.float16, torch.float32)


class Projection(nn.Linear):
    """``nn.Linear`` with a weight of stacked blocks, each initialised as if it stood alone, and a bias that starts 0.

    ``y = x Wᵀ + b`` with ``W = [W_1; W_2; ...]``, block i being ``[block_sizes[i], in_features]`` and drawn from
    ``xavier_uniform``. So a fused projection starts like separate ones.

    Args:
        in_features: columns of x.
        block_sizes: rows of each block; their sum is ``out_features``.
        bias: whether there is a bias.
        gain: of the initial weight, for an x whose mean square is not 1, as after an activation.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.
    """

    def __init__(
        self, in_features: int, block_sizes: Sequence[int], bias: bool = True, gain: float = 1.0,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        self.block_sizes, self.gain = tuple(block_sizes), gain
        super().__init__(in_features, sum(self.block_sizes), bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw each block anew and set the bias to 0."""
        for block in self.weight.split(self.block_sizes):
            nn.init.xavier_uniform_(block, self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class OutProjection(nn.Linear):
    """``nn.Linear`` whose bias starts at 0, as the output projection of ``nn.MultiheadAttention`` does."""

    def reset_parameters(self) -> None:
        """Initialise the weight as ``nn.Linear`` does and set the bias to 0."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HeadNorm(nn.RMSNorm):
    """RMSNorm over each head's D: ``y = x / sqrt(mean(x²) + eps) · w``, one ``w [D]`` for all heads.

    The result has the dtype of x: autocast runs norms in fp32, and an fp32 q beside a bf16 v would send the whole
    attention to fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., D]``; same shape and dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


def mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """``W X``, the same ``weight [n_out, n]`` for the tokens ``x [..., n, E]`` of every sample: ``[..., n_out, E]``.

    One product a sample, contiguous whatever the strides of ``x``: PyTorch would make this one product of transposed
    copies, and leave x a transposed gradient.
    """
    return multiply(weight.expand(x.shape[:-2] + (-1, -1)), x)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``torch.matmul`` of batches of as many dimensions, without the three views of each that it makes of three."""
    # torch.fx has no tensors here.
    return torch.bmm(a, b) if isinstance(b, Tensor) and b.dim() == 3 else torch.matmul(a, b)


def is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is its class's forward and nothing else, so that its weights stand for it."""
    if type(module) is not kind or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class InProjection(nn.Module):
    """q, k and v of jagged queries, keys and values.

    One weight ``[(H + 2 H_kv) D, E]`` holds the three maps when their inputs are equally wide, and self-attention then
    applies it at once: q, k and v are views of one ``[T, (H + 2 H_kv) D]`` result. Otherwise there are three weights.

    Args:
        embed_dim: E, columns of the queries.
        kdim: columns of the keys.
        vdim: columns of the values.
        num_heads: H.
        num_kv_heads: H_kv.
        head_dim: D.
        bias: whether there is a bias.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        weight: ``[(H + 2 H_kv) D, E]``, or None.
        q_weight, k_weight, v_weight: ``[H D, E]``, ``[H_kv D, kdim]``, ``[H_kv D, vdim]``, or None.
        bias: ``[(H + 2 H_kv) D]``, or None.
    """

    weight: Tensor | None
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    bias: Tensor | None

    def __init__(
        self, embed_dim: int, kdim: int, vdim: int, num_heads: int, num_kv_heads: int, head_dim: int,
        bias: bool = True, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.widths = (embed_dim, kdim, vdim)
        self.head_dim = head_dim
        self.block_sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        is_fused = embed_dim == kdim == vdim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.register_parameter("weight", parameter(sum(self.block_sizes), embed_dim) if is_fused else None)
        for name, rows, width in zip("qkv", self.block_sizes, self.widths, strict=True):
            self.register_parameter(f"{name}_weight", None if is_fused else parameter(rows, width))
        self.register_parameter("bias", parameter(sum(self.block_sizes)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the maps of q, k and v from ``xavier_uniform``, each on its own, and set the bias to 0."""
        for block in self._weights():
            nn.init.xavier_uniform_(block)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _weights(self) -> tuple[Tensor, ...]:
        if self.weight is not None:
            return self.weight.split(self.block_sizes)
        return (self.q_weight, self.k_weight, self.v_weight)

    def forward(
        self, query: Jagged, key: Jagged | None = None, value: Jagged | None = None, *, split: bool = True
    ) -> tuple[Tensor, ...]:
        """Project.

        Args:
            query: values ``[T_q, E]``.
            key: values ``[T_kv, kdim]``; None: the query.
            value: values ``[T_kv, vdim]`` in the key's layout; None: the key.
            split: False: leave together what one weight makes of one input.

        Returns:
            q ``[T_q, H, D]``, k and v ``[T_kv, H_kv, D]``. Unsplit, for self-attention with one weight: one tensor
            ``[T_q, H + 2 H_kv, D]``.
        """
        weights = (self.weight, self.q_weight, self.k_weight, self.v_weight)
        blocks = (self.block_sizes, self.widths, self.head_dim)
        return _project(query, key, value, weights, self.bias, blocks, split)

    def extra_repr(self) -> str:
        """The widths of the inputs and of the three results."""
        return f"widths={self.widths}, block_sizes={self.block_sizes}, bias={self.bias is not None}"


@torch.fx.wrap
def _project(
    query: Any, key: Any, value: Any, weights: Sequence[Tensor | None], bias: Tensor | None,
    blocks: tuple[tuple[int, ...], tuple[int, ...], int], split: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if key is None and value is not None:
        raise ValueError("value must be None unless key is given, got a value without a key.")
    key = query if key is None else key
    value = key if value is None else value
    block_sizes, widths, head_dim = blocks
    fused, *separate = weights
    runs = _runs(query, key, value, fused is not None)
    sizes = [sum(block_sizes[first:last]) for first, last in runs]
    pieces = separate if fused is None else _pieces(fused, sizes)
    biases = [None] * len(runs) if bias is None else _pieces(bias, sizes)
    out: list[Tensor] = []
    for (first, last), weight, bias in zip(runs, pieces, biases, strict=True):
        name, x = (("query", query), ("key", key), ("value", value))[first]
        values = values_of(name, x, widths[first])
        check_fits(name, values, cast(Tensor, weight))
        y = F.linear(values, cast(Tensor, weight), bias)
        out.extend(y.split([*block_sizes[first:last]], dim=-1) if split else [y])
    return tuple(y.unflatten(-1, (-1, head_dim)) for y in out)


def _pieces(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """``x`` in pieces of these many rows: whole if it is one, since the gradient of a part is copied into a whole."""
    return [x] if len(sizes) == 1 else x.split([*sizes])


def _runs(query: Any, key: Any, value: Any, is_fused: bool) -> tuple[tuple[int, int], ...]:
    """Which of the three maps have the same input and can be applied at once, as ranges of (q, k, v)."""
    if is_fused and query is key and key is value:
        return ((0, 3),)
    if is_fused and key is value:
        return ((0, 1), (1, 3))
    return ((0, 1), (1, 2), (2, 3))


def check_fits(name: str, values: Tensor, weight: Tensor) -> None:
    """Raise ``ValueError`` unless a module takes the values.

    They must be on the device of its weight and of its dtype; under autocast, which casts both, of any dtype but
    float64, which it leaves alone.
    """
    if values.device != weight.device:
        raise ValueError(f"{name} must be on the module's device {weight.device}, got {values.device}.")
    if values.dtype == weight.dtype:
        return
    may_cast = values.dtype in _CAST_BY_AUTOCAST and weight.dtype in _CAST_BY_AUTOCAST
    if not may_cast or autocast_dtype(values) is None:
        raise ValueError(
            f"{name} must have values of the module's dtype {weight.dtype}, got {values.dtype}; convert one of the two"
            + (" or run under torch.autocast." if may_cast else ".")
        )
