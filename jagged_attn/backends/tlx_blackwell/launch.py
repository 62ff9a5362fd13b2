"""The operations of the Blackwell backend."""

from torch import Tensor

from ...spec import AttentionSpec
from ..base import Geometry
from .launch_forward import forward

__all__ = ["backward", "forward"]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``Launch.backward``."""
    from . import launch_backward, launch_broadcast_q

    module = launch_backward if geometry.offsets_q is not None else launch_broadcast_q
    return module.backward(dout, q, k, v, out, lse, geometry, spec, geometry.tables[1:])
