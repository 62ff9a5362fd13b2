# mypy: allow-untyped-defs
"""Forward kernels: a program keeps one tile of queries and streams the keys and values that the tile sees past it."""

import triton
import triton.language as tl

from .._jit.jagged import load_tile, partner_rows, row_pointers, sequence_rows, store_tile, tile_offsets
from .._jit.scores import (
    LN2,
    LOG2E,
    activate,
    activation_name,
    activation_of,
    has_softmax,
    key_range,
    mask_opens,
    num_activations,
    pairs_allowed,
    split_range,
)


@triton.jit
def _softmax_step(s, acc, row_sum, row_max, allowed, scale, MASKED: tl.constexpr):
    """One block of the online softmax, in base 2: the block's p, and the running values in its units."""
    factor = scale * LOG2E
    if MASKED:
        s = tl.where(allowed, s * factor, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - shift[:, None])
    else:
        new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
        shift = new_max
        p = tl.exp2(s * factor - shift[:, None])
    correction = tl.exp2(row_max - shift)
    return p, acc * correction[:, None], row_sum * correction + tl.sum(p, 1), new_max


@triton.jit
def _stream(
    acc, row_sum, row_max, q, k, v, k_stride, v_stride, begin, end, key_lo, key_hi, len_kv, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys ``[begin, end)`` of a sequence, whose first key and value are at ``k`` and ``v``."""
    k_offsets = tile_offsets(k_stride, BLOCK_KV, BLOCK_D, WIDE)
    k += tl.cast(begin, tl.int64) * k_stride
    v_offsets = tile_offsets(v_stride, BLOCK_KV, BLOCK_DV, WIDE)
    v += tl.cast(begin, tl.int64) * v_stride
    k_step = tl.cast(k_stride, tl.int64) * BLOCK_KV
    v_step = tl.cast(v_stride, tl.int64) * BLOCK_KV
    # See backward._stream_queries for the branch.
    if begin < end:
        for first in range(begin, end, BLOCK_KV):
            j = first + tl.arange(0, BLOCK_KV)
            k_tile = load_tile(k + k_offsets, j < len_kv, D, BLOCK_D, MASKED)
            s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
            allowed = pairs_allowed(j[None, :], key_lo[:, None], key_hi[:, None], len_kv, MASK)
            if ACT == "softmax":
                p, acc, row_sum, row_max = _softmax_step(s, acc, row_sum, row_max, allowed, scale, MASKED)
            else:
                p = activate(s * scale, ACT, FAST_TANH)
                if MASKED:
                    p = tl.where(allowed, p, 0.0)
            v_tile = load_tile(v + v_offsets, j < len_kv, DV, BLOCK_DV, MASKED)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            k += k_step
            v += v_step
    return acc, row_sum, row_max


@triton.jit
def _attend(
    q, k, v, k_stride, v_stride, first_row, len_q, len_kv, scale, out_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Output and natural log-sum-exp of a tile of queries that begins at ``first_row`` of its sequence."""
    i = first_row + tl.arange(0, BLOCK_Q)
    last_row = tl.minimum(first_row + BLOCK_Q, len_q) - 1
    key_lo, key_hi = key_range(i, len_q, len_kv, MASK)
    lo_first, hi_first = key_range(first_row, len_q, len_kv, MASK)
    lo_last, hi_last = key_range(last_row, len_q, len_kv, MASK)
    begin, main_begin, main_end, end = split_range(lo_first, hi_first, lo_last, hi_last, BLOCK_KV)

    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    # Full and causal ranges begin with the sequence: there is no masked block before the main part.
    if not mask_opens(MASK, 0):
        acc, row_sum, row_max = _stream(
            acc, row_sum, row_max, q, k, v, k_stride, v_stride, begin, tl.minimum(main_begin, end),
            key_lo, key_hi, len_kv, scale,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
        )  # fmt: skip
    acc, row_sum, row_max = _stream(
        acc, row_sum, row_max, q, k, v, k_stride, v_stride, main_begin, main_end,
        key_lo, key_hi, len_kv, scale, D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, False,
    )  # fmt: skip
    acc, row_sum, row_max = _stream(
        acc, row_sum, row_max, q, k, v, k_stride, v_stride, main_end, end,
        key_lo, key_hi, len_kv, scale, D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
    )  # fmt: skip
    if ACT == "softmax":
        has_key = row_sum != 0.0
        divisor = tl.where(has_key, row_sum, 1.0)
        acc = acc * (out_scale / divisor)[:, None]
        lse = tl.where(has_key, (row_max + tl.log2(divisor)) * LN2, float("-inf"))
    else:
        acc = acc * out_scale
        lse = row_sum
    return acc, lse


@triton.jit
def _forward_tile(
    q_tile, k, v, out, lse, k_stride, v_stride, head, first_row, len_q, len_kv, scale, out_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute and store one tile; pointers are at the first row of the sequence and at the program's head."""
    i = first_row + tl.arange(0, BLOCK_Q)
    row_ok = i < len_q
    first = first_row.to(tl.int64)
    # The running maximum is taken before the scale, which must not turn it round.
    q_tile = (q_tile * tl.where(scale < 0.0, -1.0, 1.0)).to(q_tile.dtype)
    scale = tl.abs(scale)
    if num_activations(ACTS) == 1:
        acc, lse_rows = _attend(
            q_tile, k, v, k_stride, v_stride, first_row, len_q, len_kv, scale, out_scale,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, 0),
            FAST_TANH, PRECISION, WIDE,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
        lse_rows = tl.zeros([BLOCK_Q], tl.float32)
        which = activation_of(head, ACTS)
        for a in tl.static_range(num_activations(ACTS)):
            if which == a:
                acc, lse_rows = _attend(
                    q_tile, k, v, k_stride, v_stride, first_row, len_q, len_kv, scale, out_scale,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, a),
                    FAST_TANH, PRECISION, WIDE,
                )  # fmt: skip
    store_tile(row_pointers(out, first, H * DV, BLOCK_Q, BLOCK_DV), acc, row_ok, DV, BLOCK_DV)
    if has_softmax(ACTS):
        tl.store(lse + (first + tl.arange(0, BLOCK_Q)) * H, lse_rows, mask=row_ok)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv"])
def forward(
    q, k, v, out, lse, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv,
    q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Self and cross attention: one program for each entry of the query tile table and each head."""
    program = tl.program_id(0)
    head = program % H
    entry = table + 2 * (program // H)
    b = tl.load(entry)
    if b >= 0:
        first_row = tl.load(entry + 1)
        start_q, len_q = sequence_rows(offsets_q, b, num_sequences, total_q)
        start_kv, len_kv = partner_rows(offsets_kv, b, num_sequences, total_kv)
        head64, kv_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
        q_pointers = row_pointers(q + head64 * q_head, start_q + first_row, q_row, BLOCK_Q, BLOCK_D)
        q_tile = load_tile(q_pointers, first_row + tl.arange(0, BLOCK_Q) < len_q, D, BLOCK_D, True)
        _forward_tile(
            q_tile, k + start_kv * k_row + kv_head * k_head,
            v + start_kv * v_row + kv_head * v_head, out + (start_q * H + head64) * DV, lse + start_q * H + head64,
            k_row, v_row, head, first_row, len_q, len_kv, scale, out_scale,
            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, ACTS, FAST_TANH, PRECISION, WIDE,
        )  # fmt: skip


@triton.jit
def _zero_tile(out, lse, first_row, len_q, H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
               BLOCK_Q: tl.constexpr, HAS_SOFTMAX: tl.constexpr):  # fmt: skip
    """Store what queries without keys get: output 0, log-sum-exp -inf."""
    row_ok = first_row + tl.arange(0, BLOCK_Q) < len_q
    first = first_row.to(tl.int64)
    zeros = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    store_tile(row_pointers(out, first, H * DV, BLOCK_Q, BLOCK_DV), zeros, row_ok, DV, BLOCK_DV)
    if HAS_SOFTMAX:
        none = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        tl.store(lse + (first + tl.arange(0, BLOCK_Q)) * H, none, mask=row_ok)


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "total_kv"])
def broadcast_q_forward(
    q, k, v, out, lse, table, offsets_kv, num_sequences, num_queries, total_kv,
    q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Broadcast-Q: one program for each sequence, tile of the shared queries and head.

    The table's entry n is the sequence with the n-th most keys. It names no empty sequence, whose output must be
    written all the same: program n also looks after sequence n, if that is empty.
    """
    program = tl.program_id(0)
    head = program % H
    num_tiles = tl.cdiv(num_queries, BLOCK_Q)
    first_row = program // H % num_tiles * BLOCK_Q
    n = program // H // num_tiles
    head64, kv_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
    # Before the table: the queries do not depend on it, so both are on their way at once.
    q_pointers = row_pointers(q + head64 * q_head, first_row, q_row, BLOCK_Q, BLOCK_D)
    q_tile = load_tile(q_pointers, first_row + tl.arange(0, BLOCK_Q) < num_queries, D, BLOCK_D, True)
    b = tl.load(table + 2 * n)
    out += head64 * DV
    lse += head64
    if (b >= 0) & (b < num_sequences) & (tl.load(table + 2 * n + 1) == 0):
        start_kv, len_kv = sequence_rows(offsets_kv, b, num_sequences, total_kv)
        start_out = b.to(tl.int64) * num_queries * H
        _forward_tile(
            q_tile, k + start_kv * k_row + kv_head * k_head, v + start_kv * v_row + kv_head * v_head,
            out + start_out * DV, lse + start_out,
            k_row, v_row, head, first_row, num_queries, len_kv, scale, out_scale,
            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, ACTS, FAST_TANH, PRECISION, WIDE,
        )  # fmt: skip
    if n < num_sequences:
        _, len_kv = sequence_rows(offsets_kv, n, num_sequences, total_kv)
        if len_kv == 0:
            start_out = n.to(tl.int64) * num_queries * H
            _zero_tile(
                out + start_out * DV, lse + start_out, first_row, num_queries,
                H, DV, BLOCK_DV, BLOCK_Q, has_softmax(ACTS),
            )  # fmt: skip
