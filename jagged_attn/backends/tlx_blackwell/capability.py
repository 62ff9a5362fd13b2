"""What the Blackwell backend runs, and the tile tables it wants. Imports torch alone."""

from ...schedule.blackwell import forward_config
from ...schedule.tiles import WHOLE_SEQUENCE, TableRequest
from ...spec import AttentionSpec
from .._jit.capability import HEAD_DIMS, NO_TLX, refusal
from ..base import Arch

__all__ = ["HEAD_DIMS", "NO_TLX", "supports", "table_requests"]
# Keys of a tile of dK and dV.
BLOCK_KV = 128


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``."""
    return refusal(spec, arch, ((10, 0), (10, 3)), "10.0 or 10.3 (Blackwell)")


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: the forward's, then the backward's."""
    if spec.kind == "broadcast_q":
        return TableRequest("kv", WHOLE_SEQUENCE, "kv"), TableRequest("kv", BLOCK_KV, "kv")
    block_q = forward_config(spec.head_dim, None, spec.mask).block_q
    return TableRequest("q", block_q, "kv"), TableRequest("kv", BLOCK_KV, "q")
