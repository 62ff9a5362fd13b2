"""The host's side of the Hopper backward of self and cross attention, and of more shared queries than fit a tile."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...activations import SOFTMAX
from ...masks import Full
from ...schedule.arch import num_processors
from ...spec import AttentionSpec
from ..base import Geometry, new_gradients
from .backward import backward_kv, finish_dq, prepare_backward
from .backward_queries import backward_q
from .capability import BLOCK_KV, BLOCK_Q
from .descriptors import for_tma, ragged_descriptor

# Tiles of Q and dO in flight, by head dim: as many as fit.
_STAGES = {64: 4, 128: 2}
# Tiles of K and V, in the kernel of dQ.
_BLOCK_KEYS, _KEY_STAGES = 64, 3
_DS_STAGES = 2
# Sums of the gradient of shared queries: enough that few CTAs add to one at a time, few enough for the L2 cache.
_REPLICAS = 16
# Rows of no sequence count as one more sequence; one block more lets the last sequence's empty tile be padding.
_EXTRA_BLOCKS = 2
_FINISH_BLOCK = 2048


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` current: Triton launches on the current device and its current stream."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    geometry: Geometry,
    spec: AttentionSpec,
    tables: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``; one activation for all heads, D = Dv.

    Args:
        dout: ``[T_q, H, D]``; ``[B, S, H, D]`` for broadcast-Q, which takes no deterministic call here.
        q: ``[T_q, H, D]``.
        k: ``[T_kv, H_kv, D]``.
        v: ``[T_kv, H_kv, D]``.
        out: the forward's output, contiguous.
        lse: the forward's, ``[T_q, H]``, contiguous; not read for an element-wise activation.
        geometry: the offsets; its tables are not read.
        spec: of the call.
        tables: those of ``capability.table_requests`` after the forward's; for broadcast-Q one of key tiles.
    """
    dq, dk, dv = new_gradients(q, k, v)
    if not q.numel() or not k.numel() or not dout.numel():
        # There is nothing to map for TMA on one side, and nothing that the other side sees.
        return dq.zero_(), dk.zero_(), dv.zero_()
    if geometry.offsets_q is None:
        offsets_q = torch.arange(geometry.num_sequences + 1, device=q.device) * q.shape[0]
        dout, out = dout.reshape(-1, *q.shape[1:]), out.view(-1, *q.shape[1:])
    else:
        offsets_q = geometry.offsets_q.contiguous()
    with _on(q.device):
        call = _Call(
            for_tma(dout), for_tma(q), for_tma(k), for_tma(v), dq, dk, dv, tables, offsets_q,
            geometry.offsets_kv.contiguous(), geometry.num_sequences, spec,
        )  # fmt: skip
        _launch(call, out, lse)
    return dq, dk, dv


@dataclass(frozen=True)
class _Call:
    """The tensors of one call, in layouts that TMA takes, and what is static."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    tables: tuple[Tensor, ...]
    offsets_q: Tensor
    offsets_kv: Tensor
    num_sequences: int
    spec: AttentionSpec

    @property
    def shared(self) -> bool:
        """Whether all sequences have the same queries."""
        return self.spec.kind == "broadcast_q"

    def integers(self, *shape: int) -> Tensor:
        """Uninitialised int32 numbers."""
        return torch.empty(shape, dtype=torch.int32, device=self.q.device)

    def constants(self) -> dict[str, Any]:
        """What both kernels of gradients are compiled for."""
        spec = self.spec
        return {
            "H": spec.num_heads, "GROUP": spec.group_size, "D": spec.head_dim, "MASK": spec.mask.code,
            "ACT": spec.activation[0], "FAST_TANH": self.q.device.type == "cuda", "num_warps": 4, "num_stages": 1,
        }  # fmt: skip


def _launch(call: _Call, out: Tensor, lse: Tensor) -> None:
    spec, q, (total_q, heads, dim) = call.spec, call.q, call.dout.shape
    softmax, with_dq = spec.activation[0] == SOFTMAX, not spec.deterministic
    blocks = total_q // BLOCK_Q + call.num_sequences + _EXTRA_BLOCKS
    stats = q.new_empty(blocks * heads * 2 * BLOCK_Q if softmax else 0, dtype=torch.float32)
    if call.shared:
        dq_sum = q.new_zeros((_REPLICAS, *q.shape), dtype=torch.float32)
    else:
        dq_sum = q.new_empty(q.shape if with_dq else (1, heads, dim), dtype=torch.float32)
    counters = call.integers(4)
    # Without an out_scale everything is 0 in the end; the sums need only be finite.
    inverse_out_scale = 1.0 / spec.out_scale if spec.out_scale else 0.0
    in_two = with_dq and not call.shared and isinstance(spec.mask, Full)
    prepare_backward[(blocks * heads,)](
        call.dout, out, lse, stats, dq_sum, counters, call.offsets_q, call.offsets_kv, call.num_sequences, total_q,
        call.k.shape[0], call.dout.stride(0), inverse_out_scale,
        H=heads, D=dim, BM=BLOCK_Q, SOFTMAX=softmax,
        ZERO="keyless" if in_two else "all" if with_dq and not call.shared else "none", num_warps=4,
    )  # fmt: skip
    if in_two:
        _launch_keys(call, call.tables[1], stats, dq_sum, counters[:1], "")
        _launch_keys(call, call.tables[0], stats, dq_sum, counters[1:], "add")
    else:
        _launch_keys(call, call.tables[0], stats, dq_sum, counters[:1], "add" if with_dq or call.shared else "none")
    if call.shared:
        call.dq.copy_(dq_sum.sum(0).mul_(spec.scale * spec.out_scale))
    elif with_dq:
        finish_dq[(-(-q.numel() // _FINISH_BLOCK),)](
            dq_sum, call.dq, total_q, spec.scale * spec.out_scale, WIDTH=heads * dim, BLOCK=_FINISH_BLOCK, num_warps=8
        )
    else:
        _launch_queries(call, stats, counters[1:])


def _launch_keys(call: _Call, table: Tensor, stats: Tensor, dq_sum: Tensor, counter: Tensor, dq: str) -> None:
    spec, dim = call.spec, call.spec.head_dim
    items = table.shape[0] * spec.num_kv_heads
    programs = min(num_processors(call.q.device), items)
    backward_kv[(programs,)](
        ragged_descriptor(call.q, BLOCK_Q, dim),
        ragged_descriptor(call.k, BLOCK_KV, dim),
        ragged_descriptor(call.v, BLOCK_KV, dim),
        ragged_descriptor(call.dout, BLOCK_Q, dim),
        ragged_descriptor(dq_sum.view(-1, spec.num_heads, dim), BLOCK_Q, dim // 2),
        ragged_descriptor(call.dk, BLOCK_KV // 2, dim),
        ragged_descriptor(call.dv, BLOCK_KV // 2, dim),
        stats, table, counter, call.integers(2 * programs), call.offsets_q, call.offsets_kv, call.num_sequences,
        call.dout.shape[0], call.k.shape[0], items, spec.scale, spec.out_scale,
        BM=BLOCK_Q, BN=BLOCK_KV, STAGES=_STAGES[dim], DS_STAGES=_DS_STAGES, DQ=dq,
        REPLICAS=_REPLICAS if call.shared else 0, **call.constants(),
    )  # fmt: skip


def _launch_queries(call: _Call, stats: Tensor, counter: Tensor) -> None:
    spec, dim, table = call.spec, call.spec.head_dim, call.tables[1]
    items = table.shape[0] * spec.num_heads
    programs = min(num_processors(call.q.device), items)
    backward_q[(programs,)](
        ragged_descriptor(call.q, BLOCK_Q, dim),
        ragged_descriptor(call.k, _BLOCK_KEYS, dim),
        ragged_descriptor(call.v, _BLOCK_KEYS, dim),
        ragged_descriptor(call.dout, BLOCK_Q, dim),
        ragged_descriptor(call.dq, BLOCK_Q, dim),
        stats, table, counter, call.integers(2 * programs), call.offsets_q, call.offsets_kv, call.num_sequences,
        call.q.shape[0], call.k.shape[0], items, spec.scale, spec.out_scale,
        BM=2 * BLOCK_Q, BN=_BLOCK_KEYS, STAGES=_KEY_STAGES, **call.constants(),
    )  # fmt: skip
