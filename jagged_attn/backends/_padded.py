"""Attention on a padded chunk, in the dtype of its tensors: by matrix products, or by PyTorch's CPU flash kernels.

Shapes: q ``[n, H, L_q, D]``, k ``[n, H_kv, L_kv, D]``, v ``[n, H_kv, L_kv, Dv]``, out ``[n, H, L_q, Dv]``, lse
``[n, H, L_q]``; padding rows hold zeros. Rows past a sequence's length come out arbitrary, and are dropped.
"""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from ..activations import ELEMENTWISE, SOFTMAX
from ..masks import Full, Mask, SlidingWindow
from ..spec import AttentionSpec
from ._buckets import Chunk

# Rows of a tile under a mask, so that keys which none of its rows sees are left out.
_MASKED_TILE = 128
# Elements of a tile's scores: bounds the memory of a sequence too long for one chunk.
_TILE_SCORES = 1 << 21


def flash_runs(spec: AttentionSpec, device_type: str) -> bool:
    """Whether PyTorch's CPU flash kernels compute this call: softmax on equal head dims, all keys or causal.

    They keep no scores, take any strides, and treat each sequence and head apart, in the dtype of the chunk.
    """
    mask = spec.mask
    # In self-attention both alignments are one. Folded heads would break the order of rows.
    is_causal = isinstance(mask, SlidingWindow) and (mask.left, mask.right) == (None, 0) and spec.kind == "self"
    return (
        device_type == "cpu"
        and spec.activation == (SOFTMAX,)
        and spec.head_dim == spec.value_head_dim
        and spec.out_scale == 1.0
        # The kernel hides keys before it scales: under a scale of 0 or less what it hides comes out as NaN.
        and (mask == Full() or (is_causal and spec.group_size == 1 and spec.scale > 0))
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """``out, lse`` of a chunk for which ``flash_runs``."""
    group = (spec.num_kv_heads, spec.group_size)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_pitched(x) for x in (_fold(q, group), k, v)),
        is_causal=spec.mask != Full(),
        attn_mask=_padding_bias(q, chunk, spec.mask),
        scale=spec.scale,
    )
    return _unfold(out, group), _unfold(lse, group)


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chunk: Chunk, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of a chunk for which ``flash_runs``."""
    group = (spec.num_kv_heads, spec.group_size)
    dout, q, out, lse = (_fold(x, group) for x in (dout, q, out, lse))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_pitched(x) for x in (dout, q, k, v, out)),
        lse,
        0.0,
        spec.mask != Full(),
        attn_mask=_padding_bias(q, chunk, spec.mask),
        scale=spec.scale,
    )
    return _unfold(dq, group), dk, dv


def _fold(x: Tensor, group: tuple[int, int]) -> Tensor:
    """``[n, H, L, ...]`` with the heads of a group as more rows of one head: ``[n, H_kv, G L, ...]``."""
    return x if group[1] == 1 else x.unflatten(1, group).flatten(2, 3)


def _unfold(x: Tensor, group: tuple[int, int]) -> Tensor:
    return x if group[1] == 1 else x.unflatten(2, (group[1], -1)).flatten(1, 2)


def _pitched(x: Tensor) -> Tensor:
    """``x`` with rows that a BLAS takes: contiguous, and not overlapping."""
    fits = x.stride(3) == 1 and x.stride(2) >= x.shape[3]
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _padding_bias(q: Tensor, chunk: Chunk, mask: Mask) -> Tensor | None:
    """0 for keys and -inf for padding, ``[n, 1, 1, L_kv]``; None where no query of the sequence sees padding."""
    # Under a causal mask padded keys come after all keys that a query sees.
    if isinstance(chunk.lengths_kv, int) or mask != Full():
        return None
    is_padding = torch.arange(chunk.rows_kv.length, device=q.device) >= chunk.lengths_kv[:, None]
    return q.new_zeros(is_padding.shape).masked_fill_(is_padding, -torch.inf)[:, None, None]


def forward(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """``out, lse`` of a chunk, tile by tile of its query rows; lse is None if no head is a softmax."""
    group = (spec.num_kv_heads, spec.group_size)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_zeros(q.shape[:3]) if spec.has_softmax else None
    for rows, keys in _tiles(q, k, chunk, spec.mask):
        q_tile = _batch(_fold(q[:, :, rows], group))
        k_tile, v_tile = (x.flatten(0, 1)[:, keys] for x in (k, v))
        p = _product(q_tile, k_tile.mT, spec.scale).view(q.shape[0], q.shape[1], -1, k_tile.shape[1])
        hidden = _hidden(chunk, spec, rows, keys, q.device)
        factor = p.new_full((*p.shape[:3], 1), spec.out_scale)
        for activation, heads in _runs(spec):
            if activation == SOFTMAX and lse is not None:
                total, lse[:, heads, rows] = _softmax_(p[:, heads], hidden)
                factor[:, heads] /= total
            elif activation != SOFTMAX:
                p[:, heads] = _hide_(ELEMENTWISE[activation].value(p[:, heads]), hidden, 0.0)
        o = torch.bmm(p.view(*q_tile.shape[:2], -1), v_tile)
        torch.mul(o.view(*p.shape[:3], -1), factor, out=out[:, :, rows])
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    chunk: Chunk,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of a chunk, tile by tile of its query rows; out and lse are None if no head is a softmax."""
    group = (spec.num_kv_heads, spec.group_size)
    dout, q, k, v = dout.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    minus_lse, minus_delta = _row_terms(dout, out, lse, spec)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _tiles(q, k, chunk, spec.mask):
        do_tile, q_tile = (_batch(_fold(x[:, :, rows], group)) for x in (dout, q))
        k_tile, v_tile, dk_tile, dv_tile = (x.flatten(0, 1)[:, keys] for x in (k, v, dk, dv))
        shape = (q.shape[0], q.shape[1], -1, k_tile.shape[1])
        lse_tile, delta_tile = (
            None if x is None else _batch(_fold(x[:, :, rows], group)) for x in (minus_lse, minus_delta)
        )
        p = _product(q_tile, k_tile.mT, spec.scale, lse_tile).view(shape)
        ds = _product(do_tile, v_tile.mT, spec.out_scale, delta_tile).view(shape)
        for activation, heads in _runs(spec):
            if activation == SOFTMAX:
                ds[:, heads] *= p[:, heads].exp_()
            else:
                ds[:, heads] *= ELEMENTWISE[activation].derivative(p[:, heads])
                p[:, heads] = ELEMENTWISE[activation].value(p[:, heads])
        hidden = _hidden(chunk, spec, rows, keys, q.device)
        p, ds = (_batch(_fold(_hide_(x, hidden, 0.0), group)) for x in (p, ds))
        dv_tile.baddbmm_(p.mT, do_tile, alpha=spec.out_scale)
        dk_tile.baddbmm_(ds.mT, q_tile, alpha=spec.scale)
        dq[:, :, rows] = _product(ds, k_tile, spec.scale).view(*q.shape[:2], -1, q.shape[3])
    return dq, dk, dv


def _row_terms(
    dout: Tensor, out: Tensor | None, lse: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor | None, Tensor | None]:
    """What a softmax subtracts in each row, negated, ``[n, H, L_q, 1]``: lse and delta; 0 for element-wise heads."""
    if out is None or lse is None:
        return None, None
    # A row without a key has lse = -inf; all its pairs are hidden afterwards, whatever they become.
    minus_lse = torch.where(lse == -torch.inf, 0.0, -lse)
    minus_delta = (dout * out).sum(dim=3).neg_()
    for activation, heads in _runs(spec):
        if activation != SOFTMAX:
            minus_delta[:, heads] = 0.0
    return minus_lse.unsqueeze(3), minus_delta.unsqueeze(3)


def _softmax_(scores: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn scores into the numerators of a softmax, in place; returns the denominators (1 without a key) and lse."""
    _hide_(scores, hidden, -torch.inf)
    top = scores.amax(dim=3, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    total = scores.sub_(top).exp_().sum(dim=3, keepdim=True)
    return torch.where(total == 0.0, 1.0, total), (top + total.log()).squeeze(3)


def _product(a: Tensor, b: Tensor, factor: float, term: Tensor | None = None) -> Tensor:
    """``factor * a b + term`` for batches of matrices."""
    if term is None:
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=factor)
    return torch.baddbmm(term, a, b, alpha=factor)


def _batch(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _runs(spec: AttentionSpec) -> Iterator[tuple[str, slice]]:
    """The heads, as few slices of one activation each."""
    if len(spec.activation) == 1:
        yield spec.activation[0], slice(0, spec.num_heads)
        return
    for activation, run in groupby(range(spec.num_heads), key=spec.activation.__getitem__):
        heads = list(run)
        yield activation, slice(heads[0], heads[-1] + 1)


def _tiles(q: Tensor, k: Tensor, chunk: Chunk, mask: Mask) -> Iterator[tuple[slice, slice]]:
    """Query rows that are computed at once, with the keys that any of them sees."""
    n, num_heads, len_q, _ = q.shape
    len_kv = k.shape[2]
    step = max(1, min(len_q, _TILE_SCORES // (n * num_heads * len_kv)))
    if mask != Full():
        step = min(step, _MASKED_TILE)
    for start in range(0, len_q, step):
        end = min(start + step, len_q)
        lowest, _ = mask.key_range(start, len_q, len_q + chunk.shifts[0])
        _, highest = mask.key_range(end - 1, len_q, len_q + chunk.shifts[1])
        # At least one key, hidden from all rows if none sees any: a maximum over no key does not exist.
        lowest = min(max(lowest, 0), len_kv - 1)
        yield slice(start, end), slice(lowest, min(max(highest, lowest + 1), len_kv))


def _hidden(chunk: Chunk, spec: AttentionSpec, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
    """Which pairs of a tile do not count, broadcastable to ``[n, H, rows, keys]``; None if all count."""
    is_full = spec.mask == Full()
    # Rows of zeros add nothing to an element-wise sum.
    if is_full and (isinstance(chunk.lengths_kv, int) or not spec.has_softmax):
        return None
    len_q, len_kv = (x if isinstance(x, int) else x[:, None, None, None] for x in (chunk.lengths_q, chunk.lengths_kv))
    j = torch.arange(keys.start, keys.stop, device=device)
    if is_full:
        return j >= len_kv
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    low, high = spec.mask.key_range(i, len_q, len_kv)
    return (j < low) | (j >= high) | (j >= len_kv) | (i >= len_q)


def _hide_(x: Tensor, hidden: Tensor | None, value: float) -> Tensor:
    # where, and not masked_fill_: on a CPU it takes two thirds of the time for a mask that broadcasts over heads.
    return x if hidden is None else torch.where(hidden, x.new_full((), value), x, out=x)
