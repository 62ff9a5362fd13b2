"""What a Kunlun stack is made of, before any parameter exists: towers, sizes, and what each layer runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from ..masks import Mask, SlidingWindow
from ..validation import check_flags, check_mask
from .gdpa import check_elementwise
from .options import AttentionOptions, Heads, check_sizes
from .rotary import RotaryTemporalEmbedding
from .wukong import Partition, check_partition

LayerKind = Literal["global", "local", "full"]


class SubBlocks(NamedTuple):
    """What a layer runs for one event tower.

    Attributes:
        pool: a fresh summary by ``HierarchicalSeedPooling``; otherwise the summary of an earlier layer is used again.
        feed_forward: ``PersonalizedFeedForward``.
        attend: windowed self-attention.
    """

    pool: bool
    feed_forward: bool
    attend: bool


@dataclass(frozen=True)
class EventTowerConfig:
    """How one event type is modelled; events of different types may differ in all of this.

    Attributes:
        embed_dim: E_t, columns of the events.
        num_heads: H; divides E_t.
        num_tokens: tokens of the summary.
        num_layers: layers of the tower.
        window: w, an event sees those at most w before and after it; or a mask, such as ``BlockDiagonal(64)``.
        num_seeds: seeds of the pooling, more than ``num_tokens``; None: ``8 * num_tokens``, the ratio of the published
            example.
        kron_rank: k of the pooling's ``SumKronLinear``.
        num_keys: n_kv of the feed-forward.
        activation: of the feed-forward; a name, or a tuple with one a head.
        ffn_scale: of the feed-forward's scores.
        rotary: whether the self-attention is rotated by positions and, where given, timestamps.
        rotary_options: keywords of ``RotaryTemporalEmbedding``, such as ``{"gap": "to_last"}``.
        rotate_values: see ``TemporalSelfAttention``.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or the window neither an int nor a mask.
        ValueError: a size is not positive, H does not divide E_t, the seeds are not more than the tokens, or D does not
            suit the rotation.

    Example:
        >>> EventTowerConfig(embed_dim=256, num_heads=8, num_tokens=32, num_layers=3, window=100).num_seeds
        256
    """

    embed_dim: int
    num_heads: int
    num_tokens: int
    num_layers: int
    window: int | Mask
    num_seeds: int | None = None
    kron_rank: int = 8
    num_keys: int = 128
    activation: str | tuple[str, ...] = "gelu"
    ffn_scale: float = 1.0
    rotary: bool = True
    rotary_options: Mapping[str, Any] | None = None
    rotate_values: bool = False

    def __post_init__(self) -> None:
        heads = Heads.checked(self.embed_dim, self.num_heads, None, None)
        check_sizes(num_tokens=self.num_tokens, num_layers=self.num_layers, num_seeds=self.num_seeds)
        check_sizes(kron_rank=self.kron_rank, num_keys=self.num_keys)
        if self.num_seeds is None:
            object.__setattr__(self, "num_seeds", 8 * self.num_tokens)
        if self.num_seeds <= self.num_tokens:  # type: ignore[operator]
            raise ValueError(f"num_seeds must be more than num_tokens = {self.num_tokens}, got {self.num_seeds}.")
        if isinstance(self.window, Mask):
            check_mask("window", self.window)
        else:
            check_sizes(window=self.window)
        check_flags(rotary=self.rotary, rotate_values=self.rotate_values)
        check_elementwise(AttentionOptions.checked(self.num_heads, self.mask, self.activation, self.ffn_scale, "auto"))
        if self.rotary:
            RotaryTemporalEmbedding(heads.head_dim, **(self.rotary_options or {}))

    @property
    def mask(self) -> Mask:
        """The mask of the self-attention."""
        return self.window if isinstance(self.window, Mask) else SlidingWindow(self.window, self.window)

    def make_rotary(self) -> RotaryTemporalEmbedding | None:
        """The rotation of the tower's self-attention."""
        if not self.rotary:
            return None
        return RotaryTemporalEmbedding(self.embed_dim // self.num_heads, **(self.rotary_options or {}))


@dataclass(frozen=True)
class InteractionConfig:
    """How the tokens of a sample interact. The sources give no numbers for these; the defaults are ours.

    Attributes:
        num_summary_tokens: n_sum, tokens of X_sum.
        num_experts: G of ``WukongExperts``.
        rank: k of its layers.
        hidden: width inside every MLP; None: the model width E.
        partition: see ``WukongExperts``.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is not positive, or ``partition`` is not known.
    """

    num_summary_tokens: int = 8
    num_experts: int = 2
    rank: int = 8
    hidden: int | None = None
    partition: Partition = "strided"

    def __post_init__(self) -> None:
        check_sizes(num_summary_tokens=self.num_summary_tokens, num_experts=self.num_experts, rank=self.rank)
        check_sizes(hidden=self.hidden)
        check_partition(self.partition)


def check_towers(towers: Mapping[str, EventTowerConfig]) -> None:
    """Raise unless there are towers, each an ``EventTowerConfig`` under a name that a module can have.

    The names are part of those of the parameters, which FSDP, ``torch.fx`` and others look up as attributes. So one
    that ``nn.ModuleDict`` has for itself is refused, not stored under another name that nobody would look for.
    """
    if not isinstance(towers, Mapping):
        raise TypeError(f"towers must be a mapping by event type, got {type(towers).__name__}.")
    if not towers:
        raise ValueError("towers must hold at least one event type, got none.")
    for name, tower in towers.items():
        if not isinstance(name, str):
            raise TypeError(f"towers must have strings as event types, got {name!r}.")
        if not name or "." in name or hasattr(nn.ModuleDict(), name):
            raise ValueError(
                "towers must have event types that can name a module, without a dot and no attribute of nn.ModuleDict, "
                f"got {name!r}."
            )
        if not isinstance(tower, EventTowerConfig):
            raise TypeError(f"towers must hold EventTowerConfig, got {type(tower).__name__} for {name!r}.")


_SUB_BLOCKS: dict[LayerKind, SubBlocks] = {
    "global": SubBlocks(pool=True, feed_forward=True, attend=False),
    "local": SubBlocks(pool=False, feed_forward=False, attend=True),
    "full": SubBlocks(pool=True, feed_forward=True, attend=True),
}


def layer_pattern(num_layers: int, comp_skip: bool) -> tuple[LayerKind, ...]:
    """``global, local, global, ...`` with CompSkip, ``full, full, ...`` without.

    Example:
        >>> layer_pattern(3, comp_skip=True)
        ('global', 'local', 'global')
    """
    return tuple(("local" if layer % 2 else "global") if comp_skip else "full" for layer in range(num_layers))


def tower_plan(pattern: Sequence[LayerKind], reads_last: bool) -> tuple[SubBlocks, ...]:
    """What each layer of a tower runs.

    Args:
        pattern: the kind of each of the tower's layers.
        reads_last: whether something reads the events after the last layer. If not, what comes after the last pooling
            would change nothing and get no gradient, so it is left out.

    Raises:
        ValueError: a kind is not known, or the first layer does not pool.

    Example:
        >>> [block.feed_forward for block in tower_plan(("global", "local", "global"), reads_last=False)]
        [True, False, False]
    """
    for layer, kind in enumerate(pattern):
        if kind not in get_args(LayerKind):
            raise ValueError(f"pattern must hold {', '.join(get_args(LayerKind))}, got {kind!r} at layer {layer}.")
    if not pattern or not _SUB_BLOCKS[pattern[0]].pool:
        raise ValueError(f"pattern must begin with a layer that pools, global or full, got {tuple(pattern)!r}.")
    plan = [_SUB_BLOCKS[kind] for kind in pattern]
    if not reads_last:
        last_pool = max(layer for layer, blocks in enumerate(plan) if blocks.pool)
        plan[last_pool:] = [SubBlocks(blocks.pool, False, False) for blocks in plan[last_pool:]]
    return tuple(plan)
