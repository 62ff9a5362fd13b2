"""Backward kernels of self and cross attention: two, each keeping one side, so that nothing is added atomically.

``backward_q`` keeps a tile of queries: delta and dQ. ``backward_kv``, after it, keeps a tile of keys: dK and dV.
"""

import triton
import triton.language as tl

from .._jit.jagged import load_tile, partner_rows, row_pointers, sequence_rows, store_tile
from .._jit.scores import (
    LOG2E,
    activate,
    activation_name,
    activation_of,
    derivative,
    has_softmax,
    key_range,
    mask_opens,
    num_activations,
    query_range,
    split_range,
)


@triton.jit
def score_gradient(
    s, dp, lse, delta, allowed, scale, out_scale,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, SINGLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The activated scores p and the gradient ds of the scaled scores, from ``s = q k^T`` and ``dp = do v^T``.

    ``lse`` and ``delta`` broadcast against ``s``. Both results are masked: a masked score may be too large for the
    exponential, and the derivative at a masked score need not be 0. SINGLE takes one more operation to keep the
    rounding error that of the difference, which fp32 results would show.
    """
    if ACT == "softmax":
        if SINGLE:
            p = tl.exp2((s * scale - lse) * LOG2E)
        else:
            p = tl.exp2(s * (scale * LOG2E) - lse * LOG2E)
        if MASKED:
            p = tl.where(allowed, p, 0.0)
        ds = p * (dp * out_scale - delta)
    else:
        x = s * scale
        p = activate(x, ACT, FAST_TANH)
        ds = derivative(x, ACT, FAST_TANH) * (dp * out_scale)
        if MASKED:
            p = tl.where(allowed, p, 0.0)
    if MASKED:
        ds = tl.where(allowed, ds, 0.0)
    return p, ds


@triton.jit
def stream_keys(
    dq, q, do, lse, delta, k, v, k_stride, v_stride, begin, end, key_lo, key_hi, len_kv, scale, out_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dq / scale what the keys ``[begin, end)`` give; ``k`` and ``v`` are at the sequence's first key."""
    k_pointers = row_pointers(k, begin, k_stride, BLOCK_KV, BLOCK_D)
    v_pointers = row_pointers(v, begin, v_stride, BLOCK_KV, BLOCK_DV)
    k_step = tl.cast(k_stride, tl.int64) * BLOCK_KV
    v_step = tl.cast(v_stride, tl.int64) * BLOCK_KV
    for first in range(begin, end, BLOCK_KV):
        j = first + tl.arange(0, BLOCK_KV)
        k_tile = load_tile(k_pointers, j < len_kv, D, BLOCK_D, MASKED)
        v_tile = load_tile(v_pointers, j < len_kv, DV, BLOCK_DV, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        allowed = (key_lo[:, None] <= j[None, :]) & (j[None, :] < key_hi[:, None])
        _, ds = score_gradient(
            s, dp, lse[:, None], delta[:, None], allowed, scale, out_scale,
            ACT, FAST_TANH, q.dtype == tl.float32, MASKED,
        )  # fmt: skip
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        k_pointers += k_step
        v_pointers += v_step
    return dq


@triton.jit
def _gradient_of_queries(
    q, do, lse, delta, k, v, k_stride, v_stride, first_row, len_q, len_kv, scale, out_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq / scale of a tile of queries that begins at ``first_row`` of its sequence."""
    i = first_row + tl.arange(0, BLOCK_Q)
    last_row = tl.minimum(first_row + BLOCK_Q, len_q) - 1
    key_lo, key_hi = key_range(i, len_q, len_kv, MASK)
    lo_first, hi_first = key_range(first_row, len_q, len_kv, MASK)
    lo_last, hi_last = key_range(last_row, len_q, len_kv, MASK)
    begin, main_begin, main_end, end = split_range(lo_first, hi_first, lo_last, hi_last, BLOCK_KV)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if not mask_opens(MASK, 0):
        dq = stream_keys(
            dq, q, do, lse, delta, k, v, k_stride, v_stride, begin, tl.minimum(main_begin, end),
            key_lo, key_hi, len_kv, scale, out_scale,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, ACT, FAST_TANH, PRECISION, True,
        )  # fmt: skip
    dq = stream_keys(
        dq, q, do, lse, delta, k, v, k_stride, v_stride, main_begin, main_end,
        key_lo, key_hi, len_kv, scale, out_scale,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, ACT, FAST_TANH, PRECISION, False,
    )  # fmt: skip
    dq = stream_keys(
        dq, q, do, lse, delta, k, v, k_stride, v_stride, main_end, end,
        key_lo, key_hi, len_kv, scale, out_scale,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, ACT, FAST_TANH, PRECISION, True,
    )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv"])
def backward_q(
    do, q, k, v, out, lse, delta, dq, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, and the delta that ``backward_kv`` reads: one program for each entry of the query table and each head."""
    program = tl.program_id(0)
    head = program % H
    entry = table + 2 * (program // H)
    b = tl.load(entry)
    if b >= 0:
        first_row = tl.load(entry + 1)
        start_q, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        start_kv, len_kv = partner_rows(offsets_kv, b, num_sequences, total_kv)
        head64, kv_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
        start = start_q + first_row
        row_ok = first_row + tl.arange(0, BLOCK_Q) < len_q
        q_tile = load_tile(
            row_pointers(q + head64 * q_head, start, q_row, BLOCK_Q, BLOCK_D), row_ok, D, BLOCK_D, True
        )  # fmt: skip
        do_tile = load_tile(
            row_pointers(do + head64 * do_head, start, do_row, BLOCK_Q, BLOCK_DV), row_ok, DV, BLOCK_DV, True
        )  # fmt: skip
        row_lse = tl.zeros([BLOCK_Q], tl.float32)
        row_delta = tl.zeros([BLOCK_Q], tl.float32)
        if has_softmax(ACTS):
            rows = (start + tl.arange(0, BLOCK_Q)) * H + head64
            out_tile = load_tile(
                row_pointers(out + head64 * DV, start, H * DV, BLOCK_Q, BLOCK_DV), row_ok, DV, BLOCK_DV, True
            )  # fmt: skip
            row_delta = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
            tl.store(delta + rows, row_delta, mask=row_ok)
            row_lse = tl.load(lse + rows, mask=row_ok, other=float("inf"))
        k += start_kv * k_row + kv_head * k_head
        v += start_kv * v_row + kv_head * v_head
        if num_activations(ACTS) == 1:
            acc = _gradient_of_queries(
                q_tile, do_tile, row_lse, row_delta, k, v, k_row, v_row, first_row, len_q, len_kv, scale, out_scale,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, 0),
                FAST_TANH, PRECISION,
            )  # fmt: skip
        else:
            acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            which = activation_of(head, ACTS)
            for a in tl.static_range(num_activations(ACTS)):
                if which == a:
                    acc = _gradient_of_queries(
                        q_tile, do_tile, row_lse, row_delta, k, v, k_row, v_row,
                        first_row, len_q, len_kv, scale, out_scale,
                        D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, a),
                        FAST_TANH, PRECISION,
                    )  # fmt: skip
        dq_pointers = row_pointers(dq + head64 * D, start, H * D, BLOCK_Q, BLOCK_D)
        store_tile(dq_pointers, acc * scale, row_ok, D, BLOCK_D)


@triton.jit
def _stream_queries(
    dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, begin, end, query_lo, query_hi, len_q, scale, out_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dk / scale and dv / out_scale what the queries ``[begin, end)`` give; scores are [keys, queries]."""
    q_pointers = row_pointers(q, begin, q_stride, BLOCK_Q, BLOCK_D)
    do_pointers = row_pointers(do, begin, do_stride, BLOCK_Q, BLOCK_DV)
    q_step = tl.cast(q_stride, tl.int64) * BLOCK_Q
    do_step = tl.cast(do_stride, tl.int64) * BLOCK_Q
    for first in range(begin, end, BLOCK_Q):
        i = first + tl.arange(0, BLOCK_Q)
        q_tile = load_tile(q_pointers, i < len_q, D, BLOCK_D, MASKED)
        do_tile = load_tile(do_pointers, i < len_q, DV, BLOCK_DV, MASKED)
        row_lse = tl.zeros([BLOCK_Q], tl.float32)
        row_delta = tl.zeros([BLOCK_Q], tl.float32)
        if ACT == "softmax":
            rows = i.to(tl.int64) * H
            row_lse = tl.load(lse + rows, mask=i < len_q, other=float("inf"))
            row_delta = tl.load(delta + rows, mask=i < len_q, other=0.0)
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        allowed = (query_lo[:, None] <= i[None, :]) & (i[None, :] < query_hi[:, None])
        p, ds = score_gradient(
            s, dp, row_lse[None, :], row_delta[None, :], allowed, scale, out_scale,
            ACT, FAST_TANH, k.dtype == tl.float32, MASKED,
        )  # fmt: skip
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
        q_pointers += q_step
        do_pointers += do_step
    return dk, dv


@triton.jit
def _gradient_of_keys(
    dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, first_row, len_q, len_kv, scale, out_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one head's share to dk / scale and dv / out_scale of a tile of keys."""
    j = first_row + tl.arange(0, BLOCK_KV)
    last_row = tl.minimum(first_row + BLOCK_KV, len_kv) - 1
    query_lo, query_hi = query_range(j, len_q, len_kv, MASK)
    lo_first, hi_first = query_range(first_row, len_q, len_kv, MASK)
    lo_last, hi_last = query_range(last_row, len_q, len_kv, MASK)
    begin, main_begin, main_end, end = split_range(lo_first, hi_first, lo_last, hi_last, BLOCK_Q)
    # With an open right side every key is seen from the first query on: no masked block before the main part.
    if not mask_opens(MASK, 1):
        dk, dv = _stream_queries(
            dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, begin, tl.minimum(main_begin, end),
            query_lo, query_hi, len_q, scale, out_scale,
            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, ACT, FAST_TANH, PRECISION, True,
        )  # fmt: skip
    dk, dv = _stream_queries(
        dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, main_begin, main_end,
        query_lo, query_hi, len_q, scale, out_scale,
        H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, ACT, FAST_TANH, PRECISION, False,
    )  # fmt: skip
    dk, dv = _stream_queries(
        dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, main_end, end,
        query_lo, query_hi, len_q, scale, out_scale,
        H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, ACT, FAST_TANH, PRECISION, True,
    )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "total_kv"])
def backward_kv(
    do, q, k, v, lse, delta, dk, dv, table, offsets_q, offsets_kv, num_sequences, num_queries, total_kv,
    do_batch, do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, BROADCAST_Q: tl.constexpr,
):  # fmt: skip
    """dK and dV: one program for each entry of the key tile table and each key head; adds up the heads of its group.

    ``num_queries`` is T_q, or S with BROADCAST_Q. The keys of no sequence have no queries and get 0.
    """
    program = tl.program_id(0)
    kv_head = program % (H // GROUP)
    entry = table + 2 * (program // (H // GROUP))
    b = tl.load(entry)
    if b >= 0:
        first_row = tl.load(entry + 1)
        start_kv, len_kv = sequence_rows(offsets_kv, b, num_sequences, total_kv)
        if BROADCAST_Q:
            len_q = tl.where(b < num_sequences, num_queries, 0)
            rows_do = b.to(tl.int64) * num_queries
            q_first = q
            do_first = do + b.to(tl.int64) * do_batch
        else:
            rows_do, len_q = partner_rows(offsets_q, b, num_sequences, num_queries)
            q_first = q + rows_do * q_row
            do_first = do + rows_do * do_row
        start = start_kv + first_row
        kv_head64 = kv_head.to(tl.int64)
        row_ok = first_row + tl.arange(0, BLOCK_KV) < len_kv
        k_tile = load_tile(
            row_pointers(k + kv_head64 * k_head, start, k_row, BLOCK_KV, BLOCK_D), row_ok, D, BLOCK_D, True
        )  # fmt: skip
        v_tile = load_tile(
            row_pointers(v + kv_head64 * v_head, start, v_row, BLOCK_KV, BLOCK_DV), row_ok, DV, BLOCK_DV, True
        )  # fmt: skip
        dk_tile = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
        dv_tile = tl.zeros([BLOCK_KV, BLOCK_DV], tl.float32)
        for g in range(GROUP):
            head = kv_head * GROUP + g
            head64 = head.to(tl.int64)
            rows = rows_do * H + head64
            if num_activations(ACTS) == 1:
                dk_tile, dv_tile = _gradient_of_keys(
                    dk_tile, dv_tile, k_tile, v_tile, q_first + head64 * q_head, do_first + head64 * do_head,
                    lse + rows, delta + rows, q_row, do_row, first_row, len_q, len_kv, scale, out_scale,
                    H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, 0),
                    FAST_TANH, PRECISION,
                )  # fmt: skip
            else:
                which = activation_of(head, ACTS)
                for a in tl.static_range(num_activations(ACTS)):
                    if which == a:
                        dk_tile, dv_tile = _gradient_of_keys(
                            dk_tile, dv_tile, k_tile, v_tile, q_first + head64 * q_head, do_first + head64 * do_head,
                            lse + rows, delta + rows, q_row, do_row, first_row, len_q, len_kv, scale, out_scale,
                            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, a),
                            FAST_TANH, PRECISION,
                        )  # fmt: skip
        heads_kv: tl.constexpr = H // GROUP
        dk_pointers = row_pointers(dk + kv_head64 * D, start, heads_kv * D, BLOCK_KV, BLOCK_D)
        store_tile(dk_pointers, dk_tile * scale, row_ok, D, BLOCK_D)
        dv_pointers = row_pointers(dv + kv_head64 * DV, start, heads_kv * DV, BLOCK_KV, BLOCK_DV)
        store_tile(dv_pointers, dv_tile * out_scale, row_ok, DV, BLOCK_DV)
