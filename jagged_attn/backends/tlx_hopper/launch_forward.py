"""The launch of the forward kernel."""

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.hopper import ROWS, forward_config
from ...spec import AttentionSpec
from ..base import Geometry, new_outputs
from .descriptors import for_tma, ragged_descriptor
from .forward import forward as forward_kernel


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See ``Launch.forward``."""
    out, lse = new_outputs(q, v, geometry, spec.has_softmax)
    if not out.numel():
        return out, lse
    if not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    broadcast_q = geometry.offsets_q is None
    num_queries, head_dim = q.shape[0], spec.head_dim
    config = forward_config(head_dim, num_queries if broadcast_q else None, spec.mask)
    query_tiles = -(-num_queries // config.block_q) if broadcast_q else 1
    table = geometry.tables[0]
    ctas = min(table.shape[0] * spec.num_heads * query_tiles, num_processors(q.device) * config.ctas_per_processor)
    q, k, v = for_tma(q), for_tma(k), for_tma(v)
    offsets_kv = geometry.offsets_kv.contiguous()
    offsets_q = offsets_kv if geometry.offsets_q is None else geometry.offsets_q.contiguous()
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    slots = torch.empty(16 * ctas, dtype=torch.int32, device=q.device)
    options = {"num_warps": 4, "num_stages": 1}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    forward_kernel[(ctas,)](
        ragged_descriptor(q, ROWS, head_dim),
        ragged_descriptor(k, config.block_kv, head_dim),
        ragged_descriptor(v, config.block_kv, head_dim),
        ragged_descriptor(out.view(-1, spec.num_heads, head_dim), ROWS, head_dim),
        out, lse, table, offsets_q, offsets_kv, counter, slots,
        table.shape[0], geometry.num_sequences, num_queries, k.shape[0], query_tiles, spec.scale, spec.out_scale,
        H=spec.num_heads, GROUP=spec.group_size, D=head_dim, BN=config.block_kv, GROUPS=config.groups,
        K_STAGES=config.k_stages, V_STAGES=config.v_stages, REGISTERS=config.registers, TURNS=config.turns,
        MASK=spec.mask.code, ACT=spec.activation[0], BROADCAST_Q=broadcast_q, **options,
    )  # fmt: skip
    return out, lse
