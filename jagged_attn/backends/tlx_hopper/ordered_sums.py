# mypy: allow-untyped-defs
"""dQ summed up by key tiles that come in an order: the first of a sequence stores, the last one rounds.

Sums that all key tiles add to must be zeroed before and rounded after: two passes that wait for memory while tensor
cores idle. Here the first key tile of a sequence and key head *stores* its share; those in the middle add theirs, in
any order, once that has landed; the last one, once all others have landed, starts its products from the sums and
stores dQ itself. Items come in such an order that their turn has usually come when they are taken (``schedule``): no
item waits for one that was taken after it, so none waits for a CTA that is not running.
"""

import triton
import triton.language as tl

from .._jit.backward_rows import entry_of, prepare_backward, rows_of_block
from .._jit.jagged import partner_rows
from .._jit.rings import bulk_groups_done, ring
from .._jit.tlx import tlx

# What an item does with the sums; and that its predecessor in the CTA has to land before it can begin.
FIRST = tl.constexpr(1)
LAST = tl.constexpr(2)
AT_ONCE = tl.constexpr(4)
# Barriers of the ring that says what has landed.
LANDINGS = tl.constexpr(2)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv"])
def prepare_ordered(dout, out, lse, stats, dq_sum, counters, dq_out, done, offsets_q, offsets_kv, num_sequences,
                    total_q, total_kv, dout_row, inverse_out_scale, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
                    SOFTMAX: tl.constexpr, COUNTERS: tl.constexpr, KV_HEADS: tl.constexpr,
                    BN: tl.constexpr):  # fmt: skip
    """``prepare_backward`` without its zeros, but for those that no key tile makes.

    Rows of sequences without keys, and of no sequence, get their dQ, which is zero; the sums of sequences with a single
    key tile, which is a last one, are zeroed. ``done [B + 1, KV_HEADS]`` is zeroed.
    """
    prepare_backward(dout, out, lse, stats, dq_sum, counters, offsets_q, num_sequences, total_q, dout_row,
                     inverse_out_scale, H, D, BM, SOFTMAX, False, COUNTERS)  # fmt: skip
    number = tl.program_id(0)
    if number < (num_sequences + 1) * KV_HEADS:
        tl.store(done + number, 0)
    b, rows, row_ok = rows_of_block(number // H, offsets_q, num_sequences, total_q, BM)
    _, keys = partner_rows(offsets_kv, tl.minimum(b, num_sequences - 1), num_sequences, total_kv)
    is_summed = (b < num_sequences) & (keys > 0)
    where = ((rows * H + number % H) * D)[:, None] + tl.arange(0, D)[None, :]
    if is_summed & (keys <= BN):
        tl.store(dq_sum + where, tl.zeros([BM, D], tl.float32), mask=row_ok[:, None])
    if (b >= num_sequences) | (keys <= 0):
        tl.store(dq_out + where, tl.zeros([BM, D], dq_out.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def part_of(number, item, where, done, KV_HEADS: tl.constexpr, BN: tl.constexpr):
    """The load role: what an item does with the sums.

    Returns:
        Where the key tiles of its sequence and key head are counted that have landed; how many of them it needs; what
        it does, ``AT_ONCE`` with it unless they have landed by now.
    """
    kv_head, _, len_q, _, _, _, len_kv, first_key, _ = item
    b, _ = entry_of(where[1], tl.minimum(number, where[0] - 1), KV_HEADS)
    at = tl.maximum(b, 0) * KV_HEADS + kv_head
    tiles = (len_kv + BN - 1) // BN
    is_last = first_key + BN >= len_kv
    is_first = (first_key == 0) & (tiles > 1)
    needs = tl.where(is_last, tiles - 1, 1)
    needs = tl.where(is_first | (len_q <= 0) | (b < 0), 0, needs)
    kind = tl.where(is_last, 2, tl.where(is_first, 1, 0))
    has = _read(done + at)
    return at, needs, kind + tl.where(has < needs, 4, 0)


@triton.jit
def _read(place):
    """A count, the same for all threads of the role, which a load of each would not be, as others add to it.

    What has been counted holds for all that is done from now on, by TMA too.
    """
    count = tl.atomic_add(place, 0, sem="acquire")
    tl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
                              pack=1)  # fmt: skip
    return count


@triton.jit
def wait_for_parts(place, needs):
    """The load role: until that many key tiles have landed."""
    while _read(place) < needs:
        pass


@triton.jit
def sums_landed(sums_done, turn):
    """A gradient group: all that it has sent for the item of this turn is in memory."""
    bulk_groups_done()
    # To be tried on an H200: without these, dQ was off (docs/performance-log.md).
    tl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
                              pack=1)  # fmt: skip
    tlx.fence("gpu")
    tlx.barrier_arrive(sums_done[turn % LANDINGS], 1)


@triton.jit
def say_landed(done, at, turn, sums_done):
    """The load role: count the item of this turn, unless ``at`` is below 0, once all that it has sent has landed.

    Returns:
        -1, as nothing is left to say.
    """
    if at >= 0:
        buf, phase = ring(turn, LANDINGS)
        tlx.barrier_wait(sums_done[buf], phase)
        tl.atomic_add(done + at, 1, sem="release")
    return at * 0 - 1
