"""Seed pooling: learned seeds attend to each history and sum it up in a fixed number of tokens."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..jagged_tensor import Jagged, with_values
from ..validation import check_flags, check_number
from .options import check_sizes
from .projections import mix_tokens
from .rows import rows_of
from .target_attention import JaggedTargetAttention

Norm = Literal["layer_norm", "rms_norm", "none"]

_NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "none": nn.Identity,
}


def reset_modules(*modules: nn.Module) -> None:
    """Initialise anew every module that has parameters."""
    for module in modules:
        if isinstance(module, nn.Sequential):
            reset_modules(*module)
        elif next(module.parameters(), None) is not None:
            module.reset_parameters()  # type: ignore[operator]


class SumKronLinear(nn.Module):
    """A linear map of tokens and columns at once, as a sum of k Kronecker products.

    ``Y = Σ_i Z_iᵀ X W_i`` maps S tokens to T, and is the dense map ``Σ_i Z_iᵀ ⊗ W_iᵀ`` on the flattened tokens with
    ``k (S T + E E')`` parameters instead of ``S E T E'``. Z goes first, because T < S.

    Args:
        num_tokens: S.
        num_tokens_out: T.
        embed_dim: E.
        rank: k.
        embed_dim_out: E'; None: E.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        z: ``[k, S, T]``.
        w: ``[k, E, E']``.

    Raises:
        TypeError, ValueError: a size is not a positive int.

    Source: readings of arXiv 2602.10016 agree on the formula; there is no bias in it.

    Example:
        >>> SumKronLinear(12, 4, 8, rank=2)(torch.randn(3, 12, 8)).shape
        torch.Size([3, 4, 8])
    """

    def __init__(
        self, num_tokens: int, num_tokens_out: int, embed_dim: int, rank: int = 8, embed_dim_out: int | None = None,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"num_tokens": num_tokens, "num_tokens_out": num_tokens_out, "embed_dim": embed_dim, "rank": rank}
        check_sizes(**sizes, embed_dim_out=embed_dim_out)
        embed_dim_out = embed_dim if embed_dim_out is None else embed_dim_out
        self.z = nn.Parameter(torch.empty(rank, num_tokens, num_tokens_out, device=device, dtype=dtype))
        self.w = nn.Parameter(torch.empty(rank, embed_dim, embed_dim_out, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal numbers whose variances, 1/S and 1/(k E), keep the variance of the tokens."""
        rank, num_tokens, _ = self.z.shape
        nn.init.normal_(self.z, std=num_tokens**-0.5)
        nn.init.normal_(self.w, std=(rank * self.w.shape[1]) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., S, E]`` to ``[..., T, E']``."""
        # Rows ordered by (t, i), so that Σ_i is one matrix product with the k maps W_i stacked.
        mixed = mix_tokens(self.z.permute(2, 0, 1).flatten(0, 1), x)
        return torch.matmul(mixed.unflatten(-2, (-1, self.z.shape[0])).flatten(-2), self.w.flatten(0, 1))

    def extra_repr(self) -> str:
        """Sizes."""
        rank, num_tokens, num_tokens_out = self.z.shape
        width, width_out = self.w.shape[1:]
        return f"tokens {num_tokens} to {num_tokens_out}, columns {width} to {width_out}, rank={rank}"


class SeedPooling(nn.Module):
    """Pooling by multi-head attention (PMA): a fixed number of tokens for each history, whatever its length.

    With R the learned seeds ``[S, E]`` and Z the history::

        H   = LayerNorm(R + Attention(R; rFF_1(Z)))       seeds shared by the batch: broadcast-Q
        out = LayerNorm(H + rFF_2(H))                     rFF: linear, ReLU, linear, row by row

    Args:
        embed_dim: E.
        num_heads: H.
        num_seeds: S.
        hidden: width inside each rFF; None: E.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        attention: ``JaggedTargetAttention`` with the seeds as its learned queries.
        history_ff, ff: rFF_1 and rFF_2.
        norm, out_norm: ``nn.LayerNorm``.

    Raises:
        TypeError, ValueError: as ``JaggedTargetAttention``.

    An empty history gives what the seeds alone give: its attention is the output projection's bias.

    Source: Lee et al., arXiv 1810.00825, section 3.2; the depth of an rFF is left open there.

    Example:
        >>> from torchrec import JaggedTensor
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> SeedPooling(8, 2, num_seeds=4)(history).shape
        torch.Size([3, 4, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_seeds: int, *, hidden: int | None = None, backend: str = "auto",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(num_seeds=num_seeds, hidden=hidden)
        hidden = embed_dim if hidden is None else hidden
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = JaggedTargetAttention(embed_dim, num_heads, num_seeds, backend=backend, **made)
        self.history_ff = _row_wise(embed_dim, hidden, made)
        self.norm = nn.LayerNorm(embed_dim, **made)
        self.ff = _row_wise(embed_dim, hidden, made)
        self.out_norm = nn.LayerNorm(embed_dim, **made)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(*self.children())

    def forward(self, history: Jagged) -> Tensor:
        """``[B, S, E]`` of a jagged tensor of B sequences, values ``[T, E]``; raises as ``JaggedTargetAttention``."""
        rows = rows_of("history", history, self.attention.kdim, self.norm.weight)
        pooled = self.attention(with_values(history, self.history_ff(rows)))
        tokens = self.norm(self.attention.queries + pooled)
        return self.out_norm(tokens + self.ff(tokens))


def _row_wise(embed_dim: int, hidden: int, made: dict[str, Any]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(embed_dim, hidden, **made), nn.ReLU(), nn.Linear(hidden, embed_dim, **made))


class HierarchicalSeedPooling(nn.Module):
    """HSP: many learned seeds read each history, and a ``SumKronLinear`` sums them up in a few tokens.

    With R the learned seeds ``[S, E]``, ``Q = norm(R)``::

        A = Attention(Q; history)           softmax, seeds shared by the batch (broadcast-Q), no mask
        Y = SumKronLinear(A)                S tokens to T; of A + Q with ``residual``

    Args:
        embed_dim: E.
        num_heads: H.
        num_seeds: S, more than T.
        num_tokens: T.
        rank: k of the ``SumKronLinear``.
        norm: of the seeds: ``"layer_norm"``, ``"rms_norm"`` or ``"none"``. The sources only say that there is one;
            the default is ours.
        out_proj: whether the attention ends with an output projection; open in the sources, default ours.
        residual: whether the normalised seeds are added to what they read; open in the sources, default ours.
        eps: of the norm.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        seeds: ``[S, E]``.
        norm: of the seeds.
        attention: ``JaggedTargetAttention``, to which the seeds are passed.
        kron: ``SumKronLinear``.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or ``eps`` not a number.
        ValueError: a size is not positive, H does not divide E, S is not more than T, or ``norm`` is not known.

    Source: readings of arXiv 2602.10016.

    Example:
        >>> from torchrec import JaggedTensor
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> HierarchicalSeedPooling(8, 2, num_seeds=16, num_tokens=4)(history).shape
        torch.Size([3, 4, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_seeds: int,
        num_tokens: int,
        *,
        rank: int = 8,
        norm: Norm = "layer_norm",
        out_proj: bool = True,
        residual: bool = False,
        eps: float = 1e-5,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_seeds=num_seeds, num_tokens=num_tokens)
        if num_seeds <= num_tokens:
            raise ValueError(f"num_seeds must be more than num_tokens = {num_tokens}, got {num_seeds}.")
        check_flags(out_proj=out_proj, residual=residual)
        check_number("eps", eps)
        if norm not in get_args(Norm):
            raise ValueError(f"norm must be one of {', '.join(get_args(Norm))}, got {norm!r}.")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.residual = residual
        self.attention = JaggedTargetAttention(embed_dim, num_heads, backend=backend, **made)
        if not out_proj:
            self.attention.out_proj = nn.Identity()  # type: ignore[assignment]
        self.seeds = nn.Parameter(torch.empty(num_seeds, embed_dim, **made))
        self.norm = _NORMS[norm](embed_dim, eps=eps, **made)
        self.kron = SumKronLinear(num_seeds, num_tokens, embed_dim, rank, **made)
        self._reset_seeds()

    def reset_parameters(self) -> None:
        """Initialise all parameters anew; the seeds are standard normal."""
        self._reset_seeds()
        reset_modules(self.norm, self.attention, self.kron)

    def _reset_seeds(self) -> None:
        nn.init.normal_(self.seeds)

    def forward(self, history: Jagged) -> Tensor:
        """``[B, T, E]`` of a jagged tensor of B sequences, values ``[T_kv, E]``; an empty one reads the bias only."""
        seeds = self.norm(self.seeds)
        read = self.attention(history, seeds)
        return self.kron(read + seeds if self.residual else read)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"num_seeds={self.seeds.shape[0]}, residual={self.residual}"
