"""What the Hopper backend runs, and the tile tables it wants. Imports torch alone."""

from ...schedule.hopper import forward_config
from ...schedule.tiles import WHOLE_SEQUENCE, TableRequest
from ...spec import AttentionSpec
from .._jit.capability import HEAD_DIMS, NO_TLX, refusal
from ..base import Arch

__all__ = ["HEAD_DIMS", "NO_TLX", "supports", "table_requests"]
BROADCAST_Q_BLOCK_KV = 64
# Tiles of dK and dV, and of dQ where that is a kernel of its own.
BLOCK_Q, BLOCK_KV = 64, 128
KEYS_TABLE = TableRequest("kv", BLOCK_KV, "q")
QUERIES_TABLE = TableRequest("q", 2 * BLOCK_Q, "kv")


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``."""
    return refusal(spec, arch, ((9, 0),), "9.0 (Hopper)")


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: of the forward and of the backward kernels."""
    if spec.kind == "broadcast_q":
        return (
            TableRequest("kv", WHOLE_SEQUENCE, "kv"),
            TableRequest("kv", BROADCAST_Q_BLOCK_KV, "kv"),
            TableRequest("kv", BLOCK_KV, "kv"),
        )
    forward = TableRequest("q", forward_config(spec.head_dim, None, spec.mask).block_q, "kv")
    # Numbers of rows decide, too, whether dQ is a kernel of its own, and whether the forward takes its table.
    return forward, KEYS_TABLE, QUERIES_TABLE
