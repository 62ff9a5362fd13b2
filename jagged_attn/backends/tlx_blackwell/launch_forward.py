"""The launch of the forward kernel."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.blackwell import ROWS, ForwardConfig, forward_config
from ...spec import AttentionSpec
from .._jit.constants import Constants
from .._jit.descriptors import for_tma, ragged_map
from .._jit.prepared import PreparedKernel
from .._jit.rings import CTA_SLOTS
from ..base import Geometry, new_outputs
from .forward import forward as forward_kernel


def constants(spec: AttentionSpec, config: ForwardConfig) -> Constants:
    """What the kernel is compiled for."""
    return Constants(
        **vars(config),
        ctas=config.ctas,
        q_tiles=config.q_tiles,
        block_q=config.block_q,
        heads=spec.num_heads,
        group=spec.group_size,
        dim=spec.head_dim,
        mask=spec.mask.code,
        activation=spec.activation[0],
        softmax=spec.has_softmax,
        broadcast_q=spec.kind == "broadcast_q",
    )


def options(config: ForwardConfig) -> dict[str, Any]:
    """The compiler's options."""
    cluster = {"ctas_per_cga": (2, 1, 1)} if config.two_ctas else {}
    return {"num_warps": 4, "num_stages": 1, **cluster}


@lru_cache(maxsize=1024)
def _prepared(spec: AttentionSpec, config: ForwardConfig) -> PreparedKernel:
    return PreparedKernel(forward_kernel, {"C": constants(spec, config)}, options(config))


def _grid(items: int, columns: int, clusters: int) -> tuple[int, int]:
    """Clusters of the launch; the columns of items that have clusters of their own, or 1."""
    own = columns if columns <= clusters else 1
    return min(items, clusters) // own * own, own


def forward(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``Launch.forward``."""
    out, lse = new_outputs(q, v, geometry, spec.has_softmax)
    if not out.numel():
        return out, lse
    if not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    shared = geometry.offsets_q is None
    num_queries, heads, dim = q.shape
    config = forward_config(dim, num_queries if shared else None, spec.mask)
    query_tiles = -(-num_queries // config.block_q) if shared else 1
    table, device = geometry.tables[0], q.device
    clusters, columns = _grid(
        table.shape[0] * heads * query_tiles,
        heads * query_tiles if shared else 1,
        max(num_processors(device) // config.ctas, 1),
    )
    ctas = clusters * config.ctas
    offsets_kv = geometry.offsets_kv.contiguous()
    offsets_q = offsets_kv if geometry.offsets_q is None else geometry.offsets_q.contiguous()
    counters = torch.zeros(columns, dtype=torch.int32, device=device)
    slots = torch.empty(CTA_SLOTS * ctas, dtype=torch.int32, device=device)
    # A pair of CTAs shares keys by rows and values by columns.
    _prepared(spec, config).launch(
        ctas,
        (out, lse, table, offsets_q, offsets_kv, counters, slots),
        (table.shape[0], geometry.num_sequences, num_queries, k.shape[0]),
        (query_tiles, columns, spec.scale, spec.out_scale),
        (
            ragged_map(for_tma(q), ROWS, dim),
            ragged_map(for_tma(k), config.block_kv // config.ctas, dim),
            ragged_map(for_tma(v), config.block_kv, dim // config.ctas),
            ragged_map(out.view(-1, heads, dim) if shared else out, ROWS, dim),
        ),
    )
    return out, lse
