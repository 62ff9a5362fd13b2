"""``JaggedMultiHeadAttention``: ``nn.MultiheadAttention`` for jagged tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import jagged_attention
from ..jagged_tensor import Jagged, layout_of, num_sequences_of, with_values
from ..masks import Full, Mask
from ..validation import check_flags
from .options import AttentionOptions, Heads, check_sizes
from .projections import HeadNorm, InProjection, OutProjection

_FULL = Full()
_STATE_NAMES = {
    "in_proj_weight": "in_proj.weight",
    "in_proj_bias": "in_proj.bias",
    **{f"{x}_proj_weight": f"in_proj.{x}_weight" for x in "qkv"},
}


class JaggedMultiHeadAttention(nn.Module):
    """Multi-head attention over the sequences of a jagged tensor, self or cross.

    For sequence b and head h, ``out_b = concat_h(act(scale · Q_bh K_bhᵀ + mask) V_bh) W_outᵀ + b_out`` with
    ``Q = x_q W_qᵀ + b_q``, ``K = x_k W_kᵀ + b_k``, ``V = x_v W_vᵀ + b_v``. A query without an allowed key gets
    ``b_out``, as does a row that belongs to no sequence.

    Args:
        embed_dim: E, columns of query and output.
        num_heads: H.
        num_kv_heads: H_kv, heads of keys and values, a divisor of H (grouped and multi-query attention); None: H.
        head_dim: D; None: ``embed_dim / num_heads``.
        kdim: columns of the key; None: E.
        vdim: columns of the value; None: E.
        bias: whether the projections have biases.
        mask: ``Full()``, ``Causal()``, ``SlidingWindow(...)`` or ``BlockDiagonal(...)``.
        activation: ``"softmax"``, an element-wise activation (GDPA), or a tuple with one name a head.
        scale: factor of the scores; None: ``D ** -0.5``.
        qk_norm: normalise q and k by an RMSNorm over each head's D, with a learned ``[D]`` weight each.
        backend: which backend runs the attention; ``"auto"`` chooses by device.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        in_proj: ``InProjection``, one weight ``[(H + 2 H_kv) D, E]`` for q, k and v, or three if the widths differ.
        q_norm, k_norm: ``HeadNorm``, or ``nn.Identity`` without ``qk_norm``.
        out_proj: linear, ``[E, H D]``.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or the mask or an activation is of the wrong kind.
        ValueError: a size is not positive, the heads do not divide, or an activation or backend is not known.

    Example:
        >>> from torchrec import JaggedTensor
        >>> attention = JaggedMultiHeadAttention(embed_dim=8, num_heads=2)
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> y = attention(x)
        >>> y.values().shape, y.offsets() is x.offsets()
        (torch.Size([5, 8]), True)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        mask: Mask = _FULL,
        activation: str | Sequence[str] = "softmax",
        scale: float | None = None,
        qk_norm: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads = Heads.checked(embed_dim, num_heads, num_kv_heads, head_dim)
        check_sizes(kdim=kdim, vdim=vdim)
        check_flags(bias=bias, qk_norm=qk_norm)
        self.embed_dim, self.heads = embed_dim, heads
        self.kdim, self.vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        self.options = AttentionOptions.checked(num_heads, mask, activation, scale, backend)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = InProjection(
            embed_dim, self.kdim, self.vdim, heads.num_heads, heads.num_kv_heads, heads.head_dim, bias=bias, **made
        )
        self.q_norm = HeadNorm(heads.head_dim, **made) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(heads.head_dim, **made) if qk_norm else nn.Identity()
        self.out_proj = OutProjection(heads.q_width, embed_dim, bias=bias, **made)

    @classmethod
    def from_multihead_attention(
        cls, attention: nn.MultiheadAttention, *, mask: Mask = _FULL, backend: str = "auto"
    ) -> "JaggedMultiHeadAttention":
        """A module with copies of the weights of an ``nn.MultiheadAttention``.

        It gives the numbers that ``attention`` gives on padded input with a ``key_padding_mask``, on its device and in
        its dtype; ``batch_first`` has no meaning here. A sequence without keys, for which the padded module gives NaN,
        gives the output projection's bias.

        Args:
            attention: the module to copy.
            mask: what may attend to what, in place of its ``attn_mask`` argument.
            backend: see the class.

        Raises:
            TypeError: ``attention`` is not an ``nn.MultiheadAttention``.
            ValueError: it has dropout, ``add_bias_kv`` or ``add_zero_attn``, which this library does not have.
        """
        _refuse_unsupported(attention)
        new = cls(
            attention.embed_dim, attention.num_heads, kdim=attention.kdim, vdim=attention.vdim,
            bias=attention.in_proj_bias is not None, mask=mask, backend=backend,
            device=attention.out_proj.weight.device, dtype=attention.out_proj.weight.dtype,
        )  # fmt: skip
        state = {_STATE_NAMES.get(name, name): tensor for name, tensor in attention.state_dict().items()}
        new.load_state_dict(state)
        return new.train(attention.training)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew, after ``to_empty`` for example.

        ``xavier_uniform`` for each of the maps of q, k and v, as ``nn.MultiheadAttention`` does when ``kdim`` differs
        from E (its fused weight is drawn at once, from a range narrower by √2); norms 1; biases 0.
        """
        for module in (self.in_proj, self.q_norm, self.k_norm, self.out_proj):
            if not isinstance(module, nn.Identity):
                module.reset_parameters()

    def forward(self, query: Jagged, key: Jagged | None = None, value: Jagged | None = None) -> Any:
        """Attend.

        Args:
            query: TorchRec ``JaggedTensor`` (lengths, offsets or both; int32 or int64) or jagged nested tensor, values
                ``[T_q, E]`` of the module's dtype, or under autocast of any but float64.
            key: values ``[T_kv, kdim]``, as many sequences as ``query``; None: self-attention.
            value: values ``[T_kv, vdim]`` in the key's layout (of which the numbers of rows and sequences are checked;
                more would wait for the device); None: the key.

        Returns:
            A jagged tensor of the query's type, values ``[T_q, E]``, with the query's own offsets, lengths and weights.

        Raises:
            TypeError: an argument is not jagged.
            ValueError: ``value`` is given without ``key``, or a shape, dtype, device or number of sequences is wrong.
            UnsupportedError: no backend, or not the one named, runs such a call.
        """
        qkv = self.in_proj(query, key, value)
        q, k, v = self.q_norm(qkv[0]), self.k_norm(qkv[1]), qkv[2]
        out = _attend(q, k, v, query, key, value, self.options)
        return with_values(query, self.out_proj(out))

    def extra_repr(self) -> str:
        """Sizes and options."""
        widths = "" if self.kdim == self.vdim == self.embed_dim else f", kdim={self.kdim}, vdim={self.vdim}"
        return f"embed_dim={self.embed_dim}, {self.heads.extra_repr()}{widths}, {self.options.extra_repr()}"


# The one opaque function of the traced forward: everything that looks at a tensor's kind or shape happens in here.
@torch.fx.wrap
def _attend(q: Tensor, k: Tensor, v: Tensor, query: Any, key: Any, value: Any, options: AttentionOptions) -> Tensor:
    layout_q = layout_of(query)
    layout_kv = layout_q if key is None or key is query else layout_of(key)
    if layout_kv.num_sequences != layout_q.num_sequences:
        raise ValueError(
            f"key must have the query's {layout_q.num_sequences} sequences, got {layout_kv.num_sequences}."
        )
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"value must have the key's {k.shape[0]} rows, got {v.shape[0]}.")
    if value is not None and num_sequences_of(value) != layout_kv.num_sequences:
        raise ValueError(
            f"value must have the key's {layout_kv.num_sequences} sequences, got {num_sequences_of(value)}."
        )
    return jagged_attention(q, k, v, layout_q, layout_kv, **options.keywords()).flatten(-2)


def _refuse_unsupported(attention: nn.MultiheadAttention) -> None:
    if not isinstance(attention, nn.MultiheadAttention):
        raise TypeError(f"attention must be a torch.nn.MultiheadAttention, got {type(attention).__name__}.")
    for name, is_on, got in (
        ("dropout=0.0", attention.dropout > 0, f"dropout={attention.dropout}"),
        ("add_bias_kv=False", attention.bias_k is not None, "add_bias_kv=True"),
        ("add_zero_attn=False", attention.add_zero_attn, "add_zero_attn=True"),
    ):
        if is_on:
            raise ValueError(f"attention must have {name}, got {got}: jagged attention does not have it.")
