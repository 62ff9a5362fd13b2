# mypy: allow-untyped-defs
"""The forward kernel of self, cross and broadcast-Q attention.

One persistent CTA, or a pair, holds tiles of 128 queries in shared memory, streams the keys and
values of their sequence past them, and keeps scores S, weights P and output O in tensor memory. It
works on two streams at once: two tiles of queries or, with one, its even and its odd key blocks.
While the tensor cores multiply for one stream, a warp group of its own computes the other's
weights; a third group rescales outputs and writes them.

Keys are taken from the end of what the tile sees, so that the block that the end of the sequence
cuts comes first. A stream's next scores, of this item or the next, are issued as soon as its group
has read the last ones.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda.inline_ptx_lib import _fma_f32x2

from .._jit.forward_items import find_tile, unmasked_blocks, write_empty
from .._jit.rings import ITEM_SLOT, publish, ragged, read_item, ring
from .._jit.scores import LN2, LOG2E, activate_product, key_range, mask_opens, pairs_allowed
from .._jit.tlx import tlx
from .pairs import arrive

# Rows of a tile: the lanes of tensor memory.
_ROWS = tl.constexpr(128)
# Columns of output that are rescaled or written at a time, for want of registers.
_CHUNK = tl.constexpr(32)


@triton.jit
def _receive(hand_out, turn, C: tl.constexpr):
    """The item that the load role published at this turn."""
    slots, item_full, item_empty = hand_out
    item = read_item(slots, item_full, turn)
    arrive(item_empty[turn % 2], C)
    return item


@triton.jit
def _steps(item, C: tl.constexpr):
    """Blocks of the two streams of an item; the first has as many as the second or more."""
    if C.split:
        return (item[7] + 1) // 2, item[7] // 2
    else:
        return item[7], tl.where(item[3] + C.ctas * _ROWS < item[2], item[7], 0)


@triton.jit
def _block(g: tl.constexpr, step, C: tl.constexpr):
    """Which block of an item a stream takes at this step, from the end of the keys."""
    return 2 * step + g if C.split else step


@triton.jit
def _first_row(g: tl.constexpr, item, rank, C: tl.constexpr):
    """The first query row of this CTA's tile of a stream."""
    return item[3] + (C.ctas * (g % C.q_tiles) + rank) * _ROWS


@triton.jit
def _take(turn, hand_out, where, counters, columns, rank, C: tl.constexpr):
    """The item of this turn; the first CTA of a pair looks it up and hands it to all roles.

    A cluster keeps to one column of items: with broadcast-Q to one tile of queries, as long as
    there are clusters for all, so that the tile stays where it is.
    """
    slots, item_full, item_empty = hand_out
    if rank == 0:
        lanes = tl.num_programs(0) // C.ctas // columns
        lane = tl.program_id(0) // C.ctas // columns
        column = tl.program_id(0) // C.ctas % columns
        place = lane
        if C.deal == "alternate":
            place = turn * lanes + tl.where(turn % 2 == 1, lanes - 1 - lane, lane)
        elif turn > 0:
            place = lanes + tl.atomic_add(counters + column, 1)
        number = place * columns + column
        item = find_tile(number, where, C.heads, C.block_kv, C.block_q, C.mask, C.broadcast_q)
        publish(slots, item_full, item_empty, turn, item, ITEM_SLOT)
        if C.two_ctas:
            # An arrival in the other CTA does not wait for stores to reach the memory of both.
            tlx.fence("gpu")
            tlx.barrier_arrive(item_full[turn % 2], 1, remote_cta_rank=1)
    else:
        item = _receive(hand_out, turn, C)
    return item


@triton.jit
def load(desc_q, desc_k, desc_v, where, counters, columns, rank, hand_out, tiles, loads,
         C: tl.constexpr):  # fmt: skip
    """Hand out the items, one ahead, and bring Q, K and V of each into shared memory.

    Of a pair of CTAs, each loads its own queries, half of the rows of K and half of the columns of
    V; all bytes arrive at the barriers of the first.
    """
    q_tiles, k_tiles, v_tiles = tiles[0], tiles[1], tiles[2]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = loads
    BN: tl.constexpr = C.block_kv
    BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    FULL: tl.constexpr = C.k_stages if C.k_stages < C.v_stages else C.v_stages
    count = 0
    turn = 0
    q_loads = 0
    held = rank * 0 - 1
    item = _take(turn, hand_out, where, counters, columns, rank, C)
    while item[7] > 0:
        head, start_out, len_q, first_row, start_kv, len_kv, lo, blocks = item
        for i in range(blocks):
            key = lo + (blocks - 1 - i) * BN
            column = head // C.group * C.dim
            at = ragged(start_kv, len_kv, key + rank * (BN // C.ctas), column)
            buf, phase = ring(count, C.k_stages)
            tlx.barrier_wait(k_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[buf], BN * BYTES, pred=rank == 0)
            tlx.async_descriptor_load(desc_k, k_tiles[buf], at, k_full[buf], two_ctas=C.two_ctas)
            tile = first_row * C.heads + head
            if i == 0 and (not C.broadcast_q or tile != held):
                held = tile
                tlx.barrier_wait(q_empty[0], (q_loads & 1) ^ 1)
                q_loads += 1
                tlx.barrier_expect_bytes(q_full[0], C.block_q * BYTES, pred=rank == 0)
                start_q = start_out * (0 if C.broadcast_q else 1)
                for g in tl.static_range(C.q_tiles):
                    at = ragged(start_q, len_q, _first_row(g, item, rank, C), head * C.dim)
                    tlx.async_descriptor_load(
                        desc_q, q_tiles[g], at, q_full[0], two_ctas=C.two_ctas
                    )  # fmt: skip
            at = ragged(start_kv, len_kv, key, column + rank * (C.dim // C.ctas))
            buf, phase = ring(count, C.v_stages)
            tlx.barrier_wait(v_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(v_full[buf], BN * BYTES, pred=rank == 0)
            tlx.async_descriptor_load(desc_v, v_tiles[buf], at, v_full[buf], two_ctas=C.two_ctas)
            count += 1
            # When the rings are full: the look-up takes as long as several blocks.
            if i == tl.minimum(blocks, FULL) - 1:
                turn += 1
                item = _take(turn, hand_out, where, counters, columns, rank, C)


@triton.jit
def _issue_scores(g: tl.constexpr, step, steps, only, first_block, uses, tiles, loads, streams,
                  C: tl.constexpr):  # fmt: skip
    """The scores of one step of a stream, if it has the step."""
    q_tiles, k_tiles, s_tiles = tiles[0], tiles[1], tiles[3]
    k_full, k_empty, s_full, s_empty = loads[2], loads[3], streams[0], streams[1]
    if step < steps:
        buf, phase = ring(first_block + _block(g, step, C), C.k_stages)
        if g == 0 or C.split:
            tlx.barrier_wait(k_full[buf], phase)
        if not C.p_over_s:
            tlx.barrier_wait(s_empty[g], (uses & 1) ^ 1)
        tlx.async_dot(
            q_tiles[g % C.q_tiles], tlx.local_trans(k_tiles[buf]), s_tiles[g], use_acc=False,
            mBarriers=[s_full[g]], two_ctas=C.two_ctas,
        )  # fmt: skip
        # The last stream to use a block gives it back.
        if C.split or g == 1 or only:
            tlx.tcgen05_commit(k_empty[buf], two_ctas=C.two_ctas)


@triton.jit
def _issue_output(g: tl.constexpr, step, steps, only, first_block, uses, items, tiles, loads,
                  streams, C: tl.constexpr):  # fmt: skip
    """The product of one step's weights and values, if the stream has the step."""
    v_tiles, p_tiles, o_tiles = tiles[2], tiles[4], tiles[5]
    v_full, v_empty = loads[4], loads[5]
    _, _, p_full, p_empty, o_ready, o_full = streams
    if step < steps:
        buf, phase = ring(first_block + _block(g, step, C), C.v_stages)
        if g == 0 or C.split:
            tlx.barrier_wait(v_full[buf], phase)
        if C.softmax or step == 0:
            tlx.barrier_wait(o_ready[g], ((uses if C.softmax else items) & 1) ^ 1)
        tlx.barrier_wait(p_full[g], uses & 1)
        tlx.async_dot(
            p_tiles[2 * g if C.p_over_s else g], v_tiles[buf], o_tiles[g], use_acc=step > 0,
            mBarriers=[p_empty[g]], two_ctas=C.two_ctas,
        )  # fmt: skip
        if C.split or g == 1 or only:
            tlx.tcgen05_commit(v_empty[buf], two_ctas=C.two_ctas)
        if step + 1 == steps:
            tlx.tcgen05_commit(o_full[g], two_ctas=C.two_ctas)


@triton.jit
def mma(hand_out, tiles, loads, streams, C: tl.constexpr):
    """Issue all products, those of one stream between the other's scores and their weights.

    The loop issues the scores of the step after, or of the next item: hence the item one ahead.
    """
    q_full, q_empty = loads[0], loads[1]
    # Blocks, items and query tiles so far; steps of each stream, and items of the second.
    count = 0
    turn = 0
    q_loads = 0
    uses_0 = 0
    uses_1 = 0
    items_1 = 0
    item = _receive(hand_out, turn, C)
    head, first_row, blocks = item[0], item[3], item[7]
    steps_0, steps_1 = _steps(item, C)
    if blocks > 0:
        tlx.barrier_wait(q_full[0], 0)
    for g in tl.static_range(2):
        steps = steps_0 if g == 0 else steps_1
        _issue_scores(g, 0, steps, steps_1 == 0, 0, 0, tiles, loads, streams, C)
    if not C.broadcast_q and steps_0 == 1:
        tlx.tcgen05_commit(q_empty[0], two_ctas=C.two_ctas)
    while blocks > 0:
        turn += 1
        item = _receive(hand_out, turn, C)
        next_0, next_1 = _steps(item, C)
        fresh = item[7] > 0
        if C.broadcast_q:
            fresh = fresh & ((item[0] != head) | (item[3] != first_row))
        for i in range(steps_0):
            last = i + 1 == steps_0
            if last and fresh:
                q_loads += 1
                if C.broadcast_q:
                    tlx.tcgen05_commit(q_empty[0], two_ctas=C.two_ctas)
                tlx.barrier_wait(q_full[0], q_loads & 1)
            step = tl.where(last, 0, i + 1)
            for g in tl.static_range(2):
                steps = steps_0 if g == 0 else steps_1
                uses = uses_0 if g == 0 else uses_1
                items = turn - 1 if g == 0 else items_1
                following = tl.where(last, next_0 if g == 0 else next_1, steps)
                for turn_of_p in tl.static_range(2):
                    # Weights that lie over their scores leave before the next scores come.
                    if turn_of_p == C.p_over_s:
                        _issue_scores(
                            g, step, following, tl.where(last, next_1, steps_1) == 0,
                            tl.where(last, count + blocks, count),
                            uses + tl.where(last, steps, i + 1), tiles, loads, streams, C,
                        )  # fmt: skip
                        all_steps = tl.where(last, next_0, steps_0)
                        if g == 1 and not C.broadcast_q and step + 1 == all_steps:
                            tlx.tcgen05_commit(q_empty[0], two_ctas=C.two_ctas)
                    else:
                        _issue_output(
                            g, i, steps, steps_1 == 0, count, uses + i, items,
                            tiles, loads, streams, C,
                        )  # fmt: skip
        count += blocks
        uses_0 += steps_0
        uses_1 += steps_1
        items_1 += tl.where(steps_1 > 0, 1, 0)
        head, first_row, blocks, steps_0, steps_1 = item[0], item[3], item[7], next_0, next_1


@triton.jit
def _fma(a, b, c, C: tl.constexpr):
    """``a b + c``, two numbers with one instruction if packed."""
    return _fma_f32x2(a, b, c) if C.packed else a * b + c


@triton.jit
def _polynomial_exp2(x, C: tl.constexpr):
    """``2**x`` without the exponential unit, for x below 128, to a relative error of 1e-4.

    Adding 1.5 * 2**23 leaves the integer nearest to x in the low bits, which go to the exponent; a
    cubic takes the rest.
    """
    x = tl.maximum(x, -126.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    y = _fma(_fma(f, 0.0550089166, 0.2422109563, C), f, 0.6932829261, C)
    bits = _fma(y, f, 1.0, C).to(tl.int32, bitcast=True)
    return (bits + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x):
    """The columns of ``x`` in two parts, without moving a number to another thread."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@triton.jit
def _finite(m):
    """The maximum, or 0 for a row without a key: -inf - -inf is no number."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _weigh(g: tl.constexpr, m, l, step, uses, passed, scale, first_key, lo_rows,  # noqa: E741
           hi_rows, len_kv, tiles, streams, factors, C: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Turn the scores of a block into weights; returns the rows' new maxima m and sums l."""
    s_tiles, p_tiles, a_tiles = tiles
    s_full, s_empty, p_full, p_empty, _, _ = streams
    a_full, a_empty = factors
    QUARTER: tl.constexpr = C.block_kv // 4
    p_tile = p_tiles[2 * g if C.p_over_s else g]
    tlx.barrier_wait(s_full[g], uses & 1)
    s = tlx.local_load(s_tiles[g])
    if not C.p_over_s:
        arrive(s_empty[g], C)
    if C.softmax:
        if MASKED:
            keys = first_key + tl.arange(0, C.block_kv)[None, :]
            allowed = pairs_allowed(keys, lo_rows[:, None], hi_rows[:, None], len_kv, C.mask)
            s = tl.where(allowed, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        if C.threshold > 0:
            # Weights may grow to 2**threshold before the sums are rescaled.
            m_new = tl.where(m_new - m > C.threshold, m_new, m)
        base = _finite(m_new) if MASKED else m_new
        alpha = tl.math.exp2(m - base)
        if step > 0:
            tlx.barrier_wait(a_empty[g], (passed & 1) ^ 1)
            tlx.local_store(a_tiles[g], alpha)
            tlx.barrier_arrive(a_full[g], 1)
        s = _fma(s, scale, -base[:, None], C)
        m = m_new
        l = l * alpha  # noqa: E741
    if not C.p_over_s:
        tlx.barrier_wait(p_empty[g], (uses & 1) ^ 1)
    low, high = _halves(s)
    parts = _halves(low) + _halves(high)
    for k in tl.static_range(4):
        # One quarter leaves before the next, or the registers would not do; the polynomial, which
        # needs the most of them, is the last.
        if not C.softmax:
            p = activate_product(parts[k], scale, C.activation, True)
            if MASKED:
                keys = first_key + k * QUARTER + tl.arange(0, QUARTER)[None, :]
                allowed = pairs_allowed(keys, lo_rows[:, None], hi_rows[:, None], len_kv, C.mask)
                p = tl.where(allowed, p, 0.0)
        elif k >= 4 - C.polynomial and not MASKED:
            p = _polynomial_exp2(parts[k], C)
        else:
            p = tl.math.exp2(parts[k])
        if C.softmax:
            l += tl.sum(p, 1)  # noqa: E741
        tlx.local_store(tlx.subslice(p_tile, k * QUARTER, QUARTER), p.to(p_tile.dtype))
    arrive(p_full[g], C)
    return m, l


@triton.jit
def activate(g: tl.constexpr, out, lse, where, scale, rank, hand_out, tiles, streams, factors,
             C: tl.constexpr):  # fmt: skip
    """Weights of one stream: softmax, with the rows' maxima and sums, or another activation."""
    a_tiles = tiles[2]
    a_full, a_empty = factors
    PARTS: tl.constexpr = 2 if mask_opens(C.mask, 0) else 3
    if C.softmax:
        scale = scale * LOG2E
    # Steps so far, and vectors passed on.
    uses = 0
    passed = 0
    turn = 0
    item = _receive(hand_out, turn, C)
    while item[7] > 0:
        _, _, len_q, first_row, _, len_kv, lo, blocks = item
        rows = _first_row(g, item, rank, C) + tl.arange(0, _ROWS)
        lo_rows, hi_rows = key_range(rows, len_q, len_kv, C.mask)
        m = tl.zeros((_ROWS,), tl.float32) - float("inf")
        l = tl.zeros((_ROWS,), tl.float32)  # noqa: E741
        steps_0, steps_1 = _steps(item, C)
        steps = steps_0 if g == 0 else steps_1
        begin, end = unmasked_blocks(
            first_row, len_q, len_kv, lo, blocks, C.block_kv, C.block_q, C.mask
        )  # fmt: skip
        # Steps before the blocks that need no mask, and before those at the low end, which do.
        cut = (blocks - end + 1 - g) // 2 if C.split else blocks - end
        low = steps if PARTS == 2 else blocks - begin
        ends = (0, tl.minimum(cut, steps), tl.minimum(low, steps), steps)
        for part in tl.static_range(PARTS):
            for i in range(ends[part], ends[part + 1]):
                key = lo + (blocks - 1 - _block(g, i, C)) * C.block_kv
                m, l = _weigh(  # noqa: E741
                    g, m, l, i, uses + i, passed + i - 1, scale, key, lo_rows, hi_rows,
                    len_kv, tiles, streams, factors, C, part != 1,
                )  # fmt: skip
        uses += steps
        passed += steps
        if C.softmax and steps > 0:
            tlx.barrier_wait(a_empty[g], passed & 1)
            tlx.local_store(a_tiles[g], l)
            tlx.barrier_arrive(a_full[g], 1)
            tlx.barrier_wait(a_empty[g], (passed & 1) ^ 1)
            tlx.local_store(a_tiles[g], m)
            tlx.barrier_arrive(a_full[g], 1)
            passed += 1
        turn += 1
        item = _receive(hand_out, turn, C)
    if C.broadcast_q:
        write_empty(out, lse, where, g, C.heads, C.dim, 2, _ROWS, C.softmax)


@triton.jit
def _rescale(g: tl.constexpr, step, steps, passed, uses, o_tiles, a_tiles, streams, factors,
             C: tl.constexpr):  # fmt: skip
    """Bring a stream's output so far to the scale of this step's weights, if it has the step."""
    p_empty, o_ready = streams[3], streams[4]
    a_full, a_empty = factors
    if step < steps:
        tlx.barrier_wait(a_full[g], passed & 1)
        alpha = tlx.local_load(a_tiles[g])
        tlx.barrier_arrive(a_empty[g], 1)
        tlx.barrier_wait(p_empty[g], (uses - 1) & 1)
        if C.threshold == 0 or tl.min(alpha, 0) < 1.0:
            for k in tl.static_range(C.dim // _CHUNK):
                part = tlx.subslice(o_tiles[g], k * _CHUNK, _CHUNK)
                tlx.local_store(part, tlx.local_load(part) * alpha[:, None])
        arrive(o_ready[g], C)


@triton.jit
def _sums(g: tl.constexpr, passed, a_tiles, factors):
    """Maxima and sums of a stream's rows at its end; ``passed`` vectors came before."""
    a_full, a_empty = factors
    tlx.barrier_wait(a_full[g], passed & 1)
    l = tlx.local_load(a_tiles[g])  # noqa: E741
    tlx.barrier_arrive(a_empty[g], 1)
    tlx.barrier_wait(a_full[g], (passed & 1) ^ 1)
    m = tlx.local_load(a_tiles[g])
    tlx.barrier_arrive(a_empty[g], 1)
    return m, l


@triton.jit
def _stage(g: tl.constexpr, weight, other, both, stored, o_tiles, staged, o_ready, writes,
           C: tl.constexpr):  # fmt: skip
    """Stage a tile of output, the sum of the streams' parts if both, and free the columns."""
    st_full, st_empty = writes
    buf, phase = ring(stored, C.o_stages)
    tlx.barrier_wait(st_empty[buf], phase ^ 1)
    for k in tl.static_range(C.dim // _CHUNK):
        part = tlx.local_load(tlx.subslice(o_tiles[g], k * _CHUNK, _CHUNK)) * weight[:, None]
        if both:
            part += tlx.local_load(tlx.subslice(o_tiles[1], k * _CHUNK, _CHUNK)) * other[:, None]
        chunk = tlx.local_slice(staged[buf], [0, k * _CHUNK], [_ROWS, _CHUNK])
        tlx.local_store(chunk, part.to(staged.dtype))
    arrive(o_ready[g], C)
    if both:
        arrive(o_ready[1], C)
    tlx.fence("async_shared")
    tlx.barrier_arrive(st_full[buf], 1)


@triton.jit
def correct(lse, rank, out_scale, hand_out, tiles, streams, factors, writes, C: tl.constexpr):
    """Rescale outputs as the rows' maxima grow; at an item's end, output and log-sum-exp."""
    o_tiles, a_tiles, staged = tiles
    o_ready, o_full = streams[4], streams[5]
    uses_0 = 0
    uses_1 = 0
    items_1 = 0
    turn = 0
    stored = 0
    item = _receive(hand_out, turn, C)
    while item[7] > 0:
        steps_0, steps_1 = _steps(item, C)
        both = C.split and steps_1 > 0
        if C.softmax:
            for i in range(1, steps_0):
                _rescale(0, i, steps_0, uses_0 + turn + i - 1, uses_0 + i,
                         o_tiles, a_tiles, streams, factors, C)  # fmt: skip
                _rescale(1, i, steps_1, uses_1 + items_1 + i - 1, uses_1 + i,
                         o_tiles, a_tiles, streams, factors, C)  # fmt: skip
        uses_0 += steps_0
        uses_1 += steps_1
        for g in tl.static_range(C.q_tiles):
            if g == 0 or steps_1 > 0:
                weight = tl.zeros((_ROWS,), tl.float32) + out_scale
                other = weight
                if C.softmax:
                    passed = uses_0 + turn - 1 if g == 0 else uses_1 + items_1 - 1
                    m, l = _sums(g, passed, a_tiles, factors)  # noqa: E741
                    if both:
                        m_1, l_1 = _sums(1, uses_1 + items_1 - 1, a_tiles, factors)
                        top = tl.maximum(m, m_1)
                        weight *= tl.math.exp2(m - _finite(top))
                        other *= tl.math.exp2(m_1 - _finite(top))
                        l = (l * weight + l_1 * other) / out_scale  # noqa: E741
                        m = top
                    inverse = tl.where(l == 0.0, 0.0, 1.0 / l)
                    weight *= inverse
                    other *= inverse
                    rows = _first_row(g, item, rank, C) + tl.arange(0, _ROWS)
                    at = lse + (item[1] + rows).to(tl.int64) * C.heads + item[0]
                    tl.store(at, (m + tl.math.log2(l)) * LN2, mask=rows < item[2])
                tlx.barrier_wait(o_full[g], (turn if g == 0 else items_1) & 1)
                if both:
                    tlx.barrier_wait(o_full[1], items_1 & 1)
                _stage(g, weight, other, both, stored, o_tiles, staged, o_ready, writes, C)
                stored += 1
        items_1 += tl.where(steps_1 > 0, 1, 0)
        turn += 1
        item = _receive(hand_out, turn, C)


@triton.jit
def store(desc_o, rank, hand_out, staged, writes, C: tl.constexpr):
    """Write the staged tiles of output."""
    st_full, st_empty = writes
    turn = 0
    stored = 0
    item = _receive(hand_out, turn, C)
    while item[7] > 0:
        _, steps_1 = _steps(item, C)
        for g in tl.static_range(C.q_tiles):
            if g == 0 or steps_1 > 0:
                buf, phase = ring(stored, C.o_stages)
                tlx.barrier_wait(st_full[buf], phase)
                at = ragged(item[1], item[2], _first_row(g, item, rank, C), item[0] * C.dim)
                tlx.async_descriptor_store(desc_o, staged[buf], at)
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(st_empty[buf], 1)
                stored += 1
        turn += 1
        item = _receive(hand_out, turn, C)


@triton.jit(do_not_specialize=["max_entries", "num_sequences", "num_queries", "total_kv"])
def forward(desc_q, desc_k, desc_v, desc_o, out, lse, table, offsets_q, offsets_kv, counters, slots,
            max_entries, num_sequences, num_queries, total_kv, query_tiles, columns, scale,
            out_scale, C: tl.constexpr):  # fmt: skip
    """``out`` and ``lse`` of all entries of the table and heads; ``num_queries`` is T_q or S.

    Of a pair of CTAs, the first hands out the items and issues the products of both. Its barriers
    marked * take one arrival from each CTA; products and commits arrive in both.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, k_full, v_full | 1 + bytes * | load | mma |
    | q_empty | 1 | mma: the last scores with the queries are complete | load |
    | k_empty, v_empty | 1 | mma: the last product with the block is complete | load |
    | s_full[2] | 1 | mma: the stream's scores are complete | activate |
    | s_empty[2] | 1 * | activate: the scores are read; not if P lies over S | mma |
    | p_full[2] | 1 * | activate: the weights are written | mma |
    | p_empty[2] | 1 | mma: weights read, output so far complete | activate, correct |
    | o_ready[2] | 1 * | correct: the output is rescaled, or read and free | mma |
    | o_full[2] | 1 | mma: the output of an item is complete | correct |
    | a_full[2], a_empty[2] | 1 | activate, correct: factors, then l, then m | correct, activate |
    | st_full, st_empty | 1 | correct, store: the staged tile | store, correct |
    | item_full, item_empty | 1, 5 * | load, all other roles | all other roles, load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tiles = tlx.local_alloc((_ROWS, C.dim), DTYPE, C.q_tiles)
    k_tiles = tlx.local_alloc((C.block_kv // C.ctas, C.dim), DTYPE, C.k_stages)
    v_tiles = tlx.local_alloc((C.block_kv, C.dim // C.ctas), DTYPE, C.v_stages)
    staged = tlx.local_alloc((_ROWS, C.dim), DTYPE, C.o_stages)
    a_tiles = tlx.local_alloc((_ROWS,), tl.float32, 2)
    s_tiles = tlx.local_alloc((_ROWS, C.block_kv), tl.float32, 2, tlx.storage_kind.tmem)
    if C.p_over_s:
        p_tiles = tlx.local_alloc(
            (_ROWS, C.block_kv), DTYPE, 4, tlx.storage_kind.tmem, reuse=s_tiles
        )  # fmt: skip
    else:
        p_tiles = tlx.local_alloc((_ROWS, C.block_kv), DTYPE, 2, tlx.storage_kind.tmem)
    o_tiles = tlx.local_alloc((_ROWS, C.dim), tl.float32, 2, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    q_empty = tlx.alloc_barriers(1)
    k_full = tlx.alloc_barriers(C.k_stages)
    k_empty = tlx.alloc_barriers(C.k_stages)
    v_full = tlx.alloc_barriers(C.v_stages)
    v_empty = tlx.alloc_barriers(C.v_stages)
    s_full = tlx.alloc_barriers(2)
    s_empty = tlx.alloc_barriers(2, C.ctas)
    p_full = tlx.alloc_barriers(2, C.ctas)
    p_empty = tlx.alloc_barriers(2)
    o_ready = tlx.alloc_barriers(2, C.ctas)
    o_full = tlx.alloc_barriers(2)
    a_full = tlx.alloc_barriers(2)
    a_empty = tlx.alloc_barriers(2)
    st_full = tlx.alloc_barriers(C.o_stages)
    st_empty = tlx.alloc_barriers(C.o_stages)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 5 * C.ctas)
    rank = 0
    if C.two_ctas:
        rank = tlx.cluster_cta_rank()
    # The slots of the first CTA serve both.
    hand_out = (slots - rank * 2 * ITEM_SLOT, item_full, item_empty)
    where = (table, offsets_q, offsets_kv, max_entries, num_sequences, num_queries, total_kv,
             query_tiles)  # fmt: skip
    tiles = (q_tiles, k_tiles, v_tiles, s_tiles, p_tiles, o_tiles)
    loads = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    streams = (s_full, s_empty, p_full, p_empty, o_ready, o_full)
    factors = (a_full, a_empty)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            correct(lse, rank, out_scale, hand_out, (o_tiles, a_tiles, staged), streams, factors,
                    (st_full, st_empty), C)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=C.softmax_registers, replicate=2):
            activate(tlx.async_task_replica_id(), out, lse, where, scale, rank, hand_out,
                     (s_tiles, p_tiles, a_tiles), streams, factors, C)  # fmt: skip
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            if rank == 0:
                mma(hand_out, tiles, loads, streams, C)
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            load(desc_q, desc_k, desc_v, where, counters, columns, rank, hand_out, tiles, loads, C)
        with tlx.async_task(num_warps=1, registers=C.scalar_registers):
            store(desc_o, rank, hand_out, staged, (st_full, st_empty), C)
