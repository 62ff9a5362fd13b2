# mypy: allow-untyped-defs
"""dQ from its fp32 sums, inside the backward kernel that adds them up.

Passes of their own, before that kernel to zero the sums and after it to round them, wait for memory, while the kernel
itself leaves memory idle. With ``C.jobs`` the CTA that adds the last share to the rows of a sequence and key head has
them rounded: the load role counts the items that are left of each, and hands those rows as a *job* to a role that does
nothing else. With ``C.ahead`` each item also zeroes a share of the sums of the sequence that comes next in the table.
No item waits for one that was taken after it, so none waits for a CTA that is not running.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import prepare_backward, rows_of_block
from .._jit.jagged import partner_rows, sequence_rows
from .._jit.rings import bulk_groups_done, open_slot, publish, ragged, ring
from .._jit.tlx import tlx

# Numbers of a job, and what the two slots of a CTA take.
JOB_SLOT = tl.constexpr(4)
CTA_JOB_SLOTS = 2 * JOB_SLOT.value
# Barriers of the ring that says what has landed: the groups may be done with all their items while the load role still
# asks for the last but two.
LANDINGS = tl.constexpr(3)
# Sums that are rounded at once, half of the columns of some rows: as many as fit the registers of two warps.
_PIECE = 512
# Where a piece's elements go, of a lane, of a warp, of a register: 16 bytes of a row of dQ a thread.
_PIECE_64 = tl.constexpr(tlx.layout(shape=((8, 4, 2), (2, 4)), stride=((8, 64, 256), (1, 2))))
_PIECE_32 = tl.constexpr(tlx.layout(shape=((4, 8, 2), (2, 4)), stride=((8, 32, 256), (1, 2))))


def piece_rows(head_dim: int) -> int:
    """Rows of a piece."""
    return _PIECE // (head_dim // 2)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv"])
def prepare_sums(dout, out, lse, stats, dq_sum, counters, dq_out, left, ready, table, offsets_q, offsets_kv,
                 num_sequences, total_q, total_kv, dout_row, inverse_out_scale, H: tl.constexpr, D: tl.constexpr,
                 BM: tl.constexpr, SOFTMAX: tl.constexpr, COUNTERS: tl.constexpr, KV_HEADS: tl.constexpr,
                 BN: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """``prepare_backward``, and what the sums of dQ need.

    Rows of sequences without keys, and of no sequence, get their dQ, which is zero. The others' sums are zeroed: with
    AHEAD those of the table's first sequence alone. ``left [B + 1, KV_HEADS]`` gets the number of key tiles of each
    sequence, and of the rows of none; ``ready``, of the same shape, how many rows have been zeroed.
    """
    prepare_backward(dout, out, lse, stats, dq_sum, counters, offsets_q, num_sequences, total_q, dout_row,
                     inverse_out_scale, H, D, BM, SOFTMAX, False, COUNTERS)  # fmt: skip
    first = tl.load(table)
    number = tl.program_id(0)
    if number < (num_sequences + 1) * KV_HEADS:
        b = number // KV_HEADS
        _, queries = partner_rows(offsets_q, b, num_sequences, total_q)
        _, keys = sequence_rows(offsets_kv, b, num_sequences, total_kv)
        tl.store(left + number, (keys + BN - 1) // BN)
        tl.store(ready + number, tl.where(b == first, queries, 0))
    b, rows, row_ok = rows_of_block(number // H, offsets_q, num_sequences, total_q, BM)
    _, keys = partner_rows(offsets_kv, tl.minimum(b, num_sequences - 1), num_sequences, total_kv)
    where = ((rows * H + number % H) * D)[:, None] + tl.arange(0, D)[None, :]
    summed = (b < num_sequences) & (keys > 0)
    never = (b >= num_sequences) | (keys <= 0)
    if AHEAD:
        summed = summed & (b == first)
    tl.store(dq_sum + where, tl.zeros([BM, D], tl.float32), mask=row_ok[:, None] & summed)
    tl.store(dq_out + where, tl.zeros([BM, D], dq_out.dtype.element_ty), mask=row_ok[:, None] & never)


@triton.jit
def sums_landed(sums_done, turn):
    """A gradient group: all its additions so far are in memory, so the item before this turn's is done."""
    bulk_groups_done()
    tlx.barrier_arrive(sums_done[turn % LANDINGS], 1)


@triton.jit
def count_down(left, item, turn, sums_done, job_slots, job_full, job_empty, jobs, KV_HEADS: tl.constexpr):
    """The load role: hand out the job that is due with the end of ``item``, if one is, two turns after it.

    Args:
        item: where its count is in ``left``, start and rows of its queries; below 0, there was none.
        jobs: how many this CTA has handed out.

    Returns:
        ``jobs`` after it.
    """
    if turn > 0:
        buf, phase = ring(turn - 1, LANDINGS)
        tlx.barrier_wait(sums_done[buf], phase)
    where, start, rows = item
    still = 0
    if (where >= 0) & (rows > 0):
        still = tl.atomic_add(left + where, -1)
    if still == 1:
        publish(job_slots, job_full, job_empty, jobs, (start, rows, where % KV_HEADS), JOB_SLOT)
        jobs += 1
    return jobs


@triton.jit
def _fence_tma():
    """What this thread has learnt of global memory holds for the TMA operations that come after it."""
    tl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@triton.jit
def _receive_job(job_slots, job_full, turn):
    slot = open_slot(job_slots, job_full, turn, JOB_SLOT)
    _fence_tma()
    return tl.load(slot, volatile=True), tl.load(slot + 1, volatile=True), tl.load(slot + 2, volatile=True)


@triton.jit
def _piece_of(i, rows, kv_head, C: tl.constexpr):
    """First row and first column of a job's ``i``-th piece."""
    HALF: tl.constexpr = C.dim // 2
    down = tl.cdiv(rows, C.piece_rows)
    across = i // down
    return i % down * C.piece_rows, kv_head * (C.group * C.dim) + across * HALF


@triton.jit
def finish_jobs(desc_piece, dq_out, factor, job_slots, job_full, job_empty, pieces, C: tl.constexpr):
    """The role: round the rows of one job after the other, until one has none; pieces come by TMA, stages ahead."""
    tiles, full, empty = pieces
    HALF: tl.constexpr = C.dim // 2
    turn = 0
    count = 0
    start, rows, kv_head = _receive_job(job_slots, job_full, turn)
    while rows > 0:
        total = tl.cdiv(rows, C.piece_rows) * (2 * C.group)
        for i in range(total + C.pieces):
            if i >= C.pieces:
                buf, phase = ring(count + i - C.pieces, C.pieces)
                first, column = _piece_of(i - C.pieces, rows, kv_head, C)
                tlx.barrier_wait(full[buf], phase)
                x = tlx.local_load(tiles[buf], layout=_PIECE_64 if C.dim == 128 else _PIECE_32)
                tlx.barrier_arrive(empty[buf], 1)
                row = first + tl.arange(0, C.piece_rows)
                at = (tl.cast(start, tl.int64) + row)[:, None] * (C.heads * C.dim) + tl.arange(0, HALF)[None, :]
                tl.store(dq_out + column + at, (x * factor).to(dq_out.dtype.element_ty), mask=(row < rows)[:, None])
            if i < total:
                buf, phase = ring(count + i, C.pieces)
                first, column = _piece_of(i, rows, kv_head, C)
                tlx.barrier_wait(empty[buf], phase ^ 1)
                tlx.barrier_expect_bytes(full[buf], C.piece_rows * HALF * 4)
                tlx.async_descriptor_load(desc_piece, tiles[buf], ragged(start, rows, first, column), full[buf])
        count += total
        tlx.barrier_arrive(job_empty[turn % 2], 1)
        turn += 1
        start, rows, kv_head = _receive_job(job_slots, job_full, turn)


@triton.jit
def zero_next(desc_sum, zero_tile, number, item, where, C: tl.constexpr):
    """The load role: begin to zero this item's share of the sums of the next sequence in the table.

    Returns:
        Where that sequence's rows are counted, and how many these are.
    """
    items, table, offsets_q, _, num_sequences, total_q, _ = where
    kv_head, len_kv, first_key = item[0], item[6], item[7]
    KV_HEADS: tl.constexpr = C.heads // C.group
    tiles = tl.maximum(tl.cdiv(len_kv, C.keys), 1)
    tile = first_key // C.keys
    entry = number // KV_HEADS + tiles - tile
    b = tl.load(table + 2 * entry, mask=(number < items) & (entry * KV_HEADS < items), other=-1)
    start, rows = partner_rows(offsets_q, tl.maximum(b, 0), num_sequences, total_q)
    rows = tl.where(b < 0, 0, rows)
    share = tl.cdiv(tl.cdiv(rows, C.rows), tiles) * C.rows
    begin = tl.minimum(tile * share, rows)
    end = tl.minimum(begin + share, rows)
    for row in range(begin, end, C.rows):
        for half in range(2 * C.group):
            c0, c1, c2, c3 = ragged(start, end, row, kv_head * (C.group * C.dim) + half * (C.dim // 2))
            tlx.async_descriptor_store(desc_sum, zero_tile[0], [c0, c1, c2, c3])
    return tl.maximum(b, 0) * KV_HEADS + kv_head, end - begin


@triton.jit
def zeroed(ready, share):
    """The load role: those rows are zero, and all may know."""
    where, rows = share
    bulk_groups_done()
    # The thread that wrote the zeros, and has waited for them, may not be the one that says so.
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    if rows > 0:
        tl.atomic_add(ready + where, rows, sem="release")


@triton.jit
def wait_for_zeros(ready, where, rows):
    """The load role: until all rows of a sequence and key head are zero."""
    while tl.load(ready + where, volatile=True) < rows:
        pass
    tlx.fence("gpu")
    _fence_tma()
