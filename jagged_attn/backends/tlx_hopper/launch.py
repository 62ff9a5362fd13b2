"""The operations of the Hopper backend."""

from torch import Tensor

from ...spec import AttentionSpec
from .._jit.backward_shared import by_parts
from ..base import Geometry
from . import launch_backward, launch_broadcast_q
from .launch_broadcast_q import MAX_QUERIES
from .launch_forward import forward

__all__ = ["backward", "forward"]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``."""
    if geometry.offsets_q is not None:
        return launch_backward.backward(dout, q, k, v, out, lse, geometry, spec, geometry.tables[1:])
    narrow, wide = geometry.tables[1:]
    if q.shape[0] <= MAX_QUERIES:
        return launch_broadcast_q.backward(dout, q, k, v, out, lse, geometry, spec, narrow)
    if not spec.deterministic:
        return launch_backward.backward(dout, q, k, v, out, lse, geometry, spec, (wide,))
    return by_parts(launch_broadcast_q.backward, MAX_QUERIES, dout, q, k, v, out, lse, geometry, spec, narrow)
