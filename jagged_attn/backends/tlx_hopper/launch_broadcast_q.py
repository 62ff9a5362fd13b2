"""The broadcast-Q backward on Hopper, from tensors to launches."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...schedule.arch import num_processors
from ...spec import AttentionSpec
from ..base import Geometry, new_gradients
from .backward_broadcast_q import backward_64, backward_128, prepare, reduce_parts
from .descriptors import for_tma, ragged_descriptor

# More shared queries than this are for the general kernels.
MAX_QUERIES = 128
MASKS = ("full",)
# Rows of the key tile table's tiles.
TILE_KEYS = 64
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
        table: tile table of the keys, ``TILE_KEYS`` rows a tile.
    """
    dq, dk, dv = new_gradients(q, k, v)
    # Without a query or without a key all of them are 0; without a sequence there is no dO to point a map at.
    if not (geometry.num_sequences and q.numel() and k.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout = for_tma(dout.reshape(-1, *q.shape[1:]))
    with _on(q.device):
        _launch(dout, for_tma(q), for_tma(k), for_tma(v), out, lse, geometry, spec, table, (dq, dk, dv))
    return dq, dk, dv


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` current: Triton launches on the current device and its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    sequences, max_tiles, act = geometry.num_sequences, table.shape[0], spec.activation[0]
    rows = 32 if num_queries <= 32 else 64 if num_queries <= 64 else 128
    parts, chunk_tiles = _split(max_tiles, heads, q.device)
    programs = parts * heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    # Counters of the heads, the number of entries, and two slots for each CTA.
    control = empty(heads + 1 + 2 * programs, dtype=torch.int32)
    is_softmax = act == "softmax"
    stats = empty((sequences + 1) * heads * 2 * rows) if is_softmax else empty(1)
    block = min(rows, 64)
    prepare[((sequences + 1) * heads * (rows // block) if is_softmax else 1,)](
        dout, out, lse, stats, table, control, sequences, num_queries, max_tiles, dout.stride(0), spec.scale,
        H=heads, D=dim, ROWS=rows, BLOCK=block, ACT=act, num_warps=4,
    )  # fmt: skip

    transposed = rows == 32
    # Each of the two groups has a part of its own, or half of the queries' rows of one.
    num_parts = 2 * parts if rows <= 64 else parts
    workspace = empty(num_parts * heads * (dim if transposed else rows), rows if transposed else dim)
    maps = (
        TensorDescriptor(q, [num_queries, heads * dim], [q.stride(0), 1], [block, dim]),
        ragged_descriptor(k, TILE_KEYS, dim),
        ragged_descriptor(v, TILE_KEYS, dim),
        ragged_descriptor(dout, block, dim),
        ragged_descriptor(dk, TILE_KEYS, dim),
        ragged_descriptor(dv, TILE_KEYS, dim),
        TensorDescriptor.from_tensor(workspace, [dim, rows] if transposed else [block, dim]),
    )
    sizes = (sequences, num_queries, k.shape[0], chunk_tiles)
    # dS carries the scale, which dK and dQ then have no need of.
    factors = (spec.scale * (_LOG2E if is_softmax else 1.0), spec.scale * spec.out_scale, spec.out_scale)
    constants = {
        "H": heads,
        "D": dim,
        "DYNAMIC": not spec.deterministic,
        "SCALES_OUT": spec.out_scale != 1.0,
        "ACT": act,
        "FAST_TANH": q.device.type == "cuda",
        **_ring_sizes(rows, dim),
    }
    kernel: Any = backward_64 if rows <= 64 else backward_128
    kernel[(programs,)](
        *maps, stats, table, geometry.offsets_kv.contiguous(), control, *sizes, *factors,
        **constants, num_warps=4, num_stages=1,
    )  # fmt: skip
    reduce_parts[(heads * (rows * dim // _REDUCE_BLOCK),)](
        workspace, dq, num_parts, num_queries,
        H=heads, D=dim, ROWS=rows, TRANSPOSED=transposed, PARTS=32, BLOCK=_REDUCE_BLOCK, num_warps=4,
    )  # fmt: skip


def _split(max_tiles: int, heads: int, device: torch.device) -> tuple[int, int]:
    """CTAs of each head, and entries of a chunk: fewer where the whole table has few."""
    parts = max(num_processors(device) // heads, 1)
    chunk_tiles = min(_CHUNK_TILES, max(max_tiles // (4 * parts), 1))
    return min(parts, -(-max_tiles // chunk_tiles)), chunk_tiles


def _ring_sizes(rows: int, dim: int) -> dict[str, Any]:
    """What fits into shared memory, as measured best on an H200: ``rows`` queries of head dim ``dim``."""
    if rows == 128:
        return {"STAGES": 2 if dim == 128 else 6}
    if dim == 128:
        return {"ROWS": rows, "STAGES": 6 if rows == 32 else 4, "DO_STAGES": 2 if rows == 32 else 3, "DV_FIRST": False}
    return {"ROWS": rows, "STAGES": 8, "DO_STAGES": 4, "DV_FIRST": True}
