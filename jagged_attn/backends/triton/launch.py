"""The operations of the portable backend: what is computed once for a kind of call, and the launches."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.choose import pad_head_dim
from ...schedule.config import TileConfig
from ...spec import AttentionSpec
from .._jit.interpreter import repair_dot
from ..base import Arch, Geometry, new_gradients, new_outputs
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
# Tiles have at most 256 rows: offsets within one fit into 31 bits below this row stride.
_WIDE_STRIDE = 2**23
_REDUCE = {"PARTS": 32, "BLOCK": 64, "num_warps": 4}

if capability.is_interpreted():
    repair_dot()


@dataclass(frozen=True)
class _Plan:
    """What the static facts of a call decide: the constants of each kernel as its launch takes them."""

    forward: dict[str, Any]
    backward_q: dict[str, Any]
    backward_kv: dict[str, Any]
    broadcast_q_forward: tuple[dict[str, Any], ...]
    broadcast_q_partial: dict[str, Any]
    broadcast_q_fused: tuple[dict[str, Any], ...]


@lru_cache(maxsize=1024)
def _plan(spec: AttentionSpec, device: torch.device, allow_tf32: bool, wide: bool) -> _Plan:
    if device.type == "cuda":
        arch = Arch("cuda", torch.cuda.get_device_capability(device), torch.version.hip is not None)
    else:
        arch = Arch(device.type)
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
    }

    def constants(tile: TileConfig, **more: Any) -> dict[str, Any]:
        sizes = {
            "BLOCK_Q": tile.block_q,
            "BLOCK_KV": tile.block_kv,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        return {**common, **sizes, **more}

    configs = capability.configs(spec, arch)
    return _Plan(
        forward=constants(configs.forward),
        backward_q=constants(configs.backward_q),
        backward_kv=constants(configs.backward_kv, BROADCAST_Q=spec.kind == "broadcast_q"),
        broadcast_q_forward=tuple(constants(c) for c in configs.broadcast_q_forward),
        broadcast_q_partial=constants(configs.broadcast_q_partial, KEYS=False),
        # Heads that share a key head would have to add up their dK and dV: they take two kernels.
        broadcast_q_fused=tuple(constants(c, KEYS=True) for c in configs.broadcast_q_fused if spec.group_size == 1),
    )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` current: Triton launches on the current device and its current stream."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _holding(num_queries: int, candidates: tuple[dict[str, Any], ...]) -> dict[str, Any] | None:
    """The first of these constants whose tile holds all shared queries."""
    return next((c for c in candidates if c["BLOCK_Q"] >= num_queries), None)


def _strides(*tensors: Tensor) -> list[int]:
    """Row and head strides of each, the two dimensions before the last."""
    return [stride for x in tensors for stride in x.stride()[-3:-1]]


def _contiguous_rows(x: Tensor) -> Tensor:
    """``x`` itself unless its last dimension is strided, as the gradient of ``out.sum()`` is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See ``Launch.forward``."""
    strides = _strides(q, k, v)
    plan = _plan(spec, q.device, torch.backends.cuda.matmul.allow_tf32, max(strides) >= _WIDE_STRIDE)
    out, lse = new_outputs(q, v, geometry, spec.has_softmax)
    table, offsets_kv = geometry.tables[0], geometry.offsets_kv.contiguous()
    programs = table.shape[0] * spec.num_heads
    with _on(q.device):
        if geometry.offsets_q is not None:
            forward_kernel[(programs,)](
                q, k, v, out, lse, table, geometry.offsets_q.contiguous(), offsets_kv,
                geometry.num_sequences, q.shape[0], k.shape[0], *strides, spec.scale, spec.out_scale,
                **plan.forward,
            )  # fmt: skip
        elif out.numel():
            constants = _holding(q.shape[0], plan.broadcast_q_forward) or plan.broadcast_q_forward[-1]
            query_tiles = -(-q.shape[0] // constants["BLOCK_Q"])
            broadcast_q_forward_kernel[(programs * query_tiles,)](
                q, k, v, out, lse, table, offsets_kv,
                geometry.num_sequences, q.shape[0], k.shape[0], *strides, spec.scale, spec.out_scale,
                **constants,
            )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``."""
    grads = new_gradients(q, k, v)
    dout = _contiguous_rows(dout)
    strides = _strides(dout, q, k, v, grads[0], grads[1], grads[2])
    plan = _plan(spec, q.device, torch.backends.cuda.matmul.allow_tf32, max(strides) >= _WIDE_STRIDE)
    delta = torch.empty_like(lse)
    with _on(q.device):
        if geometry.offsets_q is None:
            _backward_broadcast_q(dout, q, k, v, out, lse, delta, grads, geometry, spec, plan)
        else:
            _backward_queries(dout, q, k, v, out, lse, delta, grads, geometry, spec, plan)
            _backward_keys(dout, q, k, v, lse, delta, grads, geometry, spec, plan)
    return grads


def _backward_queries(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor], geometry: Geometry, spec: AttentionSpec, plan: _Plan,
) -> None:  # fmt: skip
    table, offsets_q = geometry.tables[1], geometry.offsets_q
    assert offsets_q is not None  # for the type checker: the caller has looked
    backward_q_kernel[(table.shape[0] * spec.num_heads,)](
        dout, q, k, v, out, lse, delta, grads[0], table, offsets_q.contiguous(), geometry.offsets_kv.contiguous(),
        geometry.num_sequences, q.shape[0], k.shape[0], *_strides(dout, q, k, v), spec.scale, spec.out_scale,
        **plan.backward_q,
    )  # fmt: skip


def _backward_keys(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor], geometry: Geometry, spec: AttentionSpec, plan: _Plan,
) -> None:  # fmt: skip
    table = geometry.tables[2]
    is_broadcast = geometry.offsets_q is None
    offsets_q = geometry.offsets_kv if geometry.offsets_q is None else geometry.offsets_q
    backward_kv_kernel[(table.shape[0] * spec.num_kv_heads,)](
        dout, q, k, v, lse, delta, grads[1], grads[2], table, offsets_q.contiguous(), geometry.offsets_kv.contiguous(),
        geometry.num_sequences, q.shape[0], k.shape[0], dout.stride(0) if is_broadcast else 0,
        *_strides(dout, q, k, v), spec.scale, spec.out_scale,
        **plan.backward_kv,
    )  # fmt: skip


def _backward_broadcast_q(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor], geometry: Geometry, spec: AttentionSpec, plan: _Plan,
) -> None:  # fmt: skip
    num_queries, table = q.shape[0], geometry.tables[1]
    fused = _holding(num_queries, plan.broadcast_q_fused)
    constants = fused or plan.broadcast_q_partial
    programs = spec.num_heads * max(-(-num_queries // constants["BLOCK_Q"]), 1)
    num_parts = max(num_processors(q.device) * _PARTS_PER_PROCESSOR // programs, 1)
    parts = q.new_empty((num_parts, *q.shape), dtype=torch.float32)
    broadcast_q_backward_kernel[(programs * num_parts,)](
        dout, q, k, v, out, lse, delta, parts, grads[1], grads[2], table, geometry.offsets_kv.contiguous(),
        geometry.num_sequences, num_queries, k.shape[0], table.shape[0], num_parts,
        dout.stride(0), *_strides(dout, q, k, v), spec.scale, spec.out_scale,
        **constants,
    )  # fmt: skip
    if fused is None:
        _backward_keys(dout, q, k, v, lse, delta, grads, geometry, spec, plan)
    if q.numel():
        reduce_parts[(-(-q.numel() // _REDUCE["BLOCK"]),)](parts, grads[0], num_parts, q.numel(), **_REDUCE)
