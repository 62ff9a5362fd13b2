"""What a backend is: two questions answered from static facts, and two operations on tensors.

A backend's *capability* module answers the questions and imports torch alone; its *launch* module has the operations
and may import Triton. A small backend is one module for both.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..schedule.tiles import TableRequest
from ..spec import AttentionSpec


@dataclass(frozen=True)
class Arch:
    """The device of a call, as far as a backend's capability depends on it.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``, ...
        capability: the CUDA compute capability, such as ``(9, 0)``; ``None`` elsewhere.
        is_hip: whether ``"cuda"`` means an AMD GPU.
    """

    device_type: str
    capability: tuple[int, int] | None = None
    is_hip: bool = False


@cache
def arch_of(device: torch.device) -> Arch:
    """The architecture of a device."""
    if device.type != "cuda":
        return Arch(device.type)
    return Arch("cuda", torch.cuda.get_device_capability(device), torch.version.hip is not None)


class Capability(Protocol):
    """The questions that a backend answers without a tensor."""

    def supports(self, spec: AttentionSpec, arch: Arch) -> str | None:
        """Why the backend does not take such a call; ``None`` if it does."""
        ...

    def table_requests(self, spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
        """The tile tables that the operations want, in the order in which they will find them in ``tables``."""
        ...


class Geometry(NamedTuple):
    """The jagged side of a call: offsets and the tables asked for.

    Attributes:
        offsets_q: ``[B + 1]``; ``None`` for broadcast-Q, whose queries have no layout.
        offsets_kv: ``[B + 1]``; the same tensor as ``offsets_q`` in self-attention.
        tables: what ``table_requests`` asked for.
    """

    offsets_q: Tensor | None
    offsets_kv: Tensor
    tables: tuple[Tensor, ...]

    @property
    def num_sequences(self) -> int:
        """B."""
        return max(self.offsets_kv.numel() - 1, 0)


class Launch(Protocol):
    """The operations. Every element of every returned tensor is written; all are freshly allocated and contiguous.

    ``out``, ``dout``: ``[T_q, H, Dv]``, or ``[B, S, H, Dv]`` for broadcast-Q. ``lse``: fp32 (float64 for float64
    inputs), ``[T_q, H]`` or ``[B, S, H]``, natural logarithm, -inf for rows without a key; any number for element-wise
    heads; if no head is a softmax, its last dimension is 0. q, k and v have any strides whose last is 1, dout any.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """``out, lse`` of ``spec.kind``, broadcast-Q included."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        geometry: Geometry,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` in the dtypes of q, k and v."""
        ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a call with inputs of ``dtype`` accumulates and returns its ``lse``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def out_shape(q: Tensor, v: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Shape of ``out``: ``[T_q, H, Dv]``, or ``[B, S, H, Dv]`` for broadcast-Q."""
    shape = (q.shape[0], q.shape[1], v.shape[2])
    return shape if geometry.offsets_q is not None else (geometry.num_sequences, *shape)


def new_outputs(q: Tensor, v: Tensor, geometry: Geometry, has_softmax: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised ``out`` and ``lse``; fakes and backends allocate through this, so that both agree."""
    shape = out_shape(q, v, geometry)
    lse_shape = shape[:-1] if has_softmax else (*shape[:-2], 0)
    # PyTorch reads sizes in a third less time than a tuple of them.
    return v.new_empty(*shape), q.new_empty(*lse_shape, dtype=lse_dtype(q.dtype))


def new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised contiguous gradients of q, k and v."""
    return q.new_empty(*q.shape), k.new_empty(*k.shape), v.new_empty(*v.shape)
