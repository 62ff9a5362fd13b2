"""The host's side of the Hopper backward of self and cross attention, and of more shared queries than fit a tile."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...schedule.arch import num_processors
from ...schedule.hopper_backward import adds_up_dq
from ...spec import AttentionSpec
from .._jit.backward_rows import finish_dq, prepare_backward
from .._jit.constants import Constants
from .._jit.descriptors import for_tma, ragged_map
from .._jit.prepared import PreparedKernel
from ..base import Geometry, new_gradients
from .backward import backward_kv
from .backward_queries import backward_q
from .capability import BLOCK_KV, BLOCK_Q

# Tiles of Q and dO in flight, by head dim: as many as fit. Without dS and dQ in shared memory one more does.
_STAGES = {64: 4, 128: 2}
_STAGES_WITHOUT_DQ = {64: 4, 128: 3}
# Tiles of K and V, in the kernel of dQ.
_BLOCK_KEYS, _KEY_STAGES = 64, 3
_DS_STAGES = 2
# Who adds dQ up, by head dim. At 128 a role of its own leaves the groups too few registers.
_MAKER_OF_DQ = {64: "role", 128: "groups"}
# Columns of dQ that are added at a time: all that the role makes, half of what the groups do.
_DQ_COLUMNS = 64
# Sums of the gradient of shared queries: enough that few CTAs add to one at a time, few enough for the L2 cache.
_REPLICAS = 16
# Rows of no sequence count as one more sequence; one block more lets the last sequence's empty tile be padding.
_EXTRA_BLOCKS = 2
_FINISH_BLOCK = 2048
# Counters of work are 16 bytes apart, as aligned as the tensors that Triton compiles for.
_COUNTERS, _APART = 2, 4


@dataclass(frozen=True)
class _Kernels:
    """The kernels of one kind of call, each with its constants."""

    prepare: PreparedKernel
    keys: PreparedKernel
    queries: PreparedKernel
    finish: PreparedKernel


@lru_cache(maxsize=1024)
def _kernels(spec: AttentionSpec, sums: bool, on_gpu: bool) -> _Kernels:
    shared, dim = spec.kind == "broadcast_q", spec.head_dim
    dq = _MAKER_OF_DQ[dim] if sums else "none"
    # An element-wise activation parks factors in the tiles of dS.
    stages = (_STAGES if sums or not spec.has_softmax else _STAGES_WITHOUT_DQ)[dim]
    around = {
        "H": spec.num_heads, "D": dim, "BM": BLOCK_Q, "COUNTERS": _COUNTERS * _APART,
        "WIDTH": spec.num_heads * dim, "BLOCK": _FINISH_BLOCK,
    }  # fmt: skip
    common = {
        "heads": spec.num_heads, "group": spec.group_size, "dim": dim, "mask": spec.mask.code,
        "act": spec.activation[0], "fast_tanh": on_gpu,
    }  # fmt: skip
    keys = Constants(
        **common, rows=BLOCK_Q, keys=BLOCK_KV, stages=stages, ds_stages=_DS_STAGES, dq=dq,
        replicas=_REPLICAS if shared else 0,
    )  # fmt: skip
    queries = Constants(**common, rows=2 * BLOCK_Q, keys=_BLOCK_KEYS, stages=_KEY_STAGES)
    four = {"num_warps": 4}
    tlx = {**four, "num_stages": 1}
    return _Kernels(
        prepare=PreparedKernel(prepare_backward, around, four),
        keys=PreparedKernel(backward_kv, {"C": keys}, tlx),
        queries=PreparedKernel(backward_q, {"C": queries}, tlx),
        finish=PreparedKernel(finish_dq, around, {"num_warps": 8}),
    )


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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, rows of dO, rows of the keys."""
        return self.num_sequences, self.dout.shape[0], self.k.shape[0]


def _launch(call: _Call, out: Tensor, lse: Tensor) -> None:
    spec, q, (total_q, heads, dim) = call.spec, call.q, call.dout.shape
    repeatable = spec.deterministic or not adds_up_dq(dim, spec.mask, call.k.shape[0], call.num_sequences)
    sums = call.shared or not repeatable
    kernels = _kernels(spec, sums, q.is_cuda)
    blocks = total_q // BLOCK_Q + call.num_sequences + _EXTRA_BLOCKS
    stats = q.new_empty(blocks * heads * 2 * BLOCK_Q if spec.has_softmax else 0, dtype=torch.float32)
    rows = _REPLICAS * q.shape[0] if call.shared else q.shape[0] if sums else 1
    dq_sum = (q.new_zeros if sums else q.new_empty)((rows, heads, dim), dtype=torch.float32)
    counters = (q.new_empty if spec.has_softmax else q.new_zeros)((_COUNTERS, _APART), dtype=torch.int32)
    if spec.has_softmax:
        # Without an out_scale everything is 0 in the end; the sums need only be finite.
        inverse_out_scale = 1.0 / spec.out_scale if spec.out_scale else 0.0
        kernels.prepare.launch(
            blocks * heads,
            (call.dout, out, lse, stats, counters, call.offsets_q),
            call.sizes[:2],
            (call.dout.stride(0), inverse_out_scale),
        )
    _launch_keys(call, kernels.keys, call.tables[0], stats, dq_sum, counters[0])
    factor = spec.scale * spec.out_scale
    if call.shared:
        call.dq.copy_(dq_sum.view(_REPLICAS, *q.shape).sum(0).mul_(factor))
    elif sums:
        kernels.finish.launch(-(-q.numel() // _FINISH_BLOCK), (dq_sum, call.dq), (total_q,), (factor,))
    else:
        _launch_queries(call, kernels.queries, stats, counters[1])


def _launch_keys(
    call: _Call, kernel: PreparedKernel, table: Tensor, stats: Tensor, dq_sum: Tensor, counter: Tensor
) -> None:
    dim = call.spec.head_dim
    maps = (
        ragged_map(call.q, BLOCK_Q, dim),
        ragged_map(call.k, BLOCK_KV, dim),
        ragged_map(call.v, BLOCK_KV, dim),
        ragged_map(call.dout, BLOCK_Q, dim),
        ragged_map(dq_sum, BLOCK_Q, _DQ_COLUMNS),
        ragged_map(call.dk, BLOCK_KV // 2, dim),
        ragged_map(call.dv, BLOCK_KV // 2, dim),
    )
    _launch_items(call, kernel, table, table.shape[0] * call.spec.num_kv_heads, stats, counter, maps)


def _launch_queries(call: _Call, kernel: PreparedKernel, stats: Tensor, counter: Tensor) -> None:
    dim, table = call.spec.head_dim, call.tables[1]
    maps = (
        ragged_map(call.q, BLOCK_Q, dim),
        ragged_map(call.k, _BLOCK_KEYS, dim),
        ragged_map(call.v, _BLOCK_KEYS, dim),
        ragged_map(call.dout, BLOCK_Q, dim),
        ragged_map(call.dq, BLOCK_Q, dim),
    )
    _launch_items(call, kernel, table, table.shape[0] * call.spec.num_heads, stats, counter, maps)


def _launch_items(
    call: _Call, kernel: PreparedKernel, table: Tensor, items: int, stats: Tensor, counter: Tensor,
    maps: tuple[TensorDescriptor, ...],
) -> None:  # fmt: skip
    """Launch a kernel whose CTAs take items from ``counter``."""
    programs = min(num_processors(call.q.device), items)
    kernel.launch(
        programs,
        (stats, table, counter, call.offsets_q, call.offsets_kv),
        (*call.sizes, items),
        (call.spec.scale, call.spec.out_scale),
        maps,
    )
