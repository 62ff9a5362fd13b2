"""The blocks of a Kunlun layer: weight generation, interaction, the transformer of one event tower, and the head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..jagged_tensor import Jagged, with_values
from ..validation import check_number
from .gdpa import PersonalizedFeedForward
from .kunlun_config import EventTowerConfig, InteractionConfig, SubBlocks, check_towers
from .options import check_sizes
from .projections import Projection
from .rotary import TemporalSelfAttention
from .rows import rows_of, tokens_of
from .seed_pooling import HierarchicalSeedPooling, reset_modules
from .wukong import TokenLinear, WukongExperts, mlp


class WeightGeneration(nn.Module):
    """A summary of the non-sequence tokens, from which the towers' feed-forward weights are made.

    ``C = W_c X`` compresses n tokens to n_sum, ``M = MLP(C)`` and ``X_sum = σ(MLP_gate(M)) ⊙ M`` gates itself.

    Args:
        num_tokens: n.
        num_summary_tokens: n_sum.
        embed_dim: E.
        hidden: width inside both MLPs; None: E.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        compress: ``TokenLinear``. mlp, gate: ``Linear → GELU → Linear``.

    Raises:
        TypeError, ValueError: a size is not a positive int.

    Source: readings of arXiv 2602.10016 and the self-gating of arXiv 2411.09852.

    Example:
        >>> WeightGeneration(7, 3, 8)(torch.randn(5, 7, 8)).shape
        torch.Size([5, 3, 8])
    """

    def __init__(
        self, num_tokens: int, num_summary_tokens: int, embed_dim: int, hidden: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(num_tokens=num_tokens, num_summary_tokens=num_summary_tokens, embed_dim=embed_dim, hidden=hidden)
        self.num_tokens, self.embed_dim = num_tokens, embed_dim
        hidden = embed_dim if hidden is None else hidden
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.compress = TokenLinear(num_tokens, num_summary_tokens, **made)
        self.mlp = mlp(embed_dim, hidden, embed_dim, **made)
        self.gate = mlp(embed_dim, hidden, embed_dim, **made)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(*self.children())

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, n, E]`` to ``[B, n_sum, E]``.

        Raises:
            TypeError: ``tokens`` is not a tensor.
            ValueError: its shape, dtype or device is wrong.
        """
        tokens = tokens_of("tokens", tokens, self.num_tokens, self.embed_dim, self.compress.weight)
        compressed = self.compress(tokens)
        # Of three dimensions, each linear map would make two and three again, with gradients of these views.
        mixed = self.mlp(compressed.flatten(0, 1))
        gate = self.gate(mixed).view_as(compressed)
        return torch.sigmoid(gate) * mixed.view_as(compressed)


class KunlunInteractionBlock(nn.Module):
    """Non-sequence tokens and the summaries of all event towers interact.

    ::

        X_sum = WeightGeneration(X)                                   [n_sum, E]
        H_t   = HSP_t(S_t) where the layer pools tower t, else as given
        X'    = WukongExperts([X_sum ‖ H_1 W_1ᵀ + b_1 ‖ ...])         [n, E], as many tokens as X

    How towers are joined is open in the sources; projecting and joining their summaries is ours.

    Args:
        num_tokens: n.
        embed_dim: E.
        towers: the event towers by event type.
        pools: for each of them, whether this layer makes its summary.
        config: sizes.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        weight_generation: ``WeightGeneration``.
        pools: ``nn.ModuleDict`` of ``HierarchicalSeedPooling``, for the towers that are pooled here.
        projections: ``nn.ModuleDict`` of linear maps ``[E, E_t]``.
        interaction: ``WukongExperts``.

    Raises:
        TypeError, ValueError: a size is not a positive int, or as ``Kunlun`` for the towers.
    """

    def __init__(
        self, num_tokens: int, embed_dim: int, towers: Mapping[str, EventTowerConfig], pools: Mapping[str, bool],
        config: InteractionConfig = InteractionConfig(), *, backend: str = "auto",  # noqa: B008  it is frozen
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        check_towers(towers)
        self.names = tuple(towers)
        self.weight_generation = WeightGeneration(
            num_tokens, config.num_summary_tokens, embed_dim, config.hidden, **made
        )
        self.pools = nn.ModuleDict({name: _pool(towers[name], backend, made) for name in towers if pools[name]})
        self.projections = nn.ModuleDict(
            {name: Projection(tower.embed_dim, [embed_dim], **made) for name, tower in towers.items()}
        )
        num_joined = config.num_summary_tokens + sum(tower.num_tokens for tower in towers.values())
        self.interaction = WukongExperts(
            num_joined, num_tokens, embed_dim, config.num_experts, rank=config.rank, hidden=config.hidden,
            partition=config.partition, **made,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(self.weight_generation, *self.pools.values(), *self.projections.values(), self.interaction)

    def forward(
        self, x: Tensor, sequences: Mapping[str, Jagged], summaries: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Interact.

        Args:
            x: ``[B, n, E]``.
            sequences: by event type, jagged, values ``[T_t, E_t]``; read for the towers that this layer pools.
            summaries: by event type, ``[B, tokens_t, E_t]`` of an earlier layer; read for the other towers.

        Returns:
            X' ``[B, n, E]``, X_sum ``[B, n_sum, E]``, and the summaries that went into X'.
        """
        x_sum = self.weight_generation(x)
        current = {
            name: self.pools[name](sequences[name]) if name in self.pools else summaries[name] for name in self.names
        }
        joined = torch.cat([x_sum, *(self.projections[name](current[name]) for name in self.names)], dim=1)
        return self.interaction(joined), x_sum, current


def _pool(tower: EventTowerConfig, backend: str, made: dict[str, Any]) -> HierarchicalSeedPooling:
    assert tower.num_seeds is not None  # the config filled it in
    return HierarchicalSeedPooling(
        tower.embed_dim, tower.num_heads, tower.num_seeds, tower.num_tokens, rank=tower.kron_rank, backend=backend,
        **made,
    )  # fmt: skip


class KunlunTransformerBlock(nn.Module):
    """One layer of an event tower.

    ``S' = PersonalizedFeedForward(S; X_sum)`` in a global layer, ``S' = LayerNorm(S + TemporalSelfAttention(S))`` in a
    local one, first the one and then the other where both run. The kind of that norm is ours.

    Args:
        tower: the tower.
        blocks: which of the two run.
        num_context_tokens: n_sum.
        context_dim: E.
        eps: of the norms.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        feed_forward, attention, norm: the parts, or None where they do not run.
    """

    def __init__(
        self, tower: EventTowerConfig, blocks: SubBlocks, num_context_tokens: int, context_dim: int, *,
        eps: float = 1e-5, backend: str = "auto",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim = tower.embed_dim
        self.feed_forward = self.attention = self.norm = None
        check_number("eps", eps)
        if blocks.feed_forward:
            self.feed_forward = PersonalizedFeedForward(
                tower.embed_dim, tower.num_heads, num_context_tokens, context_dim, num_keys=tower.num_keys,
                activation=tower.activation, scale=tower.ffn_scale, eps=eps, backend=backend, **made,
            )  # fmt: skip
        if blocks.attend:
            self.attention = TemporalSelfAttention(
                tower.embed_dim, tower.num_heads, mask=tower.mask, rotate_values=tower.rotate_values, backend=backend,
                **made,
            )  # fmt: skip
            self.norm = nn.LayerNorm(tower.embed_dim, eps, **made)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(*self.children())

    def forward(self, x: Jagged, x_sum: Tensor, rotation: Tensor | None = None) -> Any:
        """Transform the events of one type.

        Args:
            x: jagged, values ``[T, E_t]``.
            x_sum: ``[B, n_sum, E]``.
            rotation: of ``RotaryTemporalEmbedding``; None: no rotation.

        Returns:
            A jagged tensor of the type of ``x``, values ``[T, E_t]``, in its layout.
        """
        if self.feed_forward is not None:
            x = self.feed_forward(x, x_sum)
        if self.attention is not None and self.norm is not None:
            weight = self.norm.weight
            update = rows_of("x", self.attention(x, rotation), self.embed_dim, weight)
            x = with_values(x, self.norm(rows_of("x", x, self.embed_dim, weight) + update))
        return x


class RankingHead(nn.Module):
    """``MLP(flatten(X))``: the logit of a click; its sigmoid is the probability.

    Args:
        num_tokens: n.
        embed_dim: E.
        hidden: width inside the MLP; None: E.
        num_tasks: logits a sample.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        mlp: ``Linear → GELU → Linear``.

    Example:
        >>> RankingHead(7, 8)(torch.randn(5, 7, 8)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self, num_tokens: int, embed_dim: int, hidden: int | None = None, num_tasks: int = 1,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(num_tokens=num_tokens, embed_dim=embed_dim, hidden=hidden, num_tasks=num_tasks)
        hidden = embed_dim if hidden is None else hidden
        self.mlp = mlp(num_tokens * embed_dim, hidden, num_tasks, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(self.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, n, E]`` to logits ``[B, num_tasks]``."""
        return self.mlp(x.flatten(1))
