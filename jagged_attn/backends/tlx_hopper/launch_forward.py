"""The launch of the forward kernel."""

from functools import lru_cache

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.hopper import ROWS, ForwardConfig, forward_config
from ...spec import AttentionSpec
from .._jit.descriptors import for_tma, ragged_map
from .._jit.prepared import PreparedKernel
from ..base import Geometry, new_outputs
from .forward import forward as forward_kernel

# What the load role hands to the consumers of an item, and how many items ahead.
_SLOT, _SLOTS = 8, 2


@lru_cache(maxsize=1024)
def _prepared(spec: AttentionSpec, config: ForwardConfig) -> PreparedKernel:
    constants = {
        "H": spec.num_heads,
        "GROUP": spec.group_size,
        "D": spec.head_dim,
        "BN": config.block_kv,
        "GROUPS": config.groups,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "REGISTERS": config.registers,
        "TURNS": config.turns,
        "MASK": spec.mask.code,
        "ACT": spec.activation[0],
        "BROADCAST_Q": spec.kind == "broadcast_q",
    }
    limit = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    return PreparedKernel(forward_kernel, constants, {"num_warps": 4, "num_stages": 1, **limit})


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
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
    ctas = min(table.shape[0] * heads * query_tiles, num_processors(device) * config.ctas_per_processor)
    offsets_kv = geometry.offsets_kv.contiguous()
    offsets_q = offsets_kv if geometry.offsets_q is None else geometry.offsets_q.contiguous()
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    slots = torch.empty(_SLOT * _SLOTS * ctas, dtype=torch.int32, device=device)
    _prepared(spec, config).launch(
        ctas,
        (out, lse, table, offsets_q, offsets_kv, counter, slots),
        (table.shape[0], geometry.num_sequences, num_queries, k.shape[0]),
        (query_tiles, spec.scale, spec.out_scale),
        (
            ragged_map(for_tma(q), ROWS, dim),
            ragged_map(for_tma(k), config.block_kv, dim),
            ragged_map(for_tma(v), config.block_kv, dim),
            ragged_map(out.view(-1, heads, dim) if shared else out, ROWS, dim),
        ),
    )
    return out, lse
