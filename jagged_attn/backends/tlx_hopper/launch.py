"""The operations of the Hopper backend."""

from torch import Tensor

from ...spec import AttentionSpec
from ..base import Geometry
from . import launch_backward, launch_broadcast_q
from .launch_forward import forward

__all__ = ["backward", "forward"]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``."""
    streams_keys_once = geometry.offsets_q is None and q.shape[0] <= launch_broadcast_q.MAX_QUERIES
    run = launch_broadcast_q.backward if streams_keys_once else launch_backward.backward
    return run(dout, q, k, v, out, lse, geometry, spec, geometry.tables[1 if streams_keys_once else -1])
