# mypy: allow-untyped-defs
"""The forward kernel of self, cross and broadcast-Q attention.

One persistent CTA holds a tile of queries, 64 rows for each of its GROUPS consumer groups, and streams the keys and
values of its sequence past it. Keys are taken from the end of what the tile sees: the block that is cut short by the
end of the sequence comes first, in a step of its own, and the loop behind it needs no mask.
"""

import triton
import triton.language as tl

from .._jit.jagged import partner_rows, sequence_rows
from .._jit.rings import next_item, open_slot, publish, ragged, ring
from .._jit.scores import LN2, LOG2E, activate_product, key_range, mask_kind, mask_opens, pairs_allowed
from .._jit.tlx import tlx

_ROWS = tl.constexpr(64)
# Numbers that the load role hands over with an item, at most.
_SLOT = tl.constexpr(8)
# The groups take turns at issuing products, so that one works on scores while the tensor cores work for the other.
_TURN_OF_0 = tl.constexpr(9)
_TURN_OF_1 = tl.constexpr(10)


@triton.jit
def _tile(item, table, offsets_q, offsets_kv, max_entries, num_sequences, num_queries, total_kv, query_tiles,
          H: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
          BROADCAST_Q: tl.constexpr):  # fmt: skip
    """Where the rows of a work item are, and which keys it sees.

    Returns:
        Head; start in q, start in out, rows and first row of the queries; start and rows of the keys; first key seen
        and number of blocks of BN keys from there on: the one count that all roles agree on, at least 1 for an item and
        0 past the last.
    """
    entry = item // (H * query_tiles)
    head = item // query_tiles % H
    named = entry < max_entries
    b = tl.load(table + 2 * entry, mask=named, other=-1)
    first_row = tl.load(table + 2 * entry + 1, mask=named, other=0)
    sequence = tl.maximum(b, 0)
    if BROADCAST_Q:
        start_kv, len_kv = sequence_rows(offsets_kv, sequence, num_sequences, total_kv)
        start_q = b * 0
        start_out = b * num_queries
        len_q = num_queries
        first_row = item % query_tiles * ROWS
        # The keys of no sequence are no one's to attend to; their entry is the last.
        ended = (b < 0) | (b >= num_sequences)
    else:
        start, len_q = sequence_rows(offsets_q, sequence, num_sequences, num_queries)
        start_kv, len_kv = partner_rows(offsets_kv, sequence, num_sequences, total_kv)
        start_q = start.to(tl.int32)
        start_out = start_q
        ended = b < 0
    lo, _ = key_range(first_row, len_q, len_kv, MASK)
    _, hi = key_range(tl.minimum(first_row + ROWS, len_q) - 1, len_q, len_kv, MASK)
    blocks = tl.where(ended, 0, tl.maximum(tl.cdiv(hi - lo, BN), 1))
    return head, start_q, start_out, len_q, first_row, start_kv.to(tl.int32), len_kv, lo, blocks


@triton.jit
def _receive(slots, item_full, item_empty, turn):
    """What the load role published at this turn."""
    slot = open_slot(slots, item_full, turn, _SLOT)
    head = tl.load(slot, volatile=True)
    start_out = tl.load(slot + 1, volatile=True)
    len_q = tl.load(slot + 2, volatile=True)
    first_row = tl.load(slot + 3, volatile=True)
    len_kv = tl.load(slot + 4, volatile=True)
    lo = tl.load(slot + 5, volatile=True)
    blocks = tl.load(slot + 6, volatile=True)
    tlx.barrier_arrive(item_empty[turn % 2], 1)
    return head, start_out, len_q, first_row, len_kv, lo, blocks


@triton.jit
def _unmasked_blocks(first_row, len_q, len_kv, lo, blocks,
                     BN: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """The blocks ``[begin, end)`` before the last one that all rows of the tile see as a whole."""
    _, hi_first = key_range(first_row, len_q, len_kv, MASK)
    lo_last, _ = key_range(tl.minimum(first_row + ROWS, len_q) - 1, len_q, len_kv, MASK)
    end = tl.minimum(tl.maximum((hi_first - lo) // BN, 0), blocks - 1)
    begin = tl.minimum(tl.cdiv(lo_last - lo, BN), end)
    return begin, end


@triton.jit
def load(desc_q, desc_k, desc_v, table, offsets_q, offsets_kv, counter, slots, max_entries,
         num_sequences, num_queries, total_kv, query_tiles,
         q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
         H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr,
         K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, MASK: tl.constexpr, BROADCAST_Q: tl.constexpr):  # fmt: skip
    """Hand out the items, and bring Q, K and V of each into shared memory.

    An item is looked up while the one before it is loaded, so that neither this role nor the consumers wait for the
    counter, the table and the offsets, one after the other.
    """
    Q_BYTES: tl.constexpr = _ROWS * D * tlx.size_of(tlx.dtype_of(desc_q))
    KV_BYTES: tl.constexpr = BN * D * tlx.size_of(tlx.dtype_of(desc_k))
    count = 0
    turn = 0
    head, start_q, start_out, len_q, first_row, start_kv, len_kv, lo, blocks = _tile(
        tl.program_id(0), table, offsets_q, offsets_kv, max_entries, num_sequences, num_queries, total_kv, query_tiles,
        H, BN, _ROWS * GROUPS, MASK, BROADCAST_Q,
    )  # fmt: skip
    publish(
        slots, item_full, item_empty, turn, (head, start_out, len_q, first_row, len_kv, lo, blocks), _SLOT
    )  # fmt: skip
    while blocks > 0:
        next_head, next_q, next_len_q, next_row, next_kv, next_len_kv, next_lo, next_blocks = (
            head, start_q, len_q, first_row, start_kv, len_kv, lo, blocks,
        )  # fmt: skip
        for i in range(blocks):
            c0, c1, c2, c3 = ragged(start_kv, len_kv, lo + (blocks - 1 - i) * BN, head // GROUP * D)
            buf, phase = ring(count, K_STAGES)
            tlx.barrier_wait(k_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[buf], KV_BYTES)
            tlx.async_descriptor_load(desc_k, k_tiles[buf], [c0, c1, c2, c3], k_full[buf])
            if i == 0:
                for g in tl.static_range(GROUPS):
                    d0, d1, d2, d3 = ragged(start_q, len_q, first_row + g * _ROWS, head * D)
                    tlx.barrier_wait(q_empty[g], (turn & 1) ^ 1)
                    tlx.barrier_expect_bytes(q_full[g], Q_BYTES)
                    tlx.async_descriptor_load(desc_q, q_tiles[g], [d0, d1, d2, d3], q_full[g])
            buf, phase = ring(count, V_STAGES)
            tlx.barrier_wait(v_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(v_full[buf], KV_BYTES)
            tlx.async_descriptor_load(desc_v, v_tiles[buf], [c0, c1, c2, c3], v_full[buf])
            count += 1
            if i == 0:
                (
                    next_head, next_q, next_out, next_len_q, next_row, next_kv, next_len_kv, next_lo, next_blocks,
                ) = _tile(
                    next_item(counter), table, offsets_q, offsets_kv, max_entries, num_sequences, num_queries,
                    total_kv, query_tiles, H, BN, _ROWS * GROUPS, MASK, BROADCAST_Q,
                )  # fmt: skip
                publish(
                    slots, item_full, item_empty, turn + 1,
                    (next_head, next_out, next_len_q, next_row, next_len_kv, next_lo, next_blocks), _SLOT,
                )  # fmt: skip
        turn += 1
        head, start_q, len_q, first_row, start_kv, len_kv, lo, blocks = (
            next_head, next_q, next_len_q, next_row, next_kv, next_len_kv, next_lo, next_blocks,
        )  # fmt: skip


@triton.jit
def _take_turn(g: tl.constexpr, TURNS: tl.constexpr):
    if TURNS:
        if g == 0:
            tlx.named_barrier_wait(_TURN_OF_0, 256)
        else:
            tlx.named_barrier_wait(_TURN_OF_1, 256)


@triton.jit
def _pass_turn(g: tl.constexpr, TURNS: tl.constexpr):
    if TURNS:
        if g == 0:
            tlx.named_barrier_arrive(_TURN_OF_1, 256)
        else:
            tlx.named_barrier_arrive(_TURN_OF_0, 256)


@triton.jit
def _activated(s, m, l, scale, first_key, lo_rows, hi_rows, len_kv,  # noqa: E741 - the usual name of the row sums
               BN: tl.constexpr, MASK: tl.constexpr, ACT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The weights p of a block, what the sums so far have to be multiplied by, and the new row maxima and sums."""
    if MASKED:
        allowed = pairs_allowed(
            (first_key + tl.arange(0, BN))[None, :], lo_rows[:, None], hi_rows[:, None], len_kv, MASK
        )  # fmt: skip
    if ACT == "softmax":
        if MASKED:
            s = tl.where(allowed, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        base = m_new
        if MASKED:
            # A row that has seen no key yet: -inf - -inf is no number.
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s * scale - base[:, None])
        alpha = tl.math.exp2(m - base)
        return p, alpha, m_new, l * alpha + tl.sum(p, 1)
    else:
        p = activate_product(s, scale, ACT, True)
        if MASKED:
            p = tl.where(allowed, p, 0.0)
        return p, m, m, l


@triton.jit
def _block(acc, p, m, l, count, scale, first_key, lo_rows, hi_rows, len_kv,  # noqa: E741
           q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, g: tl.constexpr,
           BN: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, TURNS: tl.constexpr,
           MASK: tl.constexpr, ACT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Scores of block ``count`` while the tensor cores add the block before to ``acc``."""
    buf, phase = ring(count, K_STAGES)
    tlx.barrier_wait(k_full[buf], phase)
    _take_turn(g, TURNS)
    s = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[buf]))
    last, last_phase = ring(count - 1, V_STAGES)
    tlx.barrier_wait(v_full[last], last_phase)
    acc = tlx.async_dot(p, v_tiles[last], acc)
    _pass_turn(g, TURNS)
    s = tlx.async_dot_wait(1, s)
    tlx.barrier_arrive(k_empty[buf], 1)
    p_new, alpha, m, l = _activated(s, m, l, scale, first_key, lo_rows, hi_rows, len_kv, BN, MASK, ACT, MASKED)  # noqa: E741
    acc = tlx.async_dot_wait(0, acc)
    tlx.barrier_arrive(v_empty[last], 1)
    if ACT == "softmax":
        acc = acc * alpha[:, None]
    return acc, p_new.to(p.dtype), m, l


@triton.jit
def _attend_rows(count, turn, head, start_out, len_q, first_row, len_kv, lo, blocks, desc_o, lse, slots,
                 scale, out_scale, q_tile, k_tiles, v_tiles, o_tile,
                 q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
                 g: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr,
                 K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, TURNS: tl.constexpr,
                 MASK: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """This group's rows of an item; returns ``count`` and the next item."""
    DTYPE: tl.constexpr = tlx.dtype_of(desc_o)
    rows = first_row + g * _ROWS + tl.arange(0, _ROWS)
    lo_rows, hi_rows = key_range(rows, len_q, len_kv, MASK)
    m = tl.zeros((_ROWS,), tl.float32) - float("inf")
    l = tl.zeros((_ROWS,), tl.float32)  # noqa: E741
    acc = tl.zeros((_ROWS, D), tl.float32)

    # The last block: the only one that the end of the sequence may cut.
    buf, phase = ring(count, K_STAGES)
    tlx.barrier_wait(k_full[buf], phase)
    tlx.barrier_wait(q_full[g], turn & 1)
    _take_turn(g, TURNS)
    s = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[buf]))
    _pass_turn(g, TURNS)
    s = tlx.async_dot_wait(0, s)
    tlx.barrier_arrive(k_empty[buf], 1)
    p, _, m, l = _activated(s, m, l, scale, lo + (blocks - 1) * BN, lo_rows, hi_rows, len_kv, BN, MASK, ACT, True)  # noqa: E741
    p = p.to(DTYPE)
    count += 1

    begin, end = _unmasked_blocks(first_row, len_q, len_kv, lo, blocks, BN, _ROWS * GROUPS, MASK)
    if mask_kind(MASK) != "full":
        for i in range(1, blocks - end):
            acc, p, m, l = _block(  # noqa: E741
                acc, p, m, l, count, scale, lo + (blocks - 1 - i) * BN, lo_rows, hi_rows, len_kv,
                q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, g,
                BN, K_STAGES, V_STAGES, TURNS, MASK, ACT, True,
            )  # fmt: skip
            count += 1
    for _i in range(begin, end):
        acc, p, m, l = _block(  # noqa: E741
            acc, p, m, l, count, scale, 0, lo_rows, hi_rows, len_kv,
            q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, g,
            BN, K_STAGES, V_STAGES, TURNS, MASK, ACT, False,
        )  # fmt: skip
        count += 1
    if not mask_opens(MASK, 0):
        for i in range(begin):
            acc, p, m, l = _block(  # noqa: E741
                acc, p, m, l, count, scale, lo + (begin - 1 - i) * BN, lo_rows, hi_rows, len_kv,
                q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, g,
                BN, K_STAGES, V_STAGES, TURNS, MASK, ACT, True,
            )  # fmt: skip
            count += 1
    tlx.barrier_arrive(q_empty[g], 1)
    last, last_phase = ring(count - 1, V_STAGES)
    tlx.barrier_wait(v_full[last], last_phase)
    acc = tlx.async_dot(p, v_tiles[last], acc)
    # The next item arrives under the last product.
    following = _receive(slots, item_full, item_empty, turn + 1)
    # The store of the item before has read the staging tile.
    tlx.async_descriptor_store_wait(0)
    acc = tlx.async_dot_wait(0, acc)
    tlx.barrier_arrive(v_empty[last], 1)

    if ACT == "softmax":
        acc = acc * tl.where(l == 0.0, 0.0, out_scale / l)[:, None]
        lse_rows = (m + tl.math.log2(l)) * LN2
        tl.store(lse + (start_out + rows).to(tl.int64) * H + head, lse_rows, mask=rows < len_q)
    else:
        acc = acc * out_scale
    tlx.local_store(o_tile, acc.to(DTYPE))
    tlx.fence("async_shared")
    c0, c1, c2, c3 = ragged(start_out, len_q, first_row + g * _ROWS, head * D)
    tlx.async_descriptor_store(desc_o, o_tile, [c0, c1, c2, c3])
    return count, following


@triton.jit
def _pass_by(count, turn, blocks, slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
             g: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, TURNS: tl.constexpr):  # fmt: skip
    """What ``_attend_rows`` does for the other roles, by a group whose rows are all past the end of the queries."""
    tlx.barrier_wait(q_full[g], turn & 1)
    tlx.barrier_arrive(q_empty[g], 1)
    for _i in range(blocks):
        buf, phase = ring(count, K_STAGES)
        tlx.barrier_wait(k_full[buf], phase)
        _take_turn(g, TURNS)
        _pass_turn(g, TURNS)
        tlx.barrier_arrive(k_empty[buf], 1)
        buf, phase = ring(count, V_STAGES)
        tlx.barrier_wait(v_full[buf], phase)
        tlx.barrier_arrive(v_empty[buf], 1)
        count += 1
    return count, _receive(slots, item_full, item_empty, turn + 1)


@triton.jit
def attend(g: tl.constexpr, desc_o, out, lse, offsets_kv, slots,
           num_sequences, num_queries, total_kv, scale, out_scale, q_tiles, k_tiles, v_tiles, o_tiles,
           q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
           H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr,
           K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, TURNS: tl.constexpr,
           MASK: tl.constexpr, ACT: tl.constexpr, BROADCAST_Q: tl.constexpr):  # fmt: skip
    """64 rows of queries of each item: scores, weights, output and log-sum-exp."""
    if ACT == "softmax":
        scale = scale * LOG2E
    count = 0
    turn = 0
    if TURNS and g == 1:
        tlx.named_barrier_arrive(_TURN_OF_0, 256)
    head, start_out, len_q, first_row, len_kv, lo, blocks = _receive(slots, item_full, item_empty, turn)
    while blocks > 0:
        # The first group has a row in every item.
        if g == 0 or first_row + g * _ROWS < len_q:
            count, following = _attend_rows(
                count, turn, head, start_out, len_q, first_row, len_kv, lo, blocks, desc_o, lse, slots,
                scale, out_scale, q_tiles[g], k_tiles, v_tiles, o_tiles[g],
                q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
                g, H, D, BN, GROUPS, K_STAGES, V_STAGES, TURNS, MASK, ACT,
            )  # fmt: skip
        else:
            count, following = _pass_by(
                count, turn, blocks, slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
                g, K_STAGES, V_STAGES, TURNS,
            )  # fmt: skip
        head, start_out, len_q, first_row, len_kv, lo, blocks = following
        turn += 1
    if BROADCAST_Q:
        _write_empty(
            out, lse, offsets_kv, num_sequences, num_queries, total_kv, g, H, D, GROUPS, ACT == "softmax"
        )  # fmt: skip
    tlx.async_descriptor_store_wait(0)


@triton.jit
def _write_empty(out, lse, offsets_kv, num_sequences, num_queries, total_kv,
                 g: tl.constexpr, H: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
                 SOFTMAX: tl.constexpr):  # fmt: skip
    """Output 0 and log-sum-exp -inf of the sequences without keys, which a table of key tiles does not name."""
    for b in range(tl.program_id(0), num_sequences, tl.num_programs(0)):
        _, len_kv = sequence_rows(offsets_kv, b, num_sequences, total_kv)
        if len_kv == 0:
            for first in range(g * _ROWS, num_queries * H, GROUPS * _ROWS):
                rows = first + tl.arange(0, _ROWS)
                at = tl.cast(b, tl.int64) * num_queries * H + rows
                ok = rows < num_queries * H
                zeros = tl.zeros((_ROWS, D), tl.float32).to(out.dtype.element_ty)
                tl.store(out + at[:, None] * D + tl.arange(0, D)[None, :], zeros, mask=ok[:, None])
                if SOFTMAX:
                    tl.store(lse + at, tl.full((_ROWS,), float("-inf"), tl.float32), mask=ok)


@triton.jit(do_not_specialize=["max_entries", "num_sequences", "num_queries", "total_kv"])
def forward(desc_q, desc_k, desc_v, desc_o, out, lse, table, offsets_q, offsets_kv, counter, slots,
            max_entries, num_sequences, num_queries, total_kv, query_tiles, scale, out_scale,
            H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr,
            K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, REGISTERS: tl.constexpr, TURNS: tl.constexpr,
            MASK: tl.constexpr, ACT: tl.constexpr, BROADCAST_Q: tl.constexpr):  # fmt: skip
    """``out`` and ``lse`` of every entry of the table and every head; ``num_queries`` is T_q, or S with BROADCAST_Q.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, k_full, v_full | 1 + bytes | load | attend (q: its group; k, v: all groups) |
    | q_empty | 1 | its attend group, after its last scores | load |
    | k_empty, v_empty | GROUPS | every attend group | load |
    | item_full, item_empty | 1, GROUPS | load, every attend group | every attend group, load |
    | named 9, 10 | 256 threads | the other group, having issued its products | group 0, group 1, before issuing |
    """
    q_tiles = tlx.local_alloc((_ROWS, D), tlx.dtype_of(desc_q), GROUPS)
    k_tiles = tlx.local_alloc((BN, D), tlx.dtype_of(desc_k), K_STAGES)
    v_tiles = tlx.local_alloc((BN, D), tlx.dtype_of(desc_v), V_STAGES)
    o_tiles = tlx.local_alloc((_ROWS, D), tlx.dtype_of(desc_o), GROUPS)
    q_full = tlx.alloc_barriers(GROUPS)
    q_empty = tlx.alloc_barriers(GROUPS)
    k_full = tlx.alloc_barriers(K_STAGES)
    k_empty = tlx.alloc_barriers(K_STAGES, GROUPS)
    v_full = tlx.alloc_barriers(V_STAGES)
    v_empty = tlx.alloc_barriers(V_STAGES, GROUPS)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, GROUPS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(desc_q, desc_k, desc_v, table, offsets_q, offsets_kv, counter, slots, max_entries,
                 num_sequences, num_queries, total_kv, query_tiles,
                 q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full, item_empty,
                 H, GROUP, D, BN, GROUPS, K_STAGES, V_STAGES, MASK, BROADCAST_Q)  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=GROUPS):
            attend(tlx.async_task_replica_id(), desc_o, out, lse, offsets_kv, slots,
                   num_sequences, num_queries, total_kv, scale, out_scale,
                   q_tiles, k_tiles, v_tiles, o_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                   item_full, item_empty,
                   H, D, BN, GROUPS, K_STAGES, V_STAGES, TURNS, MASK, ACT, BROADCAST_Q)  # fmt: skip
