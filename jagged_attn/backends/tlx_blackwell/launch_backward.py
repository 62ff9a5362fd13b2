"""The Blackwell backward of self and cross attention, and of many shared queries."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...schedule.arch import num_processors
from ...schedule.blackwell import ROWS
from ...schedule.blackwell_backward import BackwardConfig, backward_config
from ...spec import AttentionSpec
from .._jit.backward_rows import finish_dq, prepare_backward
from .._jit.constants import Constants
from .._jit.descriptors import for_tma, ragged_map
from .._jit.prepared import PreparedKernel
from .._jit.rings import CTA_SLOTS
from ..base import Geometry, new_gradients
from .backward import backward_kv
from .backward_pair import backward_pair

# Sums of the gradient of shared queries: few CTAs add to one at a time, and all fit the L2 cache.
_REPLICAS = 16
# Rows of no sequence count as one more sequence; one block more is padding.
_EXTRA_BLOCKS = 2
_FINISH_BLOCK = 2048
# As aligned as the tensors that Triton compiles for.
_COUNTERS = 4
# Columns of a chunk of dQ, which is fp32, and of dK and dV.
DQ_COLUMNS, _OUT_COLUMNS = 32, 64
FOUR = {"num_warps": 4}


def constants(
    spec: AttentionSpec, config: BackwardConfig, on_gpu: bool, rows: int | None = None
) -> Constants:  # fmt: skip
    """What the kernel is compiled for; with ``rows``, of that many queries that stay."""
    shared = rows is not None
    several = spec.kind == "broadcast_q" and not shared
    return Constants(
        **vars(config), ctas=config.ctas, heads=spec.num_heads, group=spec.group_size,
        dim=spec.head_dim, rows=rows or ROWS, keys=ROWS, own_p=config.scores == "first",
        # Statistics go with Q, or with dO where Q stays.
        st_stages=config.do_stages if shared else config.q_stages, mask=spec.mask.code,
        activation=spec.activation[0], softmax=spec.has_softmax, fast_tanh=on_gpu,
        replicas=_REPLICAS if several else 0, shared=shared, dynamic=not spec.deterministic,
    )  # fmt: skip


def options(config: BackwardConfig) -> dict[str, Any]:
    """The compiler's options."""
    cluster = {"ctas_per_cga": (2, 1, 1)} if config.two_ctas else {}
    return {**FOUR, "num_stages": 1, **cluster}


@lru_cache(maxsize=1024)
def _kernels(spec: AttentionSpec, config: BackwardConfig, on_gpu: bool) -> list[PreparedKernel]:
    values = {
        "H": spec.num_heads, "D": spec.head_dim, "BM": ROWS, "COUNTERS": _COUNTERS,
        "WIDTH": spec.num_heads * spec.head_dim, "BLOCK": _FINISH_BLOCK,
    }  # fmt: skip
    main = {"C": constants(spec, config, on_gpu)}
    return [
        PreparedKernel(prepare_backward, values, FOUR),
        PreparedKernel(backward_pair if config.two_ctas else backward_kv, main, options(config)),
        PreparedKernel(finish_dq, values, {"num_warps": 8}),
    ]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry,
    spec: AttentionSpec, tables: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``Launch.backward``; one activation for all heads, D = Dv.

    Args:
        dout: ``[T_q, H, D]``; ``[B, S, H, D]`` for broadcast-Q, which takes no deterministic call.
        q: ``[T_q, H, D]``.
        k: ``[T_kv, H_kv, D]``.
        v: ``[T_kv, H_kv, D]``.
        out: the forward's output, contiguous.
        lse: the forward's, contiguous; not read for an element-wise activation.
        geometry: the offsets; its tables are not read.
        spec: of the call.
        tables: one, of tiles of 128 keys, or of pairs of them if that is the config.
    """
    dq, dk, dv = new_gradients(q, k, v)
    if not q.numel() or not k.numel() or not dout.numel():
        # There is nothing to map for TMA on one side, and nothing that the other side sees.
        return dq.zero_(), dk.zero_(), dv.zero_()
    shared, num_sequences = geometry.offsets_q is None, geometry.num_sequences
    offsets_q = geometry.offsets_q
    if offsets_q is None:
        offsets_q = torch.arange(num_sequences + 1, device=q.device) * q.shape[0]
    dout, q, k, v = (for_tma(x) for x in (dout.reshape(-1, *q.shape[1:]), q, k, v))
    total_q, heads, dim = dout.shape
    config = backward_config(dim, None, q.shape[0] if shared else None)
    prepare, gradients, finish = _kernels(spec, config, q.is_cuda)
    blocks = total_q // ROWS + num_sequences + _EXTRA_BLOCKS
    stats = q.new_empty(blocks * heads * 2 * ROWS if spec.has_softmax else 0, dtype=torch.float32)
    rows = _REPLICAS * q.shape[0] if shared else q.shape[0]
    dq_sum = q.new_zeros((rows, heads, dim), dtype=torch.float32)
    counter = (q.new_empty if spec.has_softmax else q.new_zeros)(_COUNTERS, dtype=torch.int32)
    offsets = offsets_q.contiguous(), geometry.offsets_kv.contiguous()
    sizes = num_sequences, total_q, k.shape[0]
    if spec.has_softmax:
        prepare.launch(
            blocks * heads, (dout, out, lse, stats, counter, offsets[0]), sizes[:2],
            (dout.stride(0), inverse(spec.out_scale)),
        )  # fmt: skip
    turns = counter.new_zeros(total_q * heads if spec.deterministic else 1)
    items = tables[0].shape[0] * spec.num_kv_heads
    programs = min(num_processors(q.device) // config.ctas or 1, items) * config.ctas
    slots = counter.new_empty(CTA_SLOTS * programs)
    # The parts that one CTA of a pair loads by rows, and stores.
    part, columns = ROWS // config.ctas, dim // 2
    gradients.launch(
        programs, (stats, tables[0], counter, turns, slots, *offsets),
        (*sizes, items), (spec.scale, spec.out_scale),
        (
            ragged_map(q, part, dim), ragged_map(k, ROWS, dim), ragged_map(v, ROWS, dim),
            ragged_map(dout, part, dim),
            *(ragged_map(x, ROWS, columns) for x in (q, k, dout) if config.two_ctas),
            ragged_map(dq_sum, part, DQ_COLUMNS),
            *(ragged_map(x, part, _OUT_COLUMNS) for x in (dk, dv)),
        ),
    )  # fmt: skip
    factor = spec.scale * spec.out_scale
    if shared:
        dq.copy_(dq_sum.view(_REPLICAS, *q.shape).sum(0).mul_(factor))
    else:
        finish.launch(-(-q.numel() // _FINISH_BLOCK), (dq_sum, dq), (total_q,), (factor,))
    return dq, dk, dv


def inverse(out_scale: float) -> float:
    """The factor of delta. Without an out_scale all is 0 in the end, and need only be finite."""
    return 1.0 / out_scale if out_scale else 0.0
