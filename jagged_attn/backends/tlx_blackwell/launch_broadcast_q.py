"""The broadcast-Q backward on Blackwell, from tensors to launches."""

from functools import lru_cache

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.blackwell import ROWS
from ...schedule.blackwell_backward import BackwardConfig, backward_config
from ...spec import AttentionSpec
from .._jit.backward_shared import by_parts, prepare_shared, reduce_parts, split_chunks
from .._jit.descriptors import for_tma, matrix_map, ragged_map
from .._jit.prepared import PreparedKernel
from .._jit.rings import CTA_SLOTS
from ..base import Geometry, new_gradients
from . import launch_backward as general
from .backward import backward_kv

# Entries of a chunk: dO is loaded anew for each, and the last chunks of all end at different times.
_CHUNK_TILES = 4
# What the sum of the parts of dQ takes at a time: elements of dQ, and parts.
_REDUCE_BLOCK, _PARTS = 64, 32


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry,
    spec: AttentionSpec, tables: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``Launch.backward``. One activation for all heads, as many key heads, no mask.

    More queries than fit a tile pass by keys that stay, as in self attention; if dQ has to repeat
    bit for bit, they stay a tile at a time, at the price of K and V read each time.

    Args:
        dout: ``[B, S, H, D]``, any strides.
        q: ``[S, H, D]``.
        k: ``[T_kv, H, D]``.
        v: ``[T_kv, H, D]``.
        out: what the forward returned, contiguous.
        lse: likewise; not read unless the activation is a softmax.
        geometry: of the keys.
        spec: of the call.
        tables: of tiles of 128 keys, and the last of what ``general.backward`` wants.
    """
    arguments = dout, q, k, v, out, lse, geometry, spec
    if q.shape[0] <= ROWS:
        return _one_tile(*arguments, tables[0])
    if not spec.deterministic:
        return general.backward(*arguments, tables[-1:])
    return by_parts(_one_tile, ROWS, *arguments, tables[0])


@lru_cache(maxsize=1024)
def _kernels(
    spec: AttentionSpec, config: BackwardConfig, rows: int, on_gpu: bool
) -> list[PreparedKernel]:  # fmt: skip
    values = {
        "H": spec.num_heads, "D": spec.head_dim, "ROWS": rows, "ACT": spec.activation[0],
        "PARTS": _PARTS, "TRANSPOSED": False,
    }  # fmt: skip
    main = {"C": general.constants(spec, config, on_gpu, rows)}
    return [
        PreparedKernel(prepare_shared, {**values, "BLOCK": 64}, general.FOUR),
        PreparedKernel(backward_kv, main, general.options(config)),
        PreparedKernel(reduce_parts, {**values, "BLOCK": _REDUCE_BLOCK}, general.FOUR),
    ]


def _one_tile(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry,
    spec: AttentionSpec, table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``backward``, of at most ``ROWS`` queries."""
    dq, dk, dv = new_gradients(q, k, v)
    # Without a query or a key all of them are 0; without a sequence there is no dO to map.
    if not (geometry.num_sequences and q.numel() and k.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_()
    (num_queries, heads, dim), sequences, max_tiles = q.shape, geometry.num_sequences, len(table)
    dout, q, k, v = (for_tma(x) for x in (dout.reshape(-1, heads, dim), q, k, v))
    rows = ROWS // 2 if num_queries <= ROWS // 2 else ROWS
    prepare, gradients, reduce = _kernels(spec, backward_config(dim, rows), rows, q.is_cuda)
    parts, chunk_tiles = split_chunks(max_tiles, heads, num_processors(q.device), _CHUNK_TILES)
    programs = parts * heads
    # Counters of the heads, and the number of entries.
    counters = table.new_empty(heads + 1)
    blocks = (sequences + 1) * heads
    stats = q.new_empty(blocks * 2 * rows if spec.has_softmax else 1, dtype=torch.float32)
    prepare.launch(
        blocks * (rows // 64) if spec.has_softmax else 1, (dout, out, lse, stats, table, counters),
        (sequences, num_queries, max_tiles, dout.stride(0)), (general.inverse(spec.out_scale),),
    )  # fmt: skip
    workspace = q.new_empty((programs * rows, dim), dtype=torch.float32)
    offsets, slots = geometry.offsets_kv.contiguous(), table.new_empty(CTA_SLOTS * programs)
    gradients.launch(
        programs, (stats, table, counters, counters, slots, offsets, offsets),
        (sequences, num_queries, k.shape[0], chunk_tiles), (spec.scale, spec.out_scale),
        (
            matrix_map(q, num_queries, heads * dim, rows, dim), ragged_map(k, ROWS, dim),
            ragged_map(v, ROWS, dim), ragged_map(dout, rows, dim),
            matrix_map(workspace, len(workspace), dim, rows, general.DQ_COLUMNS),
            ragged_map(dk, ROWS, dim), ragged_map(dv, ROWS, dim),
        ),
    )  # fmt: skip
    reduce.launch(heads * (rows * dim // _REDUCE_BLOCK), (workspace, dq), (parts, num_queries), ())
    return dq, dk, dv
