"""The host's side of the Hopper backward of self and cross attention."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...activations import SOFTMAX
from ...schedule.arch import num_processors
from ...schedule.tiles import TableRequest
from ...spec import AttentionSpec
from ..base import Geometry, new_gradients
from .backward import backward_kv, finish_dq, prepare_backward
from .descriptors import for_tma, ragged_descriptor

# The sum of dQ takes the key tiles in the order in which they happen to end.
DETERMINISTIC = False
HEAD_DIMS = (64, 128)
BLOCK_Q, BLOCK_KV = 64, 128
TABLE_REQUEST = TableRequest("kv", BLOCK_KV, "q")

# Tiles of Q and dO in flight, by head dim: as many as fit.
_STAGES = {64: 4, 128: 2}
_DS_STAGES = 2
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
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``; one activation for all heads, D = Dv.

    Args:
        dout: ``[T_q, H, D]``.
        q: ``[T_q, H, D]``.
        k: ``[T_kv, H_kv, D]``.
        v: ``[T_kv, H_kv, D]``.
        out: the forward's output, contiguous.
        lse: the forward's, ``[T_q, H]``, contiguous; not read for an element-wise activation.
        geometry: the offsets; its tables are not read.
        spec: of the call.
        table: the tile table of ``TABLE_REQUEST``.
    """
    dq, dk, dv = new_gradients(q, k, v)
    if not q.numel() or not k.numel():
        # There is nothing to map for TMA on one side, and nothing that the other side sees.
        return dq.zero_(), dk.zero_(), dv.zero_()
    with _on(q.device):
        _launch(dout, q, k, v, out, lse, geometry, spec, table, (dq, dk, dv))
    return dq, dk, dv


def _launch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    geometry: Geometry,
    spec: AttentionSpec,
    table: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    assert geometry.offsets_q is not None
    dq, dk, dv = grads
    (total_q, heads, dim), total_kv, num_sequences = q.shape, k.shape[0], geometry.num_sequences
    offsets_q, offsets_kv = geometry.offsets_q.contiguous(), geometry.offsets_kv.contiguous()
    q, k, v, dout = for_tma(q), for_tma(k), for_tma(v), for_tma(dout)
    softmax = spec.activation[0] == SOFTMAX
    blocks = total_q // BLOCK_Q + num_sequences + _EXTRA_BLOCKS
    items = table.shape[0] * spec.num_kv_heads
    programs = min(num_processors(q.device), items)
    stats = q.new_empty(blocks * heads * 2 * BLOCK_Q if softmax else 0, dtype=torch.float32)
    dq_sum = q.new_empty(q.shape, dtype=torch.float32)
    counter, slots = (torch.empty(n, dtype=torch.int32, device=q.device) for n in (1, 2 * programs))

    # Without an out_scale everything is 0 in the end; the sums need only be finite.
    inverse_out_scale = 1.0 / spec.out_scale if spec.out_scale else 0.0
    prepare_backward[(blocks * heads,)](
        dout, out, lse, stats, dq_sum, counter, offsets_q, num_sequences, total_q, dout.stride(0), inverse_out_scale,
        H=heads, D=dim, BM=BLOCK_Q, SOFTMAX=softmax, num_warps=4,
    )  # fmt: skip
    backward_kv[(programs,)](
        ragged_descriptor(q, BLOCK_Q, dim),
        ragged_descriptor(k, BLOCK_KV, dim),
        ragged_descriptor(v, BLOCK_KV, dim),
        ragged_descriptor(dout, BLOCK_Q, dim),
        ragged_descriptor(dq_sum, BLOCK_Q, dim // 2),
        ragged_descriptor(dk, BLOCK_KV // 2, dim),
        ragged_descriptor(dv, BLOCK_KV // 2, dim),
        stats, table, counter, slots, offsets_q, offsets_kv, num_sequences, total_q, total_kv, items,
        spec.scale, spec.out_scale,
        H=heads, GROUP=spec.group_size, D=dim, BM=BLOCK_Q, BN=BLOCK_KV, STAGES=_STAGES[dim], DS_STAGES=_DS_STAGES,
        MASK=spec.mask.code, ACT=spec.activation[0], FAST_TANH=q.device.type == "cuda", num_warps=4, num_stages=1,
    )  # fmt: skip
    finish_dq[(-(-dq.numel() // _FINISH_BLOCK),)](
        dq_sum, dq, dq.numel(), spec.scale * spec.out_scale, BLOCK=_FINISH_BLOCK, num_warps=8
    )
