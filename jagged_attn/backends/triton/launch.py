"""The operations of the portable backend: what is computed once for a kind of call, and the launches."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.choose import is_wide, pad_head_dim
from ...schedule.config import TileConfig
from ...spec import AttentionSpec
from .._jit.prepared import PreparedKernel
from ..base import Geometry, arch_of, new_gradients, new_outputs
from . import capability
from .backward import backward_kv as backward_kv_kernel
from .backward import backward_q as backward_q_kernel
from .backward_broadcast_q import broadcast_q_backward as broadcast_q_backward_kernel
from .backward_broadcast_q import reduce_parts
from .forward import broadcast_q_forward as broadcast_q_forward_kernel
from .forward import forward as forward_kernel

# Programs for each multiprocessor: enough that the slowest does not keep the others waiting, few enough that the
# workspace stays small.
_PARTS_PER_PROCESSOR = 4
_REDUCE_BLOCK = 64
# Tiles of shared queries for which K and V are streamed anew, with dK and dV made on the way: measured with two.
_MAX_ROUNDS = 2
# Tiles have at most 256 rows: offsets within one fit into 31 bits below this row stride.
_WIDE_STRIDE = 2**23

_reduce = PreparedKernel(reduce_parts, {"PARTS": 32, "BLOCK": _REDUCE_BLOCK}, {"num_warps": 4})


@dataclass(frozen=True)
class _Plan:
    """What the static facts of a call decide: its kernels, each with its constants."""

    forward: PreparedKernel
    backward_q: PreparedKernel
    backward_kv: PreparedKernel
    broadcast_q_forward: PreparedKernel
    broadcast_q_forward_wide: PreparedKernel
    broadcast_q_partial: PreparedKernel
    broadcast_q_fused: tuple[PreparedKernel, ...]
    broadcast_q_added: tuple[PreparedKernel, ...]


@lru_cache(maxsize=1024)
def _plan(spec: AttentionSpec, device: torch.device, allow_tf32: bool, wide: bool) -> _Plan:
    arch = arch_of(device)
    common = {
        "H": spec.num_heads,
        "GROUP": spec.group_size,
        "D": spec.head_dim,
        "DV": spec.value_head_dim,
        "BLOCK_D": pad_head_dim(spec.head_dim),
        "BLOCK_DV": pad_head_dim(spec.value_head_dim),
        "MASK": spec.mask.code,
        "ACTS": ",".join(spec.activation),
        "FAST_TANH": arch.device_type == "cuda" and not arch.is_hip and not capability.is_interpreted(),
        "PRECISION": "tf32" if allow_tf32 else "ieee",
        "WIDE": wide,
        "BROADCAST_Q": spec.kind == "broadcast_q",
    }

    def prepare(kernel: Any, tile: TileConfig, **more: str) -> PreparedKernel:
        constants = {**common, "BLOCK_Q": tile.block_q, "BLOCK_KV": tile.block_kv, **more}
        return PreparedKernel(kernel, constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages})

    configs = capability.configs(spec, arch)
    # Heads that share a key head would have to add up their dK and dV: they take two kernels.
    fused = configs.broadcast_q_fused if spec.group_size == 1 else ()
    return _Plan(
        forward=prepare(forward_kernel, configs.forward),
        backward_q=prepare(backward_q_kernel, configs.backward_q),
        backward_kv=prepare(backward_kv_kernel, configs.backward_kv),
        broadcast_q_forward=prepare(broadcast_q_forward_kernel, configs.forward),
        broadcast_q_forward_wide=prepare(broadcast_q_forward_kernel, configs.broadcast_q_forward_wide),
        broadcast_q_partial=prepare(broadcast_q_backward_kernel, configs.broadcast_q_partial, KEYS=""),
        broadcast_q_fused=tuple(prepare(broadcast_q_backward_kernel, c, KEYS="store") for c in fused),
        broadcast_q_added=tuple(prepare(broadcast_q_backward_kernel, c, KEYS="add") for c in fused),
    )


def _plan_of(spec: AttentionSpec, device: torch.device, strides: tuple[int, ...]) -> _Plan:
    allow_tf32 = spec.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return _plan(spec, device, allow_tf32, max(strides) >= _WIDE_STRIDE)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Row and head strides of each, the two dimensions before the last."""
    strides: tuple[int, ...] = ()
    for x in tensors:
        strides += x.stride()[-3:-1]
    return strides


def _contiguous_rows(x: Tensor) -> Tensor:
    """``x`` itself unless its last dimension is strided, as the gradient of ``out.sum()`` is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See ``Launch.forward``."""
    strides = _strides(q, k, v)
    plan = _plan_of(spec, q.device, strides)
    out, lse = new_outputs(q, v, geometry, spec.has_softmax)
    table, offsets_kv = geometry.tables[0], geometry.offsets_kv.contiguous()
    num_sequences, num_queries, num_keys = sizes = geometry.num_sequences, q.shape[0], k.shape[0]
    others = (*strides, spec.scale, spec.out_scale)
    programs = table.shape[0] * spec.num_heads
    if geometry.offsets_q is not None:
        tensors = (q, k, v, out, lse, table, geometry.offsets_q.contiguous(), offsets_kv)
        plan.forward.launch(programs, tensors, sizes, others)
    elif num_sequences and num_queries:
        wide = is_wide(num_queries, num_sequences, num_keys)
        kernel = plan.broadcast_q_forward_wide if wide else plan.broadcast_q_forward
        query_tiles = -(-num_queries // kernel.constants["BLOCK_Q"])
        kernel.launch(programs * query_tiles, (q, k, v, out, lse, table, offsets_kv), sizes, others)
    return out, lse


@dataclass(frozen=True)
class _Backward:
    """The tensors of one backward call, ``dout`` with contiguous rows and the offsets contiguous."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    offsets_q: Tensor | None
    offsets_kv: Tensor
    tables: tuple[Tensor, ...]
    num_sequences: int
    strides: tuple[int, ...]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``."""
    grads = new_gradients(q, k, v)
    dout = _contiguous_rows(dout)
    offsets_q = geometry.offsets_q if geometry.offsets_q is None else geometry.offsets_q.contiguous()
    call = _Backward(
        dout, q, k, v, out, lse, torch.empty_like(lse), *grads,
        offsets_q, geometry.offsets_kv.contiguous(), geometry.tables, geometry.num_sequences, _strides(dout, q, k, v),
    )  # fmt: skip
    plan = _plan_of(spec, q.device, call.strides + _strides(*grads))
    if offsets_q is None:
        _backward_broadcast_q(call, spec, plan)
    else:
        _backward_queries(call, offsets_q, spec, plan)
        _backward_keys(call, offsets_q, 0, spec, plan)
    return grads


def _backward_queries(call: _Backward, offsets_q: Tensor, spec: AttentionSpec, plan: _Plan) -> None:
    table = call.tables[1]
    plan.backward_q.launch(
        table.shape[0] * spec.num_heads,
        (call.dout, call.q, call.k, call.v, call.out, call.lse, call.delta, call.dq, table, offsets_q, call.offsets_kv),
        (call.num_sequences, call.q.shape[0], call.k.shape[0]),
        (*call.strides, spec.scale, spec.out_scale),
    )


def _backward_keys(call: _Backward, offsets_q: Tensor, dout_batch: int, spec: AttentionSpec, plan: _Plan) -> None:
    table = call.tables[2]
    plan.backward_kv.launch(
        table.shape[0] * spec.num_kv_heads,
        (call.dout, call.q, call.k, call.v, call.lse, call.delta, call.dk, call.dv, table, offsets_q, call.offsets_kv),
        (call.num_sequences, call.q.shape[0], call.k.shape[0]),
        (dout_batch, *call.strides, spec.scale, spec.out_scale),
    )


def _backward_broadcast_q(call: _Backward, spec: AttentionSpec, plan: _Plan) -> None:
    q, num_queries = call.q, call.q.shape[0]
    rounds = _rounds(plan, num_queries)
    block = (rounds[0] if rounds else plan.broadcast_q_partial).constants["BLOCK_Q"]
    programs = spec.num_heads * (1 if rounds else max(-(-num_queries // block), 1))
    num_parts = max(num_processors(q.device) * _PARTS_PER_PROCESSOR // programs, 1)
    parts = q.new_empty((num_parts, *q.shape), dtype=torch.float32)
    tensors = (call.dout, q, call.k, call.v, call.out, call.lse, call.delta, parts, call.dk, call.dv)
    for query_tile, kernel in enumerate(rounds or [plan.broadcast_q_partial]):
        table = call.tables[1]
        kernel.launch(
            programs * num_parts,
            (*tensors, table, call.offsets_kv),
            (call.num_sequences, num_queries, call.k.shape[0], table.shape[0], num_parts, query_tile),
            (call.dout.stride(0), *call.strides, spec.scale, spec.out_scale),
        )
    if not rounds:
        # The kernel does not read offsets of the shared queries; any pointer will do.
        _backward_keys(call, call.offsets_kv, call.dout.stride(0), spec, plan)
    if q.numel():
        _reduce.launch(-(-q.numel() // _REDUCE_BLOCK), (parts, call.dq), (num_parts, q.numel()), ())


def _rounds(plan: _Plan, num_queries: int) -> list[PreparedKernel]:
    """The kernels of the fused backward, one for each tile of queries, if there are few enough of them."""
    for store, add in zip(plan.broadcast_q_fused, plan.broadcast_q_added, strict=True):
        rounds = max(-(-num_queries // store.constants["BLOCK_Q"]), 1)
        if rounds == 1 or (store is plan.broadcast_q_fused[-1] and rounds <= _MAX_ROUNDS):
            return [store] + [add] * (rounds - 1)
    return []
