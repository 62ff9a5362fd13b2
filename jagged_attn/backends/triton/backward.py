# mypy: allow-untyped-defs
"""Backward kernels of self and cross attention: two, each keeping one side, so that nothing is added atomically.

``backward_q`` keeps a tile of queries: delta and dQ. ``backward_kv``, after it, keeps a tile of keys: dK and dV.
"""

import triton
import triton.language as tl

from .._jit.jagged import load_tile, partner_rows, row_pointers, sequence_rows, store_tile, tile_offsets
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
    pairs_allowed,
    query_range,
    split_range,
)


@triton.jit
def activated_scores(
    s, lse, allowed, scale, ACT: tl.constexpr, FAST_TANH: tl.constexpr, SINGLE: tl.constexpr, MASKED: tl.constexpr
):
    """The activated scores p from ``s = q k^T``; ``lse`` broadcasts against it.

    For the softmax it is the exponent that is masked: one that does not belong here may be too large. SINGLE takes one
    more operation to keep the rounding error that of the difference, which fp32 results would show.
    """
    if ACT == "softmax":
        if SINGLE:
            exponent = (s * scale - lse) * LOG2E
        else:
            exponent = s * (scale * LOG2E) - lse * LOG2E
        if MASKED:
            exponent = tl.where(allowed, exponent, float("-inf"))
        return tl.exp2(exponent)
    else:
        p = activate(s * scale, ACT, FAST_TANH)
        if MASKED:
            p = tl.where(allowed, p, 0.0)
        return p


@triton.jit
def score_gradient(s, p, dp, delta, allowed, scale, out_scale,
                   ACT: tl.constexpr, FAST_TANH: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The gradient of the scaled scores, from s, p and ``dp = do v^T``; ``delta`` broadcasts against them.

    It is masked too: the derivative at a masked score need not be 0.
    """
    if ACT == "softmax":
        ds = p * (dp * out_scale - delta)
    else:
        ds = derivative(s * scale, ACT, FAST_TANH) * (dp * out_scale)
    if MASKED:
        ds = tl.where(allowed, ds, 0.0)
    return ds


@triton.jit
def stream_keys(
    dq, q, do, lse, delta, k, v, k_stride, v_stride, begin, end, key_lo, key_hi, len_kv, scale, out_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dq / scale what the keys ``[begin, end)`` give; ``k`` and ``v`` are at the sequence's first key."""
    k_offsets = tile_offsets(k_stride, BLOCK_KV, BLOCK_D, WIDE)
    k += tl.cast(begin, tl.int64) * k_stride
    v_offsets = tile_offsets(v_stride, BLOCK_KV, BLOCK_DV, WIDE)
    v += tl.cast(begin, tl.int64) * v_stride
    k_step = tl.cast(k_stride, tl.int64) * BLOCK_KV
    v_step = tl.cast(v_stride, tl.int64) * BLOCK_KV
    # See _stream_queries for the branch.
    if begin < end:
        for first in range(begin, end, BLOCK_KV):
            j = first + tl.arange(0, BLOCK_KV)
            k_tile = load_tile(k + k_offsets, j < len_kv, D, BLOCK_D, MASKED)
            v_tile = load_tile(v + v_offsets, j < len_kv, DV, BLOCK_DV, MASKED)
            s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
            allowed = pairs_allowed(j[None, :], key_lo[:, None], key_hi[:, None], len_kv, MASK)
            p = activated_scores(s, lse[:, None], allowed, scale, ACT, FAST_TANH, q.dtype == tl.float32, MASKED)
            ds = score_gradient(s, p, dp, delta[:, None], allowed, scale, out_scale, ACT, FAST_TANH, MASKED)
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
            k += k_step
            v += v_step
    return dq


@triton.jit
def _gradient_of_queries(
    q, do, lse, delta, k, v, k_stride, v_stride, first_row, len_q, len_kv, scale, out_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
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
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
        )  # fmt: skip
    dq = stream_keys(
        dq, q, do, lse, delta, k, v, k_stride, v_stride, main_begin, main_end,
        key_lo, key_hi, len_kv, scale, out_scale,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, False,
    )  # fmt: skip
    dq = stream_keys(
        dq, q, do, lse, delta, k, v, k_stride, v_stride, main_end, end,
        key_lo, key_hi, len_kv, scale, out_scale,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
    )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv"])
def backward_q(
    do, q, k, v, out, lse, delta, dq, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv,
    do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
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
                FAST_TANH, PRECISION, WIDE,
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
                        FAST_TANH, PRECISION, WIDE,
                    )  # fmt: skip
        dq_pointers = row_pointers(dq + head64 * D, start, H * D, BLOCK_Q, BLOCK_D)
        store_tile(dq_pointers, acc * scale, row_ok, D, BLOCK_D)


@triton.jit
def _stream_queries(
    dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, begin, end, query_lo, query_hi, len_q, scale, out_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to dk / scale and dv / out_scale what the queries ``[begin, end)`` give."""
    q_offsets = tile_offsets(q_stride, BLOCK_Q, BLOCK_D, WIDE)
    do_offsets = tile_offsets(do_stride, BLOCK_Q, BLOCK_DV, WIDE)
    q += tl.cast(begin, tl.int64) * q_stride
    do += tl.cast(begin, tl.int64) * do_stride
    q_step = tl.cast(q_stride, tl.int64) * BLOCK_Q
    do_step = tl.cast(do_stride, tl.int64) * BLOCK_Q
    # The branch keeps the loop's entry apart from its way round: where they met, the compiler would move sums that
    # the matrix unit still works on, and so wait for each product (ptxas calls it C7515).
    if begin < end:
        for first in range(begin, end, BLOCK_Q):
            i = first + tl.arange(0, BLOCK_Q)
            q_tile = load_tile(q + q_offsets, i < len_q, D, BLOCK_D, MASKED)
            do_tile = load_tile(do + do_offsets, i < len_q, DV, BLOCK_DV, MASKED)
            row_lse = tl.zeros([BLOCK_Q], tl.float32)
            row_delta = tl.zeros([BLOCK_Q], tl.float32)
            if ACT == "softmax":
                rows = i.to(tl.int64) * H
                row_lse = tl.load(lse + rows, mask=i < len_q, other=float("inf"))
                row_delta = tl.load(delta + rows, mask=i < len_q, other=0.0)
            s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
            allowed = pairs_allowed(i[None, :], query_lo[:, None], query_hi[:, None], len_q, MASK)
            p = activated_scores(s, row_lse[None, :], allowed, scale, ACT, FAST_TANH, k.dtype == tl.float32, MASKED)
            # dP after dV: while one sum is in flight, the matrix unit must not be handed a second one.
            dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
            ds = score_gradient(s, p, dp, row_delta[None, :], allowed, scale, out_scale, ACT, FAST_TANH, MASKED)
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
            q += q_step
            do += do_step
    return dk, dv


@triton.jit
def _gradient_of_keys(
    dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, first_row, len_q, len_kv, scale, out_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
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
            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
        )  # fmt: skip
    dk, dv = _stream_queries(
        dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, main_begin, main_end,
        query_lo, query_hi, len_q, scale, out_scale,
        H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, MASK, ACT, FAST_TANH, PRECISION, WIDE, False,
    )  # fmt: skip
    dk, dv = _stream_queries(
        dk, dv, k, v, q, do, lse, delta, q_stride, do_stride, main_end, end,
        query_lo, query_hi, len_q, scale, out_scale,
        H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
    )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "total_kv"])
def backward_kv(
    do, q, k, v, lse, delta, dk, dv, table, offsets_q, offsets_kv, num_sequences, num_queries, total_kv,
    do_batch, do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BROADCAST_Q: tl.constexpr,
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
                    FAST_TANH, PRECISION, WIDE,
                )  # fmt: skip
            else:
                which = activation_of(head, ACTS)
                for a in tl.static_range(num_activations(ACTS)):
                    if which == a:
                        dk_tile, dv_tile = _gradient_of_keys(
                            dk_tile, dv_tile, k_tile, v_tile, q_first + head64 * q_head, do_first + head64 * do_head,
                            lse + rows, delta + rows, q_row, do_row, first_row, len_q, len_kv, scale, out_scale,
                            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, a),
                            FAST_TANH, PRECISION, WIDE,
                        )  # fmt: skip
        heads_kv: tl.constexpr = H // GROUP
        dk_pointers = row_pointers(dk + kv_head64 * D, start, heads_kv * D, BLOCK_KV, BLOCK_D)
        store_tile(dk_pointers, dk_tile * scale, row_ok, D, BLOCK_D)
        dv_pointers = row_pointers(dv + kv_head64 * DV, start, heads_kv * DV, BLOCK_KV, BLOCK_DV)
        store_tile(dv_pointers, dv_tile * out_scale, row_ok, DV, BLOCK_DV)
