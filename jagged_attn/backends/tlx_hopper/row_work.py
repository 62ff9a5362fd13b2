# mypy: allow-untyped-defs
"""What a query row needs before and after its dQ is summed, inside the kernel that sums it, on CTAs of their own.

Passes of their own before and after that kernel wait for memory, while the kernel itself waits for tensor cores: a
fifth of the backward's time. Here the first ``row_ctas`` CTAs *prepare* rows, in the order of a table of query tiles
that is the order of the kernel's items: they zero the sums and write the row statistics. The other CTAs take items
meanwhile, each once the rows of its sequence are prepared. Then all CTAs *finish* rows: they round the sums to which
all items of a sequence have added.

Nobody waits for what has not been taken yet, so a CTA that has not started holds nobody up, if CTAs start in the order
of their numbers. Where offsets overlap, the tables may lack tiles: who waits is let go when nothing more will come.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import first_block, receive_queries
from .._jit.jagged import partner_rows, sequence_rows
from .._jit.rings import ITEM_SLOT, bulk_groups_done, publish, ragged, ring
from .._jit.scores import LOG2E
from .._jit.tlx import tlx

# Barriers of the ring that says what has landed: the groups may be done with all their items while the load role still
# asks for the last but two.
LANDINGS = tl.constexpr(3)
# Where counts are, after the number of items that are taken: entries that are taken to be finished, roles that have
# prepared all their rows, load roles whose items have all been added; then for each sequence, and the rows of none, how
# often one of its entries was prepared; then how many of its items have been added.
_FINISHED, _ALL_PREPARED, _ALL_ADDED, _PREPARED = (tl.constexpr(4 * i) for i in range(1, 5))
NUM_COUNTS = _PREPARED.value
# Where the elements of 64 rows go, of a lane, of a warp, of a register: 16 bytes in bf16 side by side, and lanes of a
# row's 128 bytes in shared memory side by side.
_ROWS_128 = tl.constexpr(tlx.layout(shape=((8, 4, 4), (2, 4, 2, 4)), stride=((8, 128, 512), (1, 2, 64, 2048))))
_TILE_64 = tl.constexpr(tlx.layout(shape=((8, 4, 4), (2, 4, 4)), stride=((8, 64, 256), (1, 2, 1024))))
_TILE_32 = tl.constexpr(tlx.layout(shape=((4, 8, 4), (2, 4, 2)), stride=((8, 32, 256), (1, 2, 1024))))


@triton.jit
def _fence_tma():
    """What this thread has learnt of global memory holds for the TMA operations that come after it."""
    tl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@triton.jit
def _read(count):
    """A count that others add to: all warps that ask together get one answer, and see what was done before it."""
    return tl.atomic_add(count, 0, sem="acquire")


@triton.jit
def _wait_for(count, wanted, count_all, all):
    """Until a count is as large as wanted, or ``count_all`` says that it will not grow."""
    found = _read(count)
    while found < wanted:
        ended = _read(count_all)
        found = tl.where(ended >= all, wanted, _read(count))


@triton.jit
def _added(counts, num_sequences, b):
    """Where the items of sequence b are counted."""
    return counts + (_PREPARED + 1) + num_sequences + b


@triton.jit
def sums_landed(sums_done, turn):
    """A gradient group: all its additions so far are in memory, so the item before this turn's is done."""
    bulk_groups_done()
    tlx.barrier_arrive(sums_done[turn % LANDINGS], 1)


@triton.jit
def count_item(counts, num_sequences, b, turn, sums_done):
    """The load role: the item of two turns ago, of sequence ``b``, has added all it has; below 0, there was none."""
    if turn > 0:
        buf, phase = ring(turn - 1, LANDINGS)
        tlx.barrier_wait(sums_done[buf], phase)
    if b >= 0:
        tl.atomic_add(_added(counts, num_sequences, b), 1, sem="release")


@triton.jit
def count_last_items(counts, num_sequences, before, last, turn, sums_done):
    """The load role: the items of the last two turns, after which it has no more."""
    count_item(counts, num_sequences, before, turn, sums_done)
    count_item(counts, num_sequences, last, turn + 1, sums_done)
    tl.atomic_add(counts + _ALL_ADDED, 1, sem="release")


@triton.jit
def wait_for_rows(counts, b, rows, row_ctas, C: tl.constexpr):
    """The load role: until all rows of sequence b are prepared, by both groups if there are statistics."""
    ROLES: tl.constexpr = 3 if C.act == "softmax" else 1
    _wait_for(counts + _PREPARED + b, ROLES * tl.cdiv(rows, C.job_rows), counts + _ALL_PREPARED, ROLES * row_ctas)
    _fence_tma()


@triton.jit
def _entry(row_table, number, entries):
    """Sequence and first row of an entry; below 0, there is none."""
    named = number < entries
    return tl.load(row_table + 2 * number, mask=named, other=-1), tl.load(
        row_table + 2 * number + 1, mask=named, other=0
    )


@triton.jit
def _zeroed(counts, b):
    """The load role: its zeros but those of the last head are in memory; ``b`` has an entry before them, if not below 0."""
    if b >= 0:
        tl.inline_asm_elementwise("cp.async.bulk.wait_group 4; mov.b32 $0, 0;", "=r", [],
                                  dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
        # The thread that wrote the zeros, and has waited for them, may not be the one that says so.
        tlx.named_barrier_wait(11, 128)
        tl.atomic_add(counts + _PREPARED + b, 1, sem="release")


@triton.jit
def bring_rows(desc_out, desc_do, desc_sum, row_ctas, row_table, entries, counts, where, zero_tile, tiles, loads,
               C: tl.constexpr):  # fmt: skip
    """The load role of a row CTA: zeros for the sums; the output through K's and V's buffers, dO through Q's and dO's.

    An entry of ``job_rows = 2 rows`` is zeroed head by head in four parts.
    """
    _, _, offsets_q, _, num_sequences, total_q, _ = where
    q_tiles, do_tiles, kv_tiles = tiles
    q_full, _, tile_empty, _, _, _ = loads
    BYTES: tl.constexpr = 2 * C.job_rows * C.dim * tlx.size_of(tlx.dtype_of(desc_do))
    count = 0
    before = -1
    number = tl.program_id(0)
    b, first = _entry(row_table, number, entries)
    while (b >= 0) & (b < num_sequences):
        start, length = sequence_rows(offsets_q, b, num_sequences, total_q)
        for head in range(C.heads):
            if C.act == "softmax":
                buf, phase = ring(count, C.stages)
                at = ragged(start, length, first, head * C.dim)
                tlx.barrier_wait(tile_empty[buf], phase ^ 1)
                if C.stages > 2:  # noqa: SIM102 - one is decided when this is compiled
                    # Of the output there are two tiles.
                    if count >= 2:
                        last_buf, last_phase = ring(count - 2, C.stages)
                        tlx.barrier_wait(tile_empty[last_buf], last_phase)
                tlx.barrier_expect_bytes(q_full[buf], BYTES)
                tlx.async_descriptor_load(desc_out, kv_tiles[count % 2], at, q_full[buf])
                tlx.async_descriptor_load(desc_do, q_tiles[buf], at, q_full[buf])
                at = ragged(start, length, first + C.rows, head * C.dim)
                tlx.async_descriptor_load(desc_do, do_tiles[buf], at, q_full[buf])
            for half in range(2):
                for part in range(2):
                    c0, c1, c2, c3 = ragged(start, length, first + half * C.rows, head * C.dim + part * (C.dim // 2))
                    tlx.async_descriptor_store(desc_sum, zero_tile[0], [c0, c1, c2, c3])
            if head == 0:
                _zeroed(counts, before)
            if C.act == "softmax":
                count += 1
        before = b
        number += row_ctas
        b, first = _entry(row_table, number, entries)
    bulk_groups_done()
    _zeroed(counts, before)
    tl.atomic_add(counts + _ALL_PREPARED, 1, sem="release")
    return count


@triton.jit
def prepare_rows(g: tl.constexpr, row_ctas, row_table, entries, counts, where, lse, stats, inverse_out_scale, tiles,
                 loads, C: tl.constexpr):  # fmt: skip
    """A gradient group of a row CTA: the statistics of its half of each entry's rows."""
    _, _, offsets_q, _, num_sequences, total_q, _ = where
    q_tiles, do_tiles, kv_tiles = tiles
    q_full, _, tile_empty, _, _, _ = loads
    count = 0
    number = tl.program_id(0)
    b, first = _entry(row_table, number, entries)
    while (b >= 0) & (b < num_sequences):
        start, length = sequence_rows(offsets_q, b, num_sequences, total_q)
        own = first + g * C.rows
        row = own + tl.arange(0, C.rows)
        ok = row < length
        to = stats + (first_block(start, b, C.rows) + own // C.rows) * (C.heads * 2 * C.rows) + tl.arange(0, C.rows)
        row_lse = tl.load(lse + (start + row) * C.heads, mask=ok, other=float("inf"))
        for head in range(C.heads):
            # Asked for a turn ahead: it would be waited for.
            following = tl.load(
                lse + (start + row) * C.heads + (head + 1), mask=ok & (head + 1 < C.heads), other=float("inf")
            )
            buf, phase = ring(count, C.stages)
            tlx.barrier_wait(q_full[buf], phase)
            out_rows = tlx.local_slice(kv_tiles[count % 2], [g * C.rows, 0], [C.rows, C.dim])
            out_rows = tlx.local_load(out_rows, layout=_ROWS_128 if C.dim == 128 else _TILE_64)
            if g == 0:
                dout_rows = tlx.local_load(q_tiles[buf], layout=_ROWS_128 if C.dim == 128 else _TILE_64)
            else:
                dout_rows = tlx.local_load(do_tiles[buf], layout=_ROWS_128 if C.dim == 128 else _TILE_64)
            tlx.barrier_arrive(tile_empty[buf], 1)
            delta = tl.sum(dout_rows.to(tl.float32) * out_rows.to(tl.float32), 1) * inverse_out_scale
            seen = row_lse != float("-inf")
            tl.store(to + head * (2 * C.rows), tl.where(seen, row_lse * LOG2E, float("inf")), mask=ok)
            tl.store(to + head * (2 * C.rows) + C.rows, tl.where(seen, delta, 0.0), mask=ok)
            row_lse = following
            count += 1
        tlx.named_barrier_wait(9 + g, 128)
        tl.atomic_add(counts + _PREPARED + b, 1, sem="release")
        number += row_ctas
        b, first = _entry(row_table, number, entries)
    tl.atomic_add(counts + _ALL_PREPARED, 1, sem="release")
    return count


@triton.jit
def _next_job(row_table, entries, counts, where, C: tl.constexpr):
    """An entry to finish: its sequence, the sequence's first row in all, its rows, the entry's first, the items."""
    _, _, offsets_q, offsets_kv, num_sequences, total_q, total_kv = where
    b, first = _entry(row_table, tl.atomic_add(counts + _FINISHED, 1, sem="relaxed"), entries)
    sequence = tl.maximum(b, 0)
    start, length = sequence_rows(offsets_q, sequence, num_sequences, total_q)
    _, keys = partner_rows(offsets_kv, sequence, num_sequences, total_kv)
    return b, start, length, first, tl.cdiv(keys, C.keys) * (C.heads // C.group)


@triton.jit
def bring_sums(desc_sum, row_ctas, row_table, entries, counts, where, hand_out, sum_tiles, loads, turn, count,
               C: tl.constexpr):  # fmt: skip
    """The load role: hand out entries to be finished, and bring their sums through the rings of Q and dO."""
    slots, item_full, item_empty = hand_out
    left_tiles, right_tiles = sum_tiles
    q_full, _, tile_empty, _, _, _ = loads
    HALF: tl.constexpr = C.dim // 2
    b, start, length, first, items = _next_job(row_table, entries, counts, where, C)
    while b >= 0:
        numbers = (items, start.to(tl.int32), length, first, 1)
        publish(slots, item_full, item_empty, turn, numbers, ITEM_SLOT)
        turn += 1
        next_b, next_start, next_length, next_first, next_items = b, start, length, first, items
        if items > 0:
            item_ctas = tl.num_programs(0) - row_ctas
            _wait_for(_added(counts, where[4], b), items, counts + _ALL_ADDED, item_ctas)
            _fence_tma()
        for head in range(C.heads):
            if items > 0:
                for row in range(first, tl.minimum(first + C.job_rows, length), C.rows):
                    buf, phase = ring(count, C.stages)
                    tlx.barrier_wait(tile_empty[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(q_full[buf], C.rows * C.dim * 4)
                    at = ragged(start, length, row, head * C.dim)
                    tlx.async_descriptor_load(desc_sum, left_tiles[buf], at, q_full[buf])
                    at = ragged(start, length, row, head * C.dim + HALF)
                    tlx.async_descriptor_load(desc_sum, right_tiles[buf], at, q_full[buf])
                    count += 1
            if head == 0:
                # While sums are under way.
                next_b, next_start, next_length, next_first, next_items = _next_job(
                    row_table, entries, counts, where, C
                )
        b, start, length, first, items = next_b, next_start, next_length, next_first, next_items
    publish(slots, item_full, item_empty, turn, (0, 0, 0, 0, 0), ITEM_SLOT)


@triton.jit
def finish_rows(g: tl.constexpr, dq_out, factor, hand_out, sum_tiles, loads, turn, count, C: tl.constexpr):
    """A gradient group: round its half of the columns of sums to dQ, entry by entry; rows without keys get 0."""
    slots, item_full, item_empty = hand_out
    left_tiles, right_tiles = sum_tiles
    q_full, _, tile_empty, _, _, _ = loads
    HALF: tl.constexpr = C.dim // 2
    tlx.barrier_arrive(item_empty[turn % 2], 1)
    turn += 1
    items, start, length, first, more = receive_queries(slots, item_full, turn)
    while more > 0:
        tlx.barrier_arrive(item_empty[turn % 2], 1)
        turn += 1
        for head in range(C.heads):
            for tile in range(first, tl.minimum(first + C.job_rows, length), C.rows):
                row = tile + tl.arange(0, C.rows)
                column = head * C.dim + g * HALF + tl.arange(0, HALF)
                at = ((tl.cast(start, tl.int64) + row) * (C.heads * C.dim))[:, None] + column[None, :]
                ok = (row < length)[:, None]
                if items > 0:
                    buf, phase = ring(count, C.stages)
                    tlx.barrier_wait(q_full[buf], phase)
                    if g == 0:
                        total = tlx.local_load(left_tiles[buf], layout=_TILE_64 if C.dim == 128 else _TILE_32)
                    else:
                        total = tlx.local_load(right_tiles[buf], layout=_TILE_64 if C.dim == 128 else _TILE_32)
                    tlx.barrier_arrive(tile_empty[buf], 1)
                    tl.store(dq_out + at, (total * factor).to(dq_out.dtype.element_ty), mask=ok)
                    count += 1
                else:
                    tl.store(dq_out + at, tl.zeros([C.rows, HALF], dq_out.dtype.element_ty), mask=ok)
        items, start, length, first, more = receive_queries(slots, item_full, turn)
