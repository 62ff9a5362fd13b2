"""What the Blackwell backend runs, and the tile tables it wants. Imports torch alone."""

from ...schedule.blackwell import ROWS, forward_config
from ...schedule.blackwell_backward import block_kv
from ...schedule.tiles import WHOLE_SEQUENCE, TableRequest
from ...spec import AttentionSpec
from .._jit.capability import HEAD_DIMS, NO_TLX, refusal
from ..base import Arch

__all__ = ["HEAD_DIMS", "NO_TLX", "supports", "table_requests"]


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``."""
    return refusal(spec, arch, ((10, 0), (10, 3)), "10.0 or 10.3 (Blackwell)")


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: the forward's, then the backward's."""
    keys = block_kv(spec.head_dim)
    if spec.kind == "broadcast_q":
        # Tiles where the queries stay, and where the keys do.
        tiles = (TableRequest("kv", rows, "kv") for rows in sorted({ROWS, keys}))
        return TableRequest("kv", WHOLE_SEQUENCE, "kv"), *tiles
    block_q = forward_config(spec.head_dim, None, spec.mask).block_q
    return TableRequest("q", block_q, "kv"), TableRequest("kv", keys, "q")
