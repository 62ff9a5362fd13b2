# mypy: allow-untyped-defs
"""Backward kernels of broadcast-Q: the gradient of the shared queries is a sum over the batch, made in two stages.

A program keeps one tile of the queries and dQ for it in registers, walks its share of the key tiles of all sequences,
and stores its partial sum once, to ``parts [P, S, H, D]``; ``reduce_parts`` adds the P of them in a fixed order.
"""

import triton
import triton.language as tl

from .._jit.jagged import count_tiles, load_tile, row_pointers, sequence_rows, store_tile, tile_offsets
from .._jit.scores import activation_name, activation_of, key_range, mask_kind, num_activations, pairs_allowed
from .backward import activated_scores, score_gradient, stream_keys


@triton.jit
def _stream_keys_and_values(
    dq, q, do, row_lse, row_delta, k, v, dk, dv, k_stride, v_stride, dk_stride, dv_stride,
    begin, end, key_lo, key_hi, limit, len_kv, scale, out_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Store dK and dV of the keys ``[begin, end)`` of a sequence, or add to them, and add to dq / scale what they give.

    Keys from ``limit`` on are not read.
    """
    k_offsets = tile_offsets(k_stride, BLOCK_KV, BLOCK_D, WIDE)
    k += tl.cast(begin, tl.int64) * k_stride
    v_offsets = tile_offsets(v_stride, BLOCK_KV, BLOCK_DV, WIDE)
    v += tl.cast(begin, tl.int64) * v_stride
    k_step = tl.cast(k_stride, tl.int64) * BLOCK_KV
    v_step = tl.cast(v_stride, tl.int64) * BLOCK_KV
    dk_offsets = tile_offsets(dk_stride, BLOCK_KV, BLOCK_D, WIDE)
    dv_offsets = tile_offsets(dv_stride, BLOCK_KV, BLOCK_DV, WIDE)
    dk += tl.cast(begin, tl.int64) * dk_stride
    dv += tl.cast(begin, tl.int64) * dv_stride
    # See backward._stream_queries for the branch.
    if begin < end:
        for first in range(begin, end, BLOCK_KV):
            j = first + tl.arange(0, BLOCK_KV)
            k_tile = load_tile(k + k_offsets, j < limit, D, BLOCK_D, True)
            v_tile = load_tile(v + v_offsets, j < limit, DV, BLOCK_DV, True)
            if KEYS == "add":
                # Asked for now, and there when the products are done.
                dk_before = load_tile(dk + dk_offsets, j < len_kv, D, BLOCK_D, True)
                dv_before = load_tile(dv + dv_offsets, j < len_kv, DV, BLOCK_DV, True)
            s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
            allowed = pairs_allowed(j[None, :], key_lo[:, None], key_hi[:, None], limit, MASK)
            p = activated_scores(s, row_lse[:, None], allowed, scale, ACT, FAST_TANH, q.dtype == tl.float32, True)
            ds = score_gradient(s, p, dp, row_delta[:, None], allowed, scale, out_scale, ACT, FAST_TANH, True)
            ds = ds.to(k_tile.dtype)
            dv_tile = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
            dv_tile *= out_scale
            if KEYS == "add":
                dv_tile += dv_before.to(tl.float32)
            store_tile(dv + dv_offsets, dv_tile, j < len_kv, DV, BLOCK_DV)
            dk_tile = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
            dk_tile *= scale
            if KEYS == "add":
                dk_tile += dk_before.to(tl.float32)
            store_tile(dk + dk_offsets, dk_tile, j < len_kv, D, BLOCK_D)
            dq = tl.dot(ds, k_tile, dq, input_precision=PRECISION)
            k += k_step
            v += v_step
            dk += tl.cast(dk_stride, tl.int64) * BLOCK_KV
            dv += tl.cast(dv_stride, tl.int64) * BLOCK_KV
    return dq


@triton.jit
def _walk(
    q, do, k, v, out, lse, delta, dk, dv, table, offsets_kv, num_sequences, num_queries, total_kv,
    tile, end, first_query, do_batch, do_row, k_row, v_row, scale, out_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
    ACT: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq / scale from the key tiles ``[tile, end)`` of the table, one sequence after another.

    KEYS says what becomes of dK and dV, of which this tile of queries makes a share: it is stored (``"store"``), added
    to what is there (``"add"``), or not made (``""``). Then delta is stored, for the kernel that makes them. The rows
    of no sequence count as keys without queries.
    """
    i = first_query + tl.arange(0, BLOCK_Q)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    while tile < end:
        b = tl.load(table + 2 * tile)
        first_row = tl.load(table + 2 * tile + 1)
        start, len_kv = sequence_rows(offsets_kv, b, num_sequences, total_kv)
        limit = tl.where(b < num_sequences, len_kv, 0)
        tiles = tl.minimum(tl.cdiv(len_kv - first_row, BLOCK_KV), end - tile)
        row_ok = (i < num_queries) & (b < num_sequences)
        do_first = do + b.to(tl.int64) * do_batch
        do_tile = load_tile(
            row_pointers(do_first, first_query, do_row, BLOCK_Q, BLOCK_DV), row_ok, DV, BLOCK_DV, True
        )  # fmt: skip
        row_lse = tl.zeros([BLOCK_Q], tl.float32)
        row_delta = tl.zeros([BLOCK_Q], tl.float32)
        if ACT == "softmax":
            rows = (b.to(tl.int64) * num_queries + i) * H
            out_tile = load_tile(
                out + rows[:, None] * DV + tl.arange(0, BLOCK_DV)[None, :], row_ok, DV, BLOCK_DV, True
            )  # fmt: skip
            row_delta = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
            row_lse = tl.load(lse + rows, mask=row_ok, other=float("inf"))
            if KEYS == "":
                tl.store(delta + rows, row_delta, mask=row_ok)
        key_lo, key_hi = key_range(i, num_queries, limit, MASK)
        stop = tl.minimum(first_row + tiles * BLOCK_KV, len_kv)
        if KEYS != "":
            kv_stride: tl.constexpr = H
            dq = _stream_keys_and_values(
                dq, q, do_tile, row_lse, row_delta, k + start * k_row, v + start * v_row,
                dk + start * (kv_stride * D), dv + start * (kv_stride * DV), k_row, v_row,
                kv_stride * D, kv_stride * DV, first_row, stop, key_lo, key_hi, limit, len_kv, scale, out_scale,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, KEYS,
            )  # fmt: skip
        else:
            last = tl.minimum(stop, limit)
            main_end = first_row
            if mask_kind(MASK) == "full":
                main_end = tl.maximum(last // BLOCK_KV * BLOCK_KV, first_row)
                dq = stream_keys(
                    dq, q, do_tile, row_lse, row_delta, k + start * k_row, v + start * v_row, k_row, v_row,
                    first_row, main_end, key_lo, key_hi, limit, scale, out_scale,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, False,
                )  # fmt: skip
            dq = stream_keys(
                dq, q, do_tile, row_lse, row_delta, k + start * k_row, v + start * v_row, k_row, v_row,
                main_end, last, key_lo, key_hi, limit, scale, out_scale,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_KV, MASK, ACT, FAST_TANH, PRECISION, WIDE, True,
            )  # fmt: skip
        tile += tiles
    return dq


@triton.jit(do_not_specialize=["num_sequences", "num_queries", "total_kv", "max_tiles", "num_parts", "query_tile"])
def broadcast_q_backward(
    do, q, k, v, out, lse, delta, parts, dk, dv, table, offsets_kv,
    num_sequences, num_queries, total_kv, max_tiles, num_parts, query_tile,
    do_batch, do_row, do_head, q_row, q_head, k_row, k_head, v_row, v_head, scale, out_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK: tl.constexpr, ACTS: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program for each part of the key tile table, tile of the shared queries and head.

    With KEYS, which needs as many key heads as heads, a launch is for one tile of queries, ``query_tile``: K and V are
    streamed once for it, and dK and dV written on the way, or added to by tiles other than the first. Each of these
    additions rounds to the dtype of dK and dV.
    """
    program = tl.program_id(0)
    head = program % H
    if KEYS != "":
        first_query = query_tile * BLOCK_Q
        part = program // H
    else:
        query_tiles = tl.maximum(tl.cdiv(num_queries, BLOCK_Q), 1)
        first_query = program // H % query_tiles * BLOCK_Q
        part = program // H // query_tiles
    used = tl.cast(count_tiles(table, max_tiles), tl.int64)
    tile = (used * part // num_parts).to(tl.int32)
    end = (used * (part + 1) // num_parts).to(tl.int32)
    head64, kv_head = head.to(tl.int64), (head // GROUP).to(tl.int64)
    row_ok = first_query + tl.arange(0, BLOCK_Q) < num_queries
    q_tile = load_tile(
        row_pointers(q + head64 * q_head, first_query, q_row, BLOCK_Q, BLOCK_D), row_ok, D, BLOCK_D, True
    )  # fmt: skip
    if num_activations(ACTS) == 1:
        dq = _walk(
            q_tile, do + head64 * do_head, k + kv_head * k_head, v + kv_head * v_head,
            out + head64 * DV, lse + head64, delta + head64, dk + head64 * D, dv + head64 * DV,
            table, offsets_kv, num_sequences, num_queries, total_kv, tile, end, first_query,
            do_batch, do_row, k_row, v_row, scale, out_scale,
            H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, 0),
            FAST_TANH, PRECISION, WIDE, KEYS,
        )  # fmt: skip
    else:
        dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        which = activation_of(head, ACTS)
        for a in tl.static_range(num_activations(ACTS)):
            if which == a:
                dq = _walk(
                    q_tile, do + head64 * do_head, k + kv_head * k_head, v + kv_head * v_head,
                    out + head64 * DV, lse + head64, delta + head64, dk + head64 * D, dv + head64 * DV,
                    table, offsets_kv, num_sequences, num_queries, total_kv, tile, end, first_query,
                    do_batch, do_row, k_row, v_row, scale, out_scale,
                    H, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_KV, MASK, activation_name(ACTS, a),
                    FAST_TANH, PRECISION, WIDE, KEYS,
                )  # fmt: skip
    first = part.to(tl.int64) * num_queries + first_query
    store_tile(row_pointers(parts + head64 * D, first, H * D, BLOCK_Q, BLOCK_D), dq * scale, row_ok, D, BLOCK_D)


@triton.jit(do_not_specialize=["num_parts", "size"])
def reduce_parts(parts, dq, num_parts, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``dq[n] = sum over p of parts[p, n]``, PARTS of them at a time; always in the same order."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_parts, PARTS):
        p = first + tl.arange(0, PARTS)
        ok = (p < num_parts)[:, None] & (n < size)[None, :]
        total += tl.sum(tl.load(parts + p.to(tl.int64)[:, None] * size + n[None, :], mask=ok, other=0.0), 0)
    tl.store(dq + n, total.to(dq.dtype.element_ty), mask=n < size)
