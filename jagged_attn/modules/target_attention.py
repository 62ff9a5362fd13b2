"""``JaggedTargetAttention``: queries that are not the sequence's own rows, learned or candidates, over histories."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import broadcast_q_attention, jagged_attention
from ..jagged_tensor import Jagged, is_jagged, layout_of, values_of, with_values
from ..layout import JaggedLayout, uniform_like
from ..masks import BlockDiagonal, Full, Mask
from ..validation import check_flags
from .options import AttentionOptions, Heads, check_sizes
from .projections import HeadNorm, OutProjection, Projection, check_fits
from .rows import rows_of

_FULL = Full()


class JaggedTargetAttention(nn.Module):
    """Multi-head attention of learned queries or candidate items over each sample's history.

    For sample b and head h, ``out_b = concat_h(act(scale · Q_h K_bhᵀ) V_bh) W_outᵀ + b_out``, with Q made of

    - learned queries ``[S, E]``, if ``num_queries`` is S: shared by all samples (seed pooling);
    - queries ``[S, E]`` passed to ``forward``: shared too, such as candidates that every user is ranked for;
    - candidates of each sample, passed dense ``[B, C, E]`` or as a jagged tensor (DIN).

    Shared queries go through ``broadcast_q_attention``, which never makes B copies of them. A sample with an empty
    history gets ``b_out``.

    Args:
        embed_dim: E, columns of queries and output.
        num_heads: H.
        num_queries: S learned queries; None: queries are passed to ``forward``.
        num_kv_heads: H_kv, a divisor of H; None: H.
        head_dim: D; None: ``embed_dim / num_heads``.
        kdim: columns of the history; None: E.
        bias: whether the projections have biases.
        mask: which rows of the history each query sees; positions count as in cross-attention. Not ``BlockDiagonal``.
        activation: ``"softmax"``, an element-wise activation, or a tuple with one name a head.
        scale: factor of the scores; None: ``D ** -0.5``.
        qk_norm: normalise q and k by an RMSNorm over each head's D.
        backend: which backend runs the attention; ``"auto"`` chooses by device.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        queries: ``[S, E]``, or None.
        q_proj: linear, ``[H D, E]``.
        kv_proj: linear, ``[2 H_kv D, kdim]``: keys, then values.
        q_norm, k_norm: ``HeadNorm``, or ``nn.Identity`` without ``qk_norm``.
        out_proj: linear, ``[E, H D]``.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or the mask or an activation is of the wrong kind.
        ValueError: a size is not positive, the heads do not divide, an activation or backend is not known, or the mask
            is ``BlockDiagonal``.

    Example:
        >>> from torchrec import JaggedTensor
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> JaggedTargetAttention(8, 2, num_queries=4)(history).shape
        torch.Size([3, 4, 8])
        >>> JaggedTargetAttention(8, 2)(history, torch.randn(3, 1, 8)).shape
        torch.Size([3, 1, 8])
    """

    queries: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_queries: int | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
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
        self.heads = Heads.checked(embed_dim, num_heads, num_kv_heads, head_dim)
        check_sizes(num_queries=num_queries, kdim=kdim)
        check_flags(bias=bias, qk_norm=qk_norm)
        self.embed_dim, self.num_queries = embed_dim, num_queries
        self.kdim = embed_dim if kdim is None else kdim
        self.options = AttentionOptions.checked(num_heads, mask, activation, scale, backend)
        if isinstance(mask, BlockDiagonal):
            raise ValueError(f"mask must not be {mask}: the queries are not the history's own rows.")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        queries = None if num_queries is None else nn.Parameter(torch.empty(num_queries, embed_dim, **made))
        self.register_parameter("queries", queries)
        self.q_proj = Projection(embed_dim, [self.heads.q_width], bias=bias, **made)
        self.kv_proj = Projection(self.kdim, [self.heads.kv_width, self.heads.kv_width], bias=bias, **made)
        self.q_norm = HeadNorm(self.heads.head_dim, **made) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.heads.head_dim, **made) if qk_norm else nn.Identity()
        self.out_proj = OutProjection(self.heads.q_width, embed_dim, bias=bias, **made)
        self._reset_queries()

    def reset_parameters(self) -> None:
        """Initialise all parameters anew: ``xavier_uniform`` for queries and projections, norms 1, biases 0."""
        self._reset_queries()
        for module in (self.q_proj, self.kv_proj, self.q_norm, self.k_norm, self.out_proj):
            if not isinstance(module, nn.Identity):
                module.reset_parameters()

    def _reset_queries(self) -> None:
        if self.queries is not None:
            nn.init.xavier_uniform_(self.queries)

    def forward(self, history: Jagged, queries: Jagged | Tensor | None = None) -> Any:
        """Attend.

        Args:
            history: TorchRec ``JaggedTensor`` or jagged nested tensor of B sequences, values ``[T, kdim]`` of the
                module's dtype, or under autocast of any but float64.
            queries: None with learned queries; else ``[S, E]`` shared by all samples, ``[B, C, E]`` or a jagged tensor
                of B sequences with values ``[T_q, E]``. One candidate a sample is ``[B, 1, E]``.

        Returns:
            ``[B, S, E]`` for shared queries, ``[B, C, E]`` for dense ones, and for jagged ones a jagged tensor of
            their type, values ``[T_q, E]``, with their own offsets.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: queries are missing or given although there are learned ones, or a shape, dtype, device or
                number of samples is wrong.
            UnsupportedError: no backend, or not the one named, runs such a call.
        """
        rows = _query_rows(queries, self.queries, self.embed_dim, self.q_proj.weight)
        q = self.q_norm(self.q_proj(rows).unflatten(-1, (self.heads.num_heads, self.heads.head_dim)))
        kv = self.kv_proj(rows_of("history", history, self.kdim, self.kv_proj.weight))
        k, v = kv.unflatten(-1, (2, self.heads.num_kv_heads, self.heads.head_dim)).unbind(1)
        out = _attend(q, self.k_norm(k), v, history, queries, self.options)
        return _shaped_like(queries, self.out_proj(out))

    def extra_repr(self) -> str:
        """Sizes and options."""
        num_queries = "" if self.num_queries is None else f", num_queries={self.num_queries}"
        kdim = "" if self.kdim == self.embed_dim else f", kdim={self.kdim}"
        return f"embed_dim={self.embed_dim}, {self.heads.extra_repr()}{num_queries}{kdim}, {self.options.extra_repr()}"


# The opaque functions of the traced forward: everything that looks at a tensor's kind or shape happens in them.
@torch.fx.wrap
def _query_rows(queries: Any, learned: Tensor | None, width: int, weight: Tensor) -> Tensor:
    if learned is not None:
        if queries is not None:
            raise ValueError("queries must be None, since the module has learned ones (num_queries).")
        return learned
    if queries is None:
        raise ValueError("queries must be given, since the module has no learned ones (num_queries=None).")
    if is_jagged(queries):
        rows = values_of("queries", queries, width)
    elif not isinstance(queries, Tensor):
        raise TypeError(f"queries must be a tensor or a torchrec.JaggedTensor, got {type(queries).__name__}.")
    elif queries.dim() not in (2, 3) or queries.shape[-1] != width:
        raise ValueError(f"queries must have shape [S, {width}] or [B, C, {width}], got {list(queries.shape)}.")
    else:
        rows = queries
    check_fits("queries", rows, weight)
    return rows


@torch.fx.wrap
def _attend(q: Tensor, k: Tensor, v: Tensor, history: Any, queries: Any, options: AttentionOptions) -> Tensor:
    """``[T_q, H D]`` for jagged queries, ``[B, C, H D]`` for dense ones, ``[B, S, H D]`` for shared ones."""
    layout, keywords = layout_of(history), options.keywords()
    if is_jagged(queries):
        layout_q = layout_of(queries)
        _check_samples(layout_q.num_sequences, layout)
        return jagged_attention(q, k, v, layout_q, layout, **keywords).flatten(-2)
    if q.dim() == 3:
        return broadcast_q_attention(q, k, v, layout, **keywords).flatten(-2)
    _check_samples(q.shape[0], layout)
    layout_q = uniform_like(layout, q.shape[1])
    return jagged_attention(q.flatten(0, 1), k, v, layout_q, layout, **keywords).flatten(-2).unflatten(0, q.shape[:2])


def _check_samples(num_samples: int, layout: JaggedLayout) -> None:
    if num_samples != layout.num_sequences:
        raise ValueError(f"queries must be for the history's {layout.num_sequences} samples, got {num_samples}.")


@torch.fx.wrap
def _shaped_like(queries: Any, out: Tensor) -> Any:
    return with_values(queries, out) if is_jagged(queries) else out
