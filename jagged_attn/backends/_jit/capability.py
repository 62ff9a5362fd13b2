"""What the TLX backends take and refuse alike. Imports torch alone."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from ...activations import SOFTMAX
from ...masks import Full
from ...spec import AttentionSpec
from ..base import Arch

HEAD_DIMS = (64, 128)
NO_TLX = "needs TLX, which comes with fbtriton (pip install --no-deps fbtriton==3.7.4) and not with this triton"


@cache
def _has_tlx() -> bool:
    """Whether the installed triton carries TLX: found by its files, because triton itself is not to be imported."""
    spec = find_spec("triton")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "language" / "extra" / "tlx").is_dir() for folder in folders or ())


def refusal(spec: AttentionSpec, arch: Arch, capabilities: tuple[tuple[int, int], ...], needed: str) -> str | None:
    """Why TLX kernels for GPUs of these ``capabilities``, ``needed`` in words, do not run a call; ``None``: they do."""
    if arch.device_type != "cuda" or arch.is_hip or arch.capability is None:
        return f"runs on NVIDIA GPUs, got device type {arch.device_type!r}"
    if arch.capability not in capabilities:
        return f"needs compute capability {needed}, got {arch.capability}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {spec.dtype}"
    if spec.head_dim not in HEAD_DIMS or spec.value_head_dim != spec.head_dim:
        return f"takes equal head dims of 64 or 128, got {spec.head_dim} and {spec.value_head_dim}"
    if len(spec.activation) > 1:
        return f"takes one activation for all heads, got {spec.activation}"
    if spec.activation[0] == SOFTMAX and spec.scale <= 0:
        return f"takes a positive scale with the softmax, got {spec.scale}"
    if spec.kind == "broadcast_q":
        if not isinstance(spec.mask, Full):
            return f"takes broadcast-Q without a mask only, got {spec.mask}"
        if spec.group_size > 1:
            return (
                f"takes broadcast-Q with as many key heads as heads only, got {spec.num_kv_heads} of {spec.num_heads}"
            )
    return None if _has_tlx() else NO_TLX
