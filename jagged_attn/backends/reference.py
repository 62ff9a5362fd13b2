"""The reference: one loop over sequences and heads, written from the formulas. The definition of correct.

Slow on purpose: a reader should be able to check each line against ``docs/mathematics.md``. It accumulates in fp32
(float64 for float64 inputs), runs on any device, and waits for the device once a layout to read the lengths.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..activations import ELEMENTWISE, SOFTMAX
from ..layout import derived, row_bounds
from ..schedule.tiles import TableRequest
from ..spec import AttentionSpec
from .base import Arch, Geometry, lse_dtype, new_outputs


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``: every valid call."""
    return None


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: none."""
    return ()


def forward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See ``Launch.forward``."""
    out, lse = new_outputs(q, v, geometry, spec.has_softmax)
    out.zero_()
    lse.fill_(-torch.inf)
    for b, rows_q, rows_kv in _sequences(q, k, geometry):
        for h, activation in enumerate(spec.activation_of_heads):
            h_kv = h // spec.group_size
            scores, allowed = _scores(q[rows_q, h], k[rows_kv, h_kv], spec)
            p, lse_rows = _activate(scores, allowed, activation)
            where = (rows_q, h) if b is None else (b, rows_q, h)
            out[where] = (spec.out_scale * (p @ v[rows_kv, h_kv].to(p.dtype))).to(out.dtype)
            if spec.has_softmax:
                lse[where] = lse_rows
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Launch.backward``."""
    dtype = lse_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    for b, rows_q, rows_kv in _sequences(q, k, geometry):
        for h, activation in enumerate(spec.activation_of_heads):
            h_kv = h // spec.group_size
            q_b, k_b, v_b = q[rows_q, h].to(dtype), k[rows_kv, h_kv].to(dtype), v[rows_kv, h_kv].to(dtype)
            do_b = spec.out_scale * (dout[rows_q, h] if b is None else dout[b, rows_q, h]).to(dtype)
            scores, allowed = _scores(q_b, k_b, spec)
            p, _ = _activate(scores, allowed, activation)
            dp = do_b @ v_b.T
            if activation == SOFTMAX:
                ds = p * (dp - (p * dp).sum(dim=1, keepdim=True))
            else:
                ds = ELEMENTWISE[activation].derivative(scores) * dp
            ds = torch.where(allowed, ds, 0.0)
            dv[rows_kv, h_kv] += p.T @ do_b
            dk[rows_kv, h_kv] += spec.scale * ds.T @ q_b
            dq[rows_q, h] += spec.scale * ds @ k_b
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sequences(q: Tensor, k: Tensor, geometry: Geometry) -> Iterator[tuple[int | None, slice, slice]]:
    """For each sequence: its place in a broadcast-Q output, else None; its rows in q; its rows in k and v."""
    rows_kv = _rows_sync(geometry.offsets_kv, k.shape[0])
    if geometry.offsets_q is None:
        yield from ((b, slice(0, q.shape[0]), rows) for b, rows in enumerate(rows_kv))
    else:
        yield from ((None, *rows) for rows in zip(_rows_sync(geometry.offsets_q, q.shape[0]), rows_kv, strict=True))


def _rows_sync(offsets: Tensor, total_rows: int) -> list[slice]:
    def read() -> list[slice]:
        starts, ends = row_bounds(offsets, total_rows)
        return [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    return derived(offsets, offsets, ("rows", total_rows), read)


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """``scale * q k^T`` of one sequence and head, and which pairs the mask allows; both ``[L_q, L_kv]``."""
    dtype = lse_dtype(q.dtype)
    scores = spec.scale * (q.to(dtype) @ k.to(dtype).T)
    i = torch.arange(q.shape[0], device=q.device)[:, None]
    j = torch.arange(k.shape[0], device=q.device)[None, :]
    lo, hi = spec.mask.key_range(i, q.shape[0], k.shape[0])
    return scores, (lo <= j) & (j < hi)


def _activate(scores: Tensor, allowed: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """The activated scores, 0 where not allowed, and the rows' log-sum-exp (0 for an element-wise activation)."""
    if activation != SOFTMAX:
        return torch.where(allowed, ELEMENTWISE[activation].value(scores), 0.0), 0.0
    scores = torch.where(allowed, scores, -torch.inf)
    lse = torch.logsumexp(scores, dim=1)
    # A row without a key has lse = -inf; -inf - (-inf) would be NaN.
    p = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[:, None])
    return p, lse
