"""``Kunlun``: layers in which a sample's tokens and its event sequences inform each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..jagged_tensor import Jagged, check_jagged, layout_of
from ..validation import check_flags
from .kunlun_blocks import KunlunInteractionBlock, KunlunTransformerBlock
from .kunlun_config import (
    EventTowerConfig,
    InteractionConfig,
    LayerKind,
    SubBlocks,
    check_towers,
    layer_pattern,
    tower_plan,
)
from .options import check_sizes
from .rows import check_tokens
from .seed_pooling import reset_modules


class KunlunLayer(nn.Module):
    """An interaction block over all towers, and a transformer block for each tower that still runs.

    Args:
        num_tokens: n.
        embed_dim: E.
        towers: the event towers by event type.
        blocks: what this layer runs for each of them.
        config: sizes of the interaction block.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        interaction: ``KunlunInteractionBlock``.
        transformers: ``nn.ModuleDict`` of ``KunlunTransformerBlock``, for the towers whose events change here.
    """

    def __init__(
        self, num_tokens: int, embed_dim: int, towers: Mapping[str, EventTowerConfig], blocks: Mapping[str, SubBlocks],
        config: InteractionConfig = InteractionConfig(), *, backend: str = "auto",  # noqa: B008  it is frozen
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        made: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
        pools = {name: blocks[name].pool for name in towers}
        self.interaction = KunlunInteractionBlock(num_tokens, embed_dim, towers, pools, config, **made)
        self.transformers = nn.ModuleDict(
            {
                name: KunlunTransformerBlock(tower, blocks[name], config.num_summary_tokens, embed_dim, **made)
                for name, tower in towers.items()
                if blocks[name].feed_forward or blocks[name].attend
            }
        )

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(self.interaction, *self.transformers.values())

    def forward(
        self,
        x: Tensor,
        sequences: Mapping[str, Jagged],
        summaries: Mapping[str, Tensor],
        rotations: Mapping[str, Tensor | None],
    ) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
        """``(X, S, H_prev)`` to ``(X', S', H)``; the last three by event type.

        Args:
            x: ``[B, n, E]``.
            sequences: by event type, jagged, values ``[T_t, E_t]``.
            summaries: by event type, ``[B, tokens_t, E_t]``; may be empty in a layer that pools every tower.
            rotations: by event type, of ``RotaryTemporalEmbedding``, or None.
        """
        x_new, x_sum, current = self.interaction(x, sequences, summaries)
        changed = {
            name: self.transformers[name](sequences[name], x_sum, rotations[name])
            if name in self.transformers
            else sequences[name]
            for name in self.interaction.names
        }
        return x_new, changed, current


class Kunlun(nn.Module):
    """A stack of ``KunlunLayer``: tokens of a sample and its event sequences, one tower for each event type.

    With CompSkip the layers take turns: even ones are *global* (fresh seed pooling and personalised feed-forward), odd
    ones *local* (windowed self-attention alone; they use the summaries of the layer before). Layer ℓ runs the towers
    with more than ℓ layers; a finished tower keeps its last summary.

    A layer pools the events that enter it, so nothing would read what the last layer makes of them. Therefore, and
    this is ours, one closing interaction pools every tower once more: ``closing_pool``. Without it, the blocks after a
    tower's last pooling are not built, because they would change nothing and get no gradient.

    Args:
        num_tokens: n, non-sequence tokens of a sample.
        embed_dim: E, their width.
        towers: the event towers by event type. The names become names of modules: without a dot, and none that
            ``nn.ModuleDict`` has for itself, such as ``"items"``.
        config: sizes of the interaction blocks.
        comp_skip: whether layers take turns; otherwise every layer pools, feeds forward and attends.
        pattern: the kind of each layer, ``"global"``, ``"local"`` or ``"full"``, in place of ``comp_skip``; as many as
            the tallest tower has, the first one not local.
        closing_pool: see above.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        layers: ``nn.ModuleList`` of ``KunlunLayer``.
        closing: ``KunlunLayer`` without transformer blocks, or None.
        rotary: ``nn.ModuleDict`` of ``RotaryTemporalEmbedding``, for the towers that rotate.
        plans: by event type, the ``SubBlocks`` of each of its layers.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or a tower or ``config`` of the wrong kind.
        ValueError: a size is not positive, there is no tower, an event type cannot name a module, or ``pattern`` has
            the wrong length, an unknown kind or a first layer that does not pool.

    Source: readings of arXiv 2602.10016; ``docs/kunlun.md`` says what is established, reported and ours.

    Example:
        >>> from torchrec import JaggedTensor
        >>> towers = {"click": EventTowerConfig(8, 2, num_tokens=3, num_layers=2, window=5)}
        >>> clicks = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> Kunlun(4, 16, towers)(torch.randn(3, 4, 16), {"click": clicks}).shape
        torch.Size([3, 4, 16])
    """

    def __init__(
        self,
        num_tokens: int,
        embed_dim: int,
        towers: Mapping[str, EventTowerConfig],
        config: InteractionConfig = InteractionConfig(),  # noqa: B008  it is frozen
        *,
        comp_skip: bool = True,
        pattern: Sequence[LayerKind] | None = None,
        closing_pool: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_tokens=num_tokens, embed_dim=embed_dim)
        check_flags(comp_skip=comp_skip, closing_pool=closing_pool)
        check_towers(towers)
        if not isinstance(config, InteractionConfig):
            raise TypeError(f"config must be an InteractionConfig, got {type(config).__name__}.")
        depth = max(tower.num_layers for tower in towers.values())
        pattern = layer_pattern(depth, comp_skip) if pattern is None else tuple(pattern)
        if len(pattern) != depth:
            raise ValueError(f"pattern must have one kind for each of the {depth} layers, got {pattern!r}.")
        self.embed_dim, self.num_tokens = embed_dim, num_tokens
        self.plans = {name: tower_plan(pattern[: tower.num_layers], closing_pool) for name, tower in towers.items()}
        made: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
        finished = SubBlocks(False, False, False)
        self.layers = nn.ModuleList(
            KunlunLayer(
                num_tokens, embed_dim, towers,
                {name: plan[layer] if layer < len(plan) else finished for name, plan in self.plans.items()},
                config, **made,
            )
            for layer in range(depth)
        )  # fmt: skip
        pool_all = dict.fromkeys(towers, SubBlocks(True, False, False))
        self.closing = KunlunLayer(num_tokens, embed_dim, towers, pool_all, config, **made) if closing_pool else None
        rotary = {name: tower.make_rotary() for name, tower in towers.items()}
        self.rotary = nn.ModuleDict({name: module for name, module in rotary.items() if module is not None})

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        reset_modules(*self.layers)
        if self.closing is not None:
            self.closing.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        events: Mapping[str, Jagged],
        timestamps: Mapping[str, Jagged | Tensor] | None = None,
    ) -> Tensor:
        """Run the stack.

        Args:
            tokens: ``[B, n, E]``.
            events: by event type, TorchRec ``JaggedTensor`` or jagged nested tensor of B sequences, values
                ``[T_t, E_t]``.
            timestamps: by event type, ``[T_t]``, see ``RotaryTemporalEmbedding``; None, or an event type left out:
                rotation by positions alone.

        Returns:
            ``[B, n, E]``, X of the last layer.

        Raises:
            TypeError: an argument is of the wrong kind, or an event sequence is not jagged.
            ValueError: an event type is missing from the events, or one that has no tower is in events or timestamps; a
                shape, dtype, device or number of samples is wrong; or timestamps descend (on a CPU).
            UnsupportedError: no backend, or not the one named, runs such a call.
        """
        x = _checked(tokens, events, timestamps, list(self.plans), self.num_tokens, self.embed_dim)
        sequences: Mapping[str, Any] = {name: events[name] for name in self.plans}
        rotations = {
            name: self.rotary[name](sequences[name], _timestamps_of(timestamps, name)) if name in self.rotary else None
            for name in self.plans
        }
        summaries: Mapping[str, Tensor] = {}
        for layer in self.layers:
            x, sequences, summaries = layer(x, sequences, summaries, rotations)
        if self.closing is not None:
            x, _, _ = self.closing(x, sequences, summaries, rotations)
        return x

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_tokens={self.num_tokens}, embed_dim={self.embed_dim}"


@torch.fx.wrap
def _checked(tokens: Tensor, events: Any, timestamps: Any, names: list[str], num_tokens: int, embed_dim: int) -> Tensor:
    """The tokens, once they are known to fit, and events and timestamps to be theirs and for these towers."""
    check_tokens("tokens", tokens, num_tokens, embed_dim)
    _check_event_types("events", events, names)
    if timestamps is not None:
        _check_event_types("timestamps", timestamps, names)
    for name in names:
        if name not in events:
            raise ValueError(f"events must have event type {name!r}, got {list(events)}.")
        check_jagged(f"events[{name!r}]", events[name])
        samples = layout_of(events[name]).num_sequences
        if samples != tokens.shape[0]:
            raise ValueError(f"events[{name!r}] must be of the {tokens.shape[0]} samples of tokens, got {samples}.")
    return tokens


def _check_event_types(argument: str, given: Any, names: list[str]) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a mapping by event type, got {type(given).__name__}.")
    for name in given:
        if name not in names:
            raise ValueError(f"{argument} must be for the towers {names} alone, got event type {name!r}.")


@torch.fx.wrap
def _timestamps_of(timestamps: Any, name: str) -> Any:
    return None if timestamps is None else timestamps.get(name)
