"""``AttentionSpec``: the static facts of one attention call, on which dispatch, configs and refusals key."""

from dataclasses import dataclass
from typing import Literal

import torch

from .activations import SOFTMAX
from .masks import Mask

Kind = Literal["self", "cross", "broadcast_q"]


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a call that does not depend on the data: hashable, and the same for every batch of a model.

    Attributes:
        kind: ``"self"`` (one layout), ``"cross"`` (two) or ``"broadcast_q"`` (queries shared by all sequences).
        dtype: dtype of q, k and v, after autocast.
        num_heads: H, heads of q.
        num_kv_heads: heads of k and v; divides H.
        head_dim: D, of q and k.
        value_head_dim: Dv, of v and the output.
        mask: what may attend to what.
        activation: one name for all heads, or one a head (``normalize_activation``).
        scale: factor of the scores before the activation.
        out_scale: factor of the output.
        deterministic: whether gradients must be bit-for-bit repeatable.
    """

    kind: Kind
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    mask: Mask
    activation: tuple[str, ...]
    scale: float
    out_scale: float
    deterministic: bool

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def activation_of_heads(self) -> tuple[str, ...]:
        """The activation of each of the H heads."""
        return self.activation if len(self.activation) == self.num_heads else self.activation * self.num_heads

    @property
    def has_softmax(self) -> bool:
        """Whether any head is normalised by a softmax."""
        return SOFTMAX in self.activation
