"""The launch of the forward kernel."""

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.hopper import ROWS, ForwardConfig, are_short, forward_config, forward_run, has_few_keys
from ...spec import AttentionSpec
from .._jit.constants import Constants
from .._jit.descriptors import for_tma, ragged_map
from .._jit.prepared import PreparedKernel
from ..base import Geometry, new_outputs
from .capability import QUERIES_TABLE
from .forward import forward as forward_kernel


def constants(spec: AttentionSpec, config: ForwardConfig) -> Constants:
    """What the kernel is compiled for."""
    return Constants(
        **vars(config), heads=spec.num_heads, group=spec.group_size, dim=spec.head_dim, mask=spec.mask.code,
        act=spec.activation[0], broadcast_q=spec.kind == "broadcast_q", q_stages=config.q_stages,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _plan(spec: AttentionSpec, num_queries: int | None, short: bool, run: int) -> tuple[ForwardConfig, PreparedKernel]:
    """The config and the kernel of a kind of call; ``num_queries`` is S of broadcast-Q."""
    config = replace(forward_config(spec.head_dim, num_queries, spec.mask, short), run=run)
    return config, _prepared(spec, config)


@lru_cache(maxsize=1024)
def _prepared(spec: AttentionSpec, config: ForwardConfig) -> PreparedKernel:
    limit = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    return PreparedKernel(forward_kernel, {"C": constants(spec, config)}, {"num_warps": 4, "num_stages": 1, **limit})


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See ``Launch.forward``."""
    out, lse = new_outputs(q, v, geometry, spec.has_softmax)
    if not out.numel():
        return out, lse
    if not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    shared = geometry.offsets_q is None
    num_queries, heads, dim = q.shape
    table = geometry.tables[0]
    processors = num_processors(q.device)
    num_sequences, items = geometry.num_sequences, table.shape[0] * heads
    few_keys = has_few_keys(dim, spec.mask, k.shape[0], num_sequences)
    run = forward_run(spec.kind, dim, few_keys, num_queries, num_sequences, items, processors)
    short = are_short(dim, k.shape[0], num_sequences)
    config, kernel = _plan(spec, num_queries if shared else None, short, run)
    if not shared and config.block_q == QUERIES_TABLE.block:
        table = geometry.tables[2]
    query_tiles = -(-num_queries // config.block_q) if shared else 1
    runs = -(-table.shape[0] // run) * heads * query_tiles
    ctas = min(runs, processors * config.ctas_per_processor)
    offsets_kv = geometry.offsets_kv.contiguous()
    offsets_q = offsets_kv if geometry.offsets_q is None else geometry.offsets_q.contiguous()
    # With a CTA for each run the kernel does not read the counter, and zeros are a launch of their own.
    counter = table.new_zeros(1) if ctas < runs else table
    kernel.launch(
        ctas,
        (out, lse, table, offsets_q, offsets_kv, counter),
        (table.shape[0], num_sequences, num_queries, k.shape[0]),
        (query_tiles, spec.scale, spec.out_scale),
        (
            ragged_map(for_tma(q), ROWS, dim),
            ragged_map(for_tma(k), config.block_kv, dim),
            ragged_map(for_tma(v), config.block_kv, dim),
            ragged_map(out, ROWS, dim),
        ),
    )
    return out, lse
