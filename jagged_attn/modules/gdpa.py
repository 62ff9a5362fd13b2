"""GDPA: attention of history rows to a few keys made for each sample, with an element-wise activation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import SOFTMAX
from ..functional import jagged_attention
from ..jagged_tensor import Jagged, layout_of, with_values
from ..layout import uniform_like
from ..masks import Full
from ..validation import check_flags, check_number
from .options import AttentionOptions, Heads, check_sizes
from .projections import Projection, mix_tokens
from .rows import rows_of, tokens_of

_FULL = Full()


class KeyValueGeneration(nn.Module):
    """Keys and values for each sample, made of a few context tokens.

    ``K = P_K (X W_Kᵀ + b_K)`` and ``V = P_V (X W_Vᵀ + b_V)``, with X the ``[n, E_x]`` context of a sample: a linear map
    of the columns, then one of the tokens. Public sources leave this step open; the form is ours.

    Args:
        num_tokens: n, context tokens.
        token_dim: E_x, their width.
        num_keys: n_kv, keys and values made for each sample.
        embed_dim: E = H D.
        num_heads: H.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        proj: linear, ``[2 E, E_x]``: keys, then values.
        token_mix: ``[2, n_kv, n]``: P_K and P_V.
    """

    def __init__(
        self, num_tokens: int, token_dim: int, num_keys: int, embed_dim: int, num_heads: int,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(num_tokens=num_tokens, token_dim=token_dim, num_keys=num_keys)
        self.num_tokens = num_tokens
        self.heads = Heads.checked(embed_dim, num_heads, None, None)
        self.proj = Projection(token_dim, [embed_dim, embed_dim], device=device, dtype=dtype)
        self.token_mix = nn.Parameter(torch.empty(2, num_keys, num_tokens, device=device, dtype=dtype))
        self._reset_token_mix()

    def reset_parameters(self) -> None:
        """Initialise anew: ``xavier_uniform`` for the columns, variance 1/n for the tokens, biases 0."""
        self.proj.reset_parameters()
        self._reset_token_mix()

    def _reset_token_mix(self) -> None:
        nn.init.normal_(self.token_mix, std=self.token_mix.shape[2] ** -0.5)

    def forward(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, each ``[B, n_kv, H, D]``, of context ``[B, n, E_x]``.

        Raises:
            TypeError: ``context`` is not a tensor.
            ValueError: its shape, dtype or device is wrong.
        """
        context = tokens_of("context", context, self.num_tokens, self.proj.in_features, self.proj.weight)
        columns_k, columns_v = self.proj(context).chunk(2, dim=-1)
        mix_k, mix_v = self.token_mix.unbind(0)
        # Two products: the gradients of parts of one, which are large, would have to be copied together.
        k, v = mix_tokens(mix_k, columns_k), mix_tokens(mix_v, columns_v)
        return k.unflatten(-1, (self.heads.num_heads, -1)), v.unflatten(-1, (self.heads.num_heads, -1))

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_tokens={self.num_tokens}, num_keys={self.token_mix.shape[1]}, {self.heads.extra_repr()}"


class PersonalizedFeedForward(nn.Module):
    """A feed-forward layer over history rows whose weights are made for each sample: GDPA.

    With S the rows of one sample and K, V made of its context X (``KeyValueGeneration``), for each head h::

        x   = LayerNorm(S)                        over all E columns
        o_h = act_h(scale · x_h K_hᵀ) V_h + x_h   no normalisation over the keys
        out = RMSNorm(o) + S                      over all E columns; the residual is the raw S

    Args:
        embed_dim: E = H D, columns of the rows.
        num_heads: H.
        num_context_tokens: n, tokens of the context.
        context_dim: E_x, their width; None: E.
        num_keys: n_kv, the hidden width of the feed-forward; 64, 128, 256 and 512 are usual.
        activation: an element-wise activation, or a tuple with one a head.
        scale: factor of the scores. The default 1.0 is that of the public kernels, not the ``D ** -0.5`` of the core
            operation. One reading of the paper divides by the longest length: pass a constant for that.
        norm_weights: whether the two norms have learned weights.
        eps: of both norms.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        generate: ``KeyValueGeneration``.
        norm, out_norm: ``nn.LayerNorm`` and ``nn.RMSNorm``, without weights unless ``norm_weights``.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or an activation or number of the wrong kind.
        ValueError: a size is not positive, H does not divide E, an activation is not known or is a softmax.

    Numerics: the attention accumulates in fp32; the norms run in the dtype of the rows. A sample without rows adds
    nothing to any gradient. Rows that belong to no sequence get ``RMSNorm(x) + S``.

    Source: the equations of PyTorch's posts on GDPA; how K and V are made is ours.

    Example:
        >>> from torchrec import JaggedTensor
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> layer = PersonalizedFeedForward(8, 2, num_context_tokens=3, num_keys=16)
        >>> layer(history, torch.randn(3, 3, 8)).values().shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_context_tokens: int,
        context_dim: int | None = None,
        *,
        num_keys: int = 128,
        activation: str | Sequence[str] = "gelu",
        scale: float = 1.0,
        norm_weights: bool = False,
        eps: float = 1e-5,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        check_flags(norm_weights=norm_weights)
        check_number("eps", eps)
        self.embed_dim = embed_dim
        self.options = AttentionOptions.checked(num_heads, _FULL, activation, scale, backend)
        check_elementwise(self.options)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        context_dim = embed_dim if context_dim is None else context_dim
        self.generate = KeyValueGeneration(num_context_tokens, context_dim, num_keys, embed_dim, num_heads, **made)
        self.norm = nn.LayerNorm(embed_dim, eps, elementwise_affine=norm_weights, **made)
        self.out_norm = nn.RMSNorm(embed_dim, eps, elementwise_affine=norm_weights, **made)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew; see ``KeyValueGeneration``; norms 1."""
        for module in (self.generate, self.norm, self.out_norm):
            module.reset_parameters()

    def forward(self, x: Jagged, context: Tensor) -> Any:
        """Transform the history.

        Args:
            x: TorchRec ``JaggedTensor`` or jagged nested tensor of B sequences, values ``[T, E]``.
            context: ``[B, n, E_x]``, the tokens that K and V are made of.

        Returns:
            A jagged tensor of the type of ``x``, values ``[T, E]``, with its offsets, lengths and weights.

        Raises:
            TypeError: ``x`` is not jagged, or ``context`` is not a tensor.
            ValueError: a shape, dtype, device or number of samples is wrong.
            UnsupportedError: no backend, or not the one named, runs such a call.
        """
        k, v = self.generate(context)
        rows = rows_of("x", x, self.embed_dim, k)
        normed = self.norm(rows)
        out = _attend(normed, k, v, x, self.options) + normed
        return with_values(x, self.out_norm(out) + rows)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"embed_dim={self.embed_dim}, {self.options.extra_repr()}"


@torch.fx.wrap
def _attend(rows: Tensor, k: Tensor, v: Tensor, x: Any, options: AttentionOptions) -> Tensor:
    """``[T, E]``: attention of the rows ``[T, E]`` of ``x`` to k and v ``[B, n_kv, H, D]``."""
    layout = layout_of(x)
    if k.shape[0] != layout.num_sequences:
        raise ValueError(f"context must be for the {layout.num_sequences} samples of x, got {k.shape[0]}.")
    layout_kv = uniform_like(layout, k.shape[1])
    q = rows.unflatten(-1, k.shape[2:]).to(k.dtype)
    return jagged_attention(q, k.flatten(0, 1), v.flatten(0, 1), layout, layout_kv, **options.keywords()).flatten(-2)


def check_elementwise(options: AttentionOptions) -> None:
    """Raise ``ValueError`` if the activation of any head is a softmax."""
    if SOFTMAX in options.activation:
        raise ValueError(f"activation must be element-wise, got {options.activation!r}.")
