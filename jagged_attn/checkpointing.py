"""Activation checkpointing that does not run the attention again."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def keep_attention() -> Any:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` that keeps the results of attention operators.

    A checkpointed layer keeps its inputs alone, and its backward runs its forward once more. With this, outputs and
    log-sum-exps of ``jagged_attn::attention`` are kept as well, ``[T, H, Dv]`` and ``[T, H]`` a call: the second
    forward runs everything else, and the attention forward kernel is launched once per step and layer. Under
    ``torch.compile`` it decides what the compiled backward recomputes, likewise.

    Returns:
        The two contexts that ``checkpoint`` asks for.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> from torchrec import JaggedTensor
        >>> layer = JaggedMultiHeadAttention(8, 2)
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=keep_attention)
        >>> y.values().sum().backward()
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Tile tables are found beside the offsets the second time, or made again.
    is_kept = operator is torch.ops.jagged_attn.attention.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
