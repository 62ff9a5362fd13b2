"""Wukong layers: interactions among the tokens of a sample by factorization machines, and a mixture of such layers."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..validation import check_number
from .options import check_sizes
from .projections import Projection, is_bare, mix_tokens
from .seed_pooling import reset_modules
from .wukong_products import token_products

Partition = Literal["strided", "contiguous"]
GELU_GAIN = 1.5335  # E[GELU(z)²] ** -0.5 for a standard normal z


def check_partition(partition: object) -> None:
    """Raise ``ValueError`` unless there is such a partition."""
    if partition not in get_args(Partition):
        raise ValueError(f"partition must be one of {', '.join(get_args(Partition))}, got {partition!r}.")


def mlp(width: int, hidden: int, width_out: int, **made: Any) -> nn.Sequential:
    """``Linear → GELU → Linear``, what these blocks mean by an MLP; its one hidden layer is ours.

    Both start ``xavier_uniform`` with biases 0, the second with a gain that makes up for what GELU takes: under the
    defaults of ``nn.Linear`` a stack of them loses its input among its biases, and without the gain it fades.
    """
    last = Projection(hidden, [width_out], gain=GELU_GAIN, **made)
    return nn.Sequential(Projection(width, [hidden], **made), nn.GELU(), last)


class TokenLinear(nn.Module):
    """``Y = W X``: a linear map of the tokens, the same for every column. Parameters ``n_out · n``.

    Args:
        num_tokens: n.
        num_tokens_out: n_out.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        weight: ``[n_out, n]``, initialised with variance 1/n.
    """

    def __init__(self, num_tokens: int, num_tokens_out: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_sizes(num_tokens=num_tokens, num_tokens_out=num_tokens_out)
        self.weight = nn.Parameter(torch.empty(num_tokens_out, num_tokens, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal numbers of variance 1/n."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., n, E]`` to ``[..., n_out, E]``."""
        return mix_tokens(self.weight, x)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_tokens={self.weight.shape[1]}, num_tokens_out={self.weight.shape[0]}"


class WukongLayer(nn.Module):
    """A layer of pairwise interactions among tokens.

    With X ``[n, E]``, a learned Y ``[n, k]``, and ‖ joining tokens::

        FMB(X) = reshape(MLP(LayerNorm(flatten(X (Xᵀ Y)))))   [n_F, E]   factorization machine, never n × n
        LCB(X) = W_L X                                        [n_L, E]
        X'     = LayerNorm([FMB(X) ‖ LCB(X)] + X)             [n_F + n_L, E]

    Where ``n_F + n_L ≠ n``, the residual is ``W_R X`` with a learned ``[n_F + n_L, n]``.

    Args:
        num_tokens: n.
        embed_dim: E.
        num_fmb: n_F.
        num_lcb: n_L.
        rank: k.
        hidden: width inside the MLP; None: E.
        eps: of the norms.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        y: ``[n, k]``.
        norm: over the ``n k`` columns. mlp: to ``n_F E`` columns. lcb: ``TokenLinear``.
        residual: ``TokenLinear``, or ``nn.Identity``.
        out_norm: over the E columns of each token.

    Raises:
        TypeError, ValueError: a size is not a positive int, or ``eps`` not a finite number.

    Source: Zhang et al., arXiv 2403.02545; the depth of the MLP is open there and one hidden layer is ours.

    Example:
        >>> WukongLayer(7, 8, num_fmb=3, num_lcb=2, rank=4)(torch.randn(5, 7, 8)).shape
        torch.Size([5, 5, 8])
    """

    def __init__(
        self, num_tokens: int, embed_dim: int, *, num_fmb: int, num_lcb: int, rank: int = 8, hidden: int | None = None,
        eps: float = 1e-5, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"num_tokens": num_tokens, "embed_dim": embed_dim, "num_fmb": num_fmb, "num_lcb": num_lcb}
        check_sizes(**sizes, rank=rank, hidden=hidden)
        check_number("eps", eps)
        hidden = embed_dim if hidden is None else hidden
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        num_out = num_fmb + num_lcb
        self.num_fmb = num_fmb
        self.y = nn.Parameter(torch.empty(num_tokens, rank, **made))
        self.norm = nn.LayerNorm(num_tokens * rank, eps, **made)
        self.mlp = mlp(num_tokens * rank, hidden, num_fmb * embed_dim, **made)
        self.lcb = TokenLinear(num_tokens, num_lcb, **made)
        self.residual = nn.Identity() if num_out == num_tokens else TokenLinear(num_tokens, num_out, **made)
        self.out_norm = nn.LayerNorm(embed_dim, eps, **made)
        self._reset_y()

    def reset_parameters(self) -> None:
        """Initialise all parameters anew; Y has variance 1/n."""
        self._reset_y()
        reset_modules(*self.children())

    def _reset_y(self) -> None:
        nn.init.normal_(self.y, std=self.y.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, n, E]`` to ``[B, n_F + n_L, E]``."""
        # What traces the layer sees its modules called.
        products, *mapped = token_products(x, self.y, *(self._maps() if isinstance(x, Tensor) else ()))
        fmb = self.mlp(self.norm(products.flatten(-2))).unflatten(-1, (self.num_fmb, -1))
        lcb = mapped[0] if mapped else self.lcb(x)
        residual = mapped[1] if len(mapped) > 1 else self.residual(x)
        return self.out_norm(torch.cat([fmb, lcb], dim=-2) + residual)

    def _maps(self) -> list[Tensor]:
        """W_L, and W_R if there is one; none where a call of their modules is more than a product with them."""
        residual = self.residual
        if is_bare(self.lcb, TokenLinear) and (is_bare(residual, nn.Identity) or is_bare(residual, TokenLinear)):
            return [module.weight for module in (self.lcb, residual) if isinstance(module, TokenLinear)]
        return []

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_tokens={self.y.shape[0]}, num_fmb={self.num_fmb}, rank={self.y.shape[1]}"


class WukongExperts(nn.Module):
    """Global interaction as a mixture of experts: each ``WukongLayer`` reads a part of the tokens.

    ``X' = [Expert_1(X_1) ‖ ... ‖ Expert_G(X_G)]`` with ``X_1 ... X_G`` a partition of the n tokens; tokens in and out
    are shared out as evenly as they go. Half of an expert's tokens come from its FMB, rounded up (ours).

    Args:
        num_tokens: n.
        num_tokens_out: n_out.
        embed_dim: E.
        num_experts: G.
        rank: k of each expert.
        hidden: width inside each expert's MLP; None: E.
        partition: ``"strided"``: token i goes to expert ``i mod G``, so that each sees all kinds of tokens;
            ``"contiguous"``: runs of tokens. Open in the sources; the default is ours.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        experts: ``nn.ModuleList`` of G ``WukongLayer``.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is not positive, ``partition`` is not known, or the tokens do not suffice for G experts with
            one token in and two out each.

    Source: readings of arXiv 2602.10016.

    Example:
        >>> WukongExperts(11, 6, 8, num_experts=2)(torch.randn(5, 11, 8)).shape
        torch.Size([5, 6, 8])
    """

    def __init__(
        self, num_tokens: int, num_tokens_out: int, embed_dim: int, num_experts: int = 2, *, rank: int = 8,
        hidden: int | None = None, partition: Partition = "strided",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(num_tokens=num_tokens, num_tokens_out=num_tokens_out, num_experts=num_experts)
        check_partition(partition)
        if num_experts > min(num_tokens, num_tokens_out // 2):
            raise ValueError(
                f"num_experts must be at most the {num_tokens} tokens in and half of the {num_tokens_out} tokens out, "
                f"got {num_experts}."
            )
        self.partition = partition
        self.sizes = _shares(num_tokens, num_experts)
        self.experts = nn.ModuleList(
            WukongLayer(
                tokens, embed_dim, num_fmb=out - out // 2, num_lcb=out // 2, rank=rank, hidden=hidden,
                device=device, dtype=dtype,
            )
            for tokens, out in zip(self.sizes, _shares(num_tokens_out, num_experts), strict=True)
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(*self.experts)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, n, E]`` to ``[B, n_out, E]``."""
        parts = self._parts(x)
        return torch.cat([expert(parts[i]) for i, expert in enumerate(self.experts)], dim=1)

    def _parts(self, x: Tensor) -> Any:
        count = len(self.experts)
        if count == 1:
            return [x]
        if self.partition == "contiguous":
            return torch.split(x, self.sizes, dim=1)
        if self.sizes[0] == self.sizes[-1]:
            # The gradients of these are stacked in one go, where each slice's would be put into a whole of zeros.
            return x.unflatten(1, (-1, count)).unbind(2)
        return [x[:, first::count] for first in range(count)]

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"sizes={self.sizes}, partition={self.partition!r}"


def _shares(total: int, parts: int) -> list[int]:
    """``total`` shared out evenly; the first parts get what is left over, as ``range(i, total, parts)`` would."""
    return [len(range(first, total, parts)) for first in range(parts)]
