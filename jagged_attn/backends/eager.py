"""The eager backend: vectorised PyTorch on any device, in any floating dtype; what ``backend="auto"`` uses on a CPU.

Sequences of similar lengths are padded together (``_buckets``, ``_rows``) and computed as one dense batch
(``_padded``), in fp32 (float64 for float64 inputs). Padding is zeros, never rows of another sequence, so nothing passes
from one sequence to another. Each layout's buckets are planned once, on the host; on a GPU that waits for the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..layout import derived
from ..schedule.tiles import TableRequest
from ..spec import AttentionSpec
from . import _padded
from ._buckets import Chunk, Cost, Plan, plan_sync
from ._rows import RowRange, Rows
from .base import Arch, Geometry, lse_dtype, out_shape

# Elements of a chunk: on a CPU what stays in its caches, elsewhere enough work for a kernel launch.
_BUDGET = {"cpu": 1 << 19}
_BUDGET_ELSEWHERE = 1 << 21


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``: every valid call."""
    return None


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: none."""
    return ()


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See ``Launch.forward``."""
    dtype = lse_dtype(q.dtype)
    shape = out_shape(q, v, geometry)
    plan = _plan(q, k, geometry, spec)
    attend: Callable[..., tuple[Tensor, Tensor | None]] = (
        _padded.flash_forward if _padded.flash_runs(spec, q.device.type) else _padded.forward
    )
    out = _Packed(shape, v.dtype, q.device, plan.fills_q)
    lse = _Packed(shape[:-1], dtype, q.device, plan.fills_q, background=-torch.inf)
    for chunk in plan.chunks:
        q_c = _queries(q, chunk, geometry, dtype)
        k_c, v_c = (_heads_first(chunk.rows_kv.gather(x, dtype)) for x in (k, v))
        out_c, lse_c = attend(q_c, k_c, v_c, chunk, spec)
        out.put(chunk.rows_q, out_c)
        if lse_c is not None:
            lse.put(chunk.rows_q, lse_c)
    return out.tensor, lse.tensor if spec.has_softmax else lse.tensor.new_empty((*shape[:-2], 0))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``."""
    dtype = lse_dtype(q.dtype)
    plan = _plan(q, k, geometry, spec)
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
        _padded.flash_backward if _padded.flash_runs(spec, q.device.type) else _padded.backward
    )
    dq = _Shared(q, dtype) if geometry.offsets_q is None else _Packed(q.shape, q.dtype, q.device, plan.fills_q)
    dk, dv = (_Packed(x.shape, x.dtype, x.device, plan.fills_kv) for x in (k, v))
    for chunk in plan.chunks:
        q_c = _queries(q, chunk, geometry, dtype)
        k_c, v_c = (_heads_first(chunk.rows_kv.gather(x, dtype)) for x in (k, v))
        do_c = _heads_first(chunk.rows_q.gather(dout, dtype))
        out_c, lse_c = ((_heads_first(chunk.rows_q.gather(x, dtype)) if spec.has_softmax else None) for x in (out, lse))
        dq_c, dk_c, dv_c = attend(do_c, q_c, k_c, v_c, out_c, lse_c, chunk, spec)
        dq.put(chunk.rows_q, dq_c)
        dk.put(chunk.rows_kv, dk_c)
        dv.put(chunk.rows_kv, dv_c)
    return dq.tensor, dk.tensor, dv.tensor


def _plan(q: Tensor, k: Tensor, geometry: Geometry, spec: AttentionSpec) -> Plan:
    """The chunks of a call, remembered beside its offsets; the first time, a GPU is waited for."""
    is_flash = _padded.flash_runs(spec, q.device.type)
    cost = Cost(
        budget=_BUDGET.get(q.device.type, _BUDGET_ELSEWHERE),
        per_pair=0 if is_flash else spec.num_heads,
        per_row=spec.num_heads * max(spec.head_dim, spec.value_head_dim),
        # Flash keeps no scores, and a batch that needs neither padding nor a cast is not copied either.
        whole=is_flash and q.dtype == lse_dtype(q.dtype),
    )
    offsets_q, offsets_kv = geometry.offsets_q, geometry.offsets_kv
    facts = (offsets_q, offsets_kv, q.shape[0], k.shape[0], cost)
    other = offsets_kv if offsets_q is None else offsets_q
    return derived(offsets_kv, other, ("buckets", offsets_q is None, *facts[2:]), lambda: plan_sync(*facts))


def _queries(q: Tensor, chunk: Chunk, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """``[n, H, L_q, D]``; of shared queries a view that repeats them."""
    if geometry.offsets_q is None:
        return q.to(dtype).transpose(0, 1).expand(chunk.rows_q.count, -1, -1, -1)
    return _heads_first(chunk.rows_q.gather(q, dtype))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


class _Packed:
    """A packed tensor, or a ``[B, S, ...]`` one, that the chunks fill; chunks come as ``[n, H, L, ...]``.

    Args:
        shape: of the result.
        dtype: of the result.
        device: of the result.
        is_filled: whether the chunks write every row.
        background: what rows in no chunk hold.
    """

    def __init__(
        self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, is_filled: bool,
        background: float = 0.0,
    ) -> None:  # fmt: skip
        # One row more than the result: there RowIndex.scatter puts what is padding.
        self._rows = torch.empty((shape[0] + 1, *shape[1:]), dtype=dtype, device=device)
        # Not a view of it to autograd, which forbids writing to a view that an operator returns.
        strides = self._rows.stride()
        self.tensor = torch.empty(0, dtype=dtype, device=device).set_(
            self._rows.untyped_storage(), 0, tuple(shape), strides
        )
        if not is_filled:
            self.tensor.fill_(background)

    def put(self, rows: Rows, x: Tensor) -> None:
        x = x.transpose(1, 2)
        if isinstance(rows, RowRange) and rows.count * rows.length == self.tensor.shape[0]:
            # The chunk is the whole batch: what a flash kernel returns is already laid out as the result.
            self.tensor = x.flatten(0, 1).to(self.tensor.dtype).contiguous()
        else:
            rows.scatter(self._rows, x)


class _Shared:
    """The gradient of queries that all sequences share: a sum over chunks, never one for each sequence of the batch."""

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self._dtype = q.dtype
        self._sum = torch.zeros(q.shape, dtype=dtype, device=q.device)

    def put(self, rows: Rows, x: Tensor) -> None:
        self._sum += x.sum(dim=0).transpose(0, 1)

    @property
    def tensor(self) -> Tensor:
        return self._sum.to(self._dtype)
