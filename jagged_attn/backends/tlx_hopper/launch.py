"""The operations of the Hopper backend."""

import torch
from torch import Tensor

from ...spec import AttentionSpec
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
    return _in_parts(dout, q, k, v, out, lse, geometry, spec, narrow)


def _in_parts(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec,
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Broadcast-Q by as many queries at a time as fit a tile: repeatable, at the price of K and V read each time."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for first in range(0, q.shape[0], MAX_QUERIES):
        rows = slice(first, first + MAX_QUERIES)
        dq[rows], dk_part, dv_part = launch_broadcast_q.backward(
            dout[:, rows], q[rows], k, v, out[:, rows].contiguous(), lse[:, rows].contiguous(), geometry, spec, table
        )
        dk += dk_part
        dv += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)
