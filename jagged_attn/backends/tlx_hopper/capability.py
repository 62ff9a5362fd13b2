"""What the Hopper backend runs, and the tile tables it wants. Imports torch alone."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from ...activations import SOFTMAX
from ...masks import Full
from ...schedule.hopper import forward_config
from ...schedule.tiles import WHOLE_SEQUENCE, TableRequest
from ...spec import AttentionSpec
from ..base import Arch

HEAD_DIMS = (64, 128)
BROADCAST_Q_BLOCK_KV = 64
# Tiles of dK and dV, and of dQ where that is a kernel of its own.
BLOCK_Q, BLOCK_KV = 64, 128
TABLE_REQUEST = TableRequest("kv", BLOCK_KV, "q")
# The same in two launches: the first tile of each sequence stores dQ, the others add to it.
FIRST_TABLE_REQUEST = TableRequest("kv", WHOLE_SEQUENCE, "q")
REST_TABLE_REQUEST = TableRequest("kv", BLOCK_KV, "q", skip=BLOCK_KV)
DETERMINISTIC_TABLE_REQUEST = TableRequest("q", 2 * BLOCK_Q, "kv")
NO_TLX = "needs TLX, which comes with fbtriton (pip install --no-deps fbtriton==3.7.4) and not with this triton"


@cache
def _has_tlx() -> bool:
    """Whether the installed triton carries TLX: found by its files, because triton itself is not to be imported."""
    spec = find_spec("triton")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "language" / "extra" / "tlx").is_dir() for folder in folders or ())


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``."""
    if arch.device_type != "cuda" or arch.is_hip or arch.capability is None:
        return f"runs on NVIDIA GPUs, got device type {arch.device_type!r}"
    if arch.capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), got {arch.capability}"
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
    if not _has_tlx():
        return NO_TLX
    return None


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: of the forward and of the backward kernels."""
    if spec.kind == "broadcast_q":
        return (
            TableRequest("kv", WHOLE_SEQUENCE, "kv"),
            TableRequest("kv", BROADCAST_Q_BLOCK_KV, "kv"),
            TableRequest("kv", BLOCK_KV, "kv"),
        )
    forward = TableRequest("q", forward_config(spec.head_dim, None, spec.mask).block_q, "kv")
    if spec.deterministic:
        return forward, TABLE_REQUEST, DETERMINISTIC_TABLE_REQUEST
    if isinstance(spec.mask, Full):
        return forward, REST_TABLE_REQUEST, FIRST_TABLE_REQUEST
    return forward, TABLE_REQUEST
