"""The broadcast-Q backward on Hopper, from tensors to launches."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...spec import AttentionSpec
from .._jit.backward_shared import prepare_shared, reduce_parts, split_chunks
from .._jit.constants import Constants
from .._jit.descriptors import for_tma, matrix_map, ragged_map
from .._jit.prepared import PreparedKernel
from ..base import Geometry, new_gradients
from .backward_broadcast_q import backward_64, backward_128
from .capability import BROADCAST_Q_BLOCK_KV

# More shared queries than this are for the general kernels.
MAX_QUERIES = 128
# Entries of a chunk. On an H200, 4 took 4 % longer and 2 took 21 %: dO is loaded anew for each chunk.
_CHUNK_TILES = 8
_LOG2E = 1.4426950408889634
_REDUCE_BLOCK = 64


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
    """See ``Launch.backward``. At most ``MAX_QUERIES`` queries; one activation for all heads, as many key heads.

    Args:
        dout: ``[B, S, H, D]``, any strides.
        q: ``[S, H, D]``.
        k: ``[T_kv, H, D]``.
        v: ``[T_kv, H, D]``.
        out: what the forward returned, contiguous.
        lse: likewise; not read unless the activation is a softmax.
        geometry: of the keys.
        spec: of the call.
        table: tile table of the keys, ``BROADCAST_Q_BLOCK_KV`` rows a tile.
    """
    dq, dk, dv = new_gradients(q, k, v)
    # Without a query or without a key all of them are 0; without a sequence there is no dO to point a map at.
    if not (geometry.num_sequences and q.numel() and k.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout = for_tma(dout.reshape(-1, *q.shape[1:]))
    _launch(dout, for_tma(q), for_tma(k), for_tma(v), out, lse, geometry, spec, table, (dq, dk, dv))
    return dq, dk, dv


@dataclass(frozen=True)
class _Kernels:
    """The kernels of one kind of call, each with its constants."""

    prepare: PreparedKernel
    gradients: PreparedKernel
    reduce: PreparedKernel


@lru_cache(maxsize=1024)
def _kernels(spec: AttentionSpec, rows: int, on_gpu: bool, rings: tuple[tuple[str, Any], ...]) -> _Kernels:
    common = {
        "H": spec.num_heads, "D": spec.head_dim, "ACT": spec.activation[0], "ROWS": rows, "TRANSPOSED": rows == 32,
        "PARTS": 32,
    }  # fmt: skip
    constants = Constants(
        heads=spec.num_heads, dim=spec.head_dim, act=spec.activation[0], rows=rows, dynamic=not spec.deterministic,
        scales_out=spec.out_scale != 1.0, fast_tanh=on_gpu, **dict(rings),
    )  # fmt: skip
    kernel = backward_64 if rows <= 64 else backward_128
    four = {"num_warps": 4}
    return _Kernels(
        prepare=PreparedKernel(prepare_shared, {**common, "BLOCK": min(rows, 64)}, four),
        gradients=PreparedKernel(kernel, {"C": constants}, {**four, "num_stages": 1}),
        reduce=PreparedKernel(reduce_parts, {**common, "BLOCK": _REDUCE_BLOCK}, four),
    )


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
    dq, dk, dv = grads
    num_queries, heads, dim = q.shape
    sequences, max_tiles = geometry.num_sequences, table.shape[0]
    rows = 32 if num_queries <= 32 else 64 if num_queries <= 64 else 128
    kernels = _kernels(spec, rows, q.is_cuda, tuple(_ring_sizes(rows, dim).items()))
    parts, chunk_tiles = split_chunks(max_tiles, heads, num_processors(q.device), _CHUNK_TILES)
    programs, block = parts * heads, min(rows, 64)

    # Counters of the heads, the number of entries, and two slots for each CTA.
    control = table.new_empty(heads + 1 + 2 * programs)
    is_softmax = spec.has_softmax
    stats = q.new_empty((sequences + 1) * heads * 2 * rows if is_softmax else 1, dtype=torch.float32)
    kernels.prepare.launch(
        (sequences + 1) * heads * (rows // block) if is_softmax else 1,
        (dout, out, lse, stats, table, control),
        (sequences, num_queries, max_tiles, dout.stride(0)),
        (spec.scale,),
    )

    # Each of the two groups has a part of its own, or half of the queries' rows of one; of 32 queries, transposed.
    num_parts = 2 * parts if rows <= 64 else parts
    height, width = (dim, rows) if rows == 32 else (rows, dim)
    workspace = q.new_empty((num_parts * heads * height, width), dtype=torch.float32)
    kernels.gradients.launch(
        programs,
        (stats, table, geometry.offsets_kv.contiguous(), control),
        (sequences, num_queries, k.shape[0], chunk_tiles),
        # dS carries the scale, which dK and dQ then have no need of.
        (spec.scale * (_LOG2E if is_softmax else 1.0), spec.scale * spec.out_scale, spec.out_scale),
        (
            matrix_map(q, num_queries, heads * dim, block, dim),
            ragged_map(k, BROADCAST_Q_BLOCK_KV, dim),
            ragged_map(v, BROADCAST_Q_BLOCK_KV, dim),
            ragged_map(dout, block, dim),
            ragged_map(dk, BROADCAST_Q_BLOCK_KV, dim),
            ragged_map(dv, BROADCAST_Q_BLOCK_KV, dim),
            matrix_map(workspace, workspace.shape[0], width, dim if rows == 32 else block, width),
        ),
    )
    kernels.reduce.launch(heads * (rows * dim // _REDUCE_BLOCK), (workspace, dq), (num_parts, num_queries), ())


def _ring_sizes(rows: int, dim: int) -> dict[str, Any]:
    """What fits into shared memory, as measured best on an H200: ``rows`` queries of head dim ``dim``."""
    if rows == 128:
        return {"halves": 2, "stages": 2 if dim == 128 else 6, "do_stages": 2, "dv_first": False}
    if dim == 128:
        return {"halves": 1, "stages": 6 if rows == 32 else 4, "do_stages": 2 if rows == 32 else 3, "dv_first": False}
    return {"halves": 1, "stages": 8, "do_stages": 4, "dv_first": True}
