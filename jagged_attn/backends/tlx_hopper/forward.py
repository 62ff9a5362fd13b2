# mypy: allow-untyped-defs
"""The forward kernel of self, cross and broadcast-Q attention.

One persistent CTA holds a tile of queries, 64 rows for each of its consumer groups, and streams the keys and values of
its sequence past it. Keys are taken from the end of what the tile sees: the block that is cut short by the end of the
sequence comes first, in a step of its own, and the loop behind it needs no mask. Where a tile has more rows than a
block, a group passes the blocks by that only rows of the groups after it see.

With two tiles of queries, the next item's come while this one is computed, and an item's output leaves through its own
tile: the group gives it back under the next item.

Without a mask a CTA may take items in runs: up to ``run`` tiles of queries of one head that follow one another in the
table. Where the next is of the same sequence, and its blocks fit the rings, keys and values *stay*: the load role does
not bring them again, and the consumers use the same buffers once more and give them back after the last such item only.

``C`` is a ``Constants``: heads, group, dim; block_kv, groups, k_stages, v_stages, q_stages, registers, turns, run and
load_warps of the ``ForwardConfig``; mask, act, broadcast_q.
"""

import triton
import triton.language as tl

from .._jit.forward_items import find_tile, run_goes_on, unmasked_blocks, write_empty
from .._jit.rings import ITEM_SLOT, next_item, pass_on, ragged, receive_numbers, ring, tile_to_store
from .._jit.scores import (
    LN2,
    LOG2E,
    activate_but_factor,
    activate_product,
    key_range,
    leaves_factor_out,
    mask_kind,
    mask_opens,
    pairs_allowed,
)
from .._jit.tlx import tlx

_ROWS = tl.constexpr(64)
# The groups take turns at issuing products, so that one works on scores while the tensor cores work for the others.
_TURN_OF_0 = tl.constexpr(9)


@triton.jit
def _first_key(item, C: tl.constexpr):
    """The first key that an item sees."""
    return 0 if C.run > 1 else item[6]


@triton.jit
def _keys_stay(item, C: tl.constexpr):
    """Whether the next item takes this one's keys and values as they lie in shared memory."""
    return item[6] > 0 if C.run > 1 else False


@triton.jit
def _with_keys_that_stay(number, item, where, C: tl.constexpr):
    """An item of a run, for ``_keys_stay``: in the place of its first key, which without a mask is 0 for all."""
    head, start_out, len_q, first_row, start_kv, len_kv, _, blocks = item
    another_follows = run_goes_on(number, where, C.heads, C.run) & (first_row + _ROWS * C.groups < len_q)
    stay = another_follows & (blocks <= tl.minimum(C.k_stages, C.v_stages))
    return head, start_out, len_q, first_row, start_kv, len_kv, stay.to(tl.int32), blocks


@triton.jit
def _receive(hand_out, turn):
    """The item that the load role published at this turn."""
    slots, item_full, item_empty = hand_out
    item = receive_numbers(slots, item_full, turn, 0, ITEM_SLOT)
    tlx.barrier_arrive(item_empty[turn % 2], 1)
    return item


@triton.jit
def _take(number, turn, hand_out, where, C: tl.constexpr):
    """Look an item up and hand it to the consumers."""
    slots, item_full, item_empty = hand_out
    item = find_tile(number, where, C.heads, C.block_kv, _ROWS * C.groups, C.mask, C.broadcast_q, C.run)
    if C.run > 1:
        item = _with_keys_that_stay(number, item, where, C)
    pass_on(slots, item_full, item_empty, turn, item)
    return item


@triton.jit
def _next_number(number, where, counter, C: tl.constexpr):
    """The next item of this one's run, or the first of a new run.

    With a CTA for each run there is no second one, and no counter.
    """
    following = number + 1
    if not run_goes_on(number, where, C.heads, C.run):
        run = tl.num_programs(0)
        if run < tl.cdiv(where[3], C.run) * C.heads * where[7]:
            run = next_item(counter)
        following = run * C.run
    return following


@triton.jit
def _queries(turn, g, C: tl.constexpr):
    """Which tile holds a group's queries of this turn's item, and the phase of its barriers."""
    buf, phase = ring(turn, C.q_stages)
    return buf * C.groups + g, phase


@triton.jit
def _bring_queries(desc_q, item, turn, tiles, loads, C: tl.constexpr):
    """Load the queries of this turn's item, 64 rows for each group."""
    head, start_out, first_row = item[0], item[1], item[3]
    start_q = start_out * (0 if C.broadcast_q else 1)
    # Queries without a key are not loaded: what lies there may be NaN, and their output is 0.
    len_q = tl.where(item[5] > 0, item[2], 0)
    for g in tl.static_range(C.groups):
        buf, phase = _queries(turn, g, C)
        at = ragged(start_q, len_q, first_row + g * _ROWS, head * C.dim)
        tlx.barrier_wait(loads[1][buf], phase ^ 1)
        tlx.barrier_expect_bytes(loads[0][buf], _ROWS * C.dim * tlx.size_of(tlx.dtype_of(desc_q)))
        tlx.async_descriptor_load(desc_q, tiles[0][buf], at, loads[0][buf])


@triton.jit
def load(desc_q, desc_k, desc_v, where, counter, hand_out, tiles, loads, C: tl.constexpr):
    """Hand out the items, and bring Q, K and V of each into shared memory.

    An item is looked up while the one before it is loaded, so that neither this role nor the consumers wait for the
    counter, the table and the offsets, one after the other; with two tiles of queries its own come then, too.
    """
    _, k_tiles, v_tiles = tiles
    _, _, k_full, k_empty, v_full, v_empty = loads
    ROW_BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    FULL: tl.constexpr = C.k_stages if C.k_stages < C.v_stages else C.v_stages
    count = 0
    turn = 0
    # Whether the item before has left its keys and values.
    present = False
    number = tl.program_id(0) * C.run
    item = _take(number, turn, hand_out, where, C)
    if C.q_stages > 1:  # noqa: SIM102 - one is decided when this is compiled
        if item[7] > 0:
            _bring_queries(desc_q, item, turn, tiles, loads, C)
    while item[7] > 0:
        head, start_kv, len_kv, lo, blocks = item[0], item[4], item[5], _first_key(item, C), item[7]
        following = item
        # What is present is not brought: one round, in which the next item is looked up.
        rounds = tl.where(present, 1, blocks)
        for i in range(rounds):
            if not present:
                at = ragged(start_kv, len_kv, lo + (blocks - 1 - i) * C.block_kv, head // C.group * C.dim)
                buf, phase = ring(count, C.k_stages)
                tlx.barrier_wait(k_empty[buf], phase ^ 1)
                tlx.barrier_expect_bytes(k_full[buf], C.block_kv * ROW_BYTES)
                tlx.async_descriptor_load(desc_k, k_tiles[buf], at, k_full[buf])
                if C.q_stages == 1:  # noqa: SIM102 - likewise
                    if i == 0:
                        _bring_queries(desc_q, item, turn, tiles, loads, C)
                buf, phase = ring(count, C.v_stages)
                tlx.barrier_wait(v_empty[buf], phase ^ 1)
                tlx.barrier_expect_bytes(v_full[buf], C.block_kv * ROW_BYTES)
                tlx.async_descriptor_load(desc_v, v_tiles[buf], at, v_full[buf])
                count += 1
            if i == tl.minimum(rounds, FULL) - 1:
                # When as much is under way as the rings hold: the look-up takes longer than a block.
                number = _next_number(number, where, counter, C)
                following = _take(number, turn + 1, hand_out, where, C)
                if C.q_stages > 1:  # noqa: SIM102 - likewise
                    if following[7] > 0:
                        _bring_queries(desc_q, following, turn + 1, tiles, loads, C)
        turn += 1
        present = _keys_stay(item, C)
        item = following


@triton.jit
def _release(empty, item, C: tl.constexpr):
    """Give a block of keys or values back, unless the next item takes it as well."""
    if C.run > 1:
        tlx.barrier_arrive(empty, 1, pred=item[6] == 0)
    else:
        tlx.barrier_arrive(empty, 1)


@triton.jit
def _count_after(count, item, C: tl.constexpr):
    """Where in the rings the next item begins, given the end of this one: where this one did, if its blocks stay."""
    return tl.where(_keys_stay(item, C), count - item[7], count) if C.run > 1 else count


@triton.jit
def _take_turn(g: tl.constexpr, C: tl.constexpr):
    if C.turns:
        tlx.named_barrier_wait(_TURN_OF_0 + g, 256)


@triton.jit
def _pass_turn(g: tl.constexpr, C: tl.constexpr):
    if C.turns:
        tlx.named_barrier_arrive(_TURN_OF_0 + (g + 1) % C.groups, 256)


@triton.jit
def _give_queries_back(turn, g, loads, C: tl.constexpr):
    """Give the queries of the item before back, once its output, which left through their tile, has been read."""
    if C.q_stages > 1:  # noqa: SIM102 - one is decided when this is compiled
        if turn > 0:
            tlx.async_descriptor_store_wait(0)
            buf, _ = _queries(turn - 1, g, C)
            tlx.barrier_arrive(loads[1][buf], 1)


@triton.jit
def _activated(s, m, l, scale, first_key, seen, DTYPE: tl.constexpr,  # noqa: E741 - its usual name
               C: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The weights p of a block, what the sums so far have to be multiplied by, and the new row maxima and sums.

    Of ``leaves_factor_out`` the weights are without their factor, which ``attend`` has put into that of the output.
    """
    if MASKED:
        lo_rows, hi_rows, len_kv = seen
        keys = first_key + tl.arange(0, C.block_kv)
        allowed = pairs_allowed(keys[None, :], lo_rows[:, None], hi_rows[:, None], len_kv, C.mask)
    if C.act == "softmax":
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
        if leaves_factor_out(C.act, DTYPE):
            p = activate_but_factor(s, scale)
        else:
            p = activate_product(s, scale, C.act, True)
        if MASKED:
            p = tl.where(allowed, p, 0.0)
        return p, m, m, l


@triton.jit
def _block(sums, count, item, scale, first_key, seen, q_tile, tiles, loads, g: tl.constexpr, C: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Scores of block ``count`` while the tensor cores add the block before to the output."""
    _, k_tiles, v_tiles = tiles
    _, _, k_full, k_empty, v_full, v_empty = loads
    acc, p, m, l = sums  # noqa: E741
    buf, phase = ring(count, C.k_stages)
    tlx.barrier_wait(k_full[buf], phase)
    _take_turn(g, C)
    s = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[buf]))
    last, last_phase = ring(count - 1, C.v_stages)
    tlx.barrier_wait(v_full[last], last_phase)
    acc = tlx.async_dot(p, v_tiles[last], acc)
    _pass_turn(g, C)
    s = tlx.async_dot_wait(1, s)
    _release(k_empty[buf], item, C)
    p_new, alpha, m, l = _activated(s, m, l, scale, first_key, seen, p.dtype, C, MASKED)  # noqa: E741
    acc = tlx.async_dot_wait(0, acc)
    _release(v_empty[last], item, C)
    if C.act == "softmax":
        acc = acc * alpha[:, None]
    # Rounded after the wait: before it, ptxas may serialise the product that still reads the weights before these.
    return acc, p_new.to(p.dtype), m, l


@triton.jit
def _skip(count, item, loads, g: tl.constexpr, C: tl.constexpr):
    """Pass a block by that no row of the group sees."""
    _, _, k_full, k_empty, v_full, v_empty = loads
    buf, phase = ring(count, C.k_stages)
    tlx.barrier_wait(k_full[buf], phase)
    _take_turn(g, C)
    _pass_turn(g, C)
    _release(k_empty[buf], item, C)
    buf, phase = ring(count, C.v_stages)
    tlx.barrier_wait(v_full[buf], phase)
    _release(v_empty[buf], item, C)


@triton.constexpr_function
def _groups_see_apart(mask, rows, block_kv):
    """Whether the groups pass blocks by that only rows of the groups after them see: in tiles wider than a block."""
    return mask_kind(mask) != "full" and rows > block_kv


@triton.jit
def _own_blocks(own_row, len_q, len_kv, lo, blocks, C: tl.constexpr):
    """How many of an item's blocks the group takes part in: up to the last that its rows see, at least one."""
    if _groups_see_apart(C.mask, _ROWS * C.groups, C.block_kv):
        _, hi = key_range(tl.minimum(own_row + _ROWS, len_q) - 1, len_q, len_kv, C.mask)
        return tl.minimum(tl.maximum(tl.cdiv(hi - lo, C.block_kv), 1), blocks)
    else:
        return blocks


@triton.jit
def _first_block(count, item, scale, first_key, seen, q_tile, tiles, loads, g: tl.constexpr, DTYPE: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """The last block that the group sees, alone: the only one that the end of the sequence may cut."""
    k_full, k_empty = loads[2], loads[3]
    m = tl.zeros((_ROWS,), tl.float32) - float("inf")
    l = tl.zeros((_ROWS,), tl.float32)  # noqa: E741
    buf, phase = ring(count, C.k_stages)
    tlx.barrier_wait(k_full[buf], phase)
    _take_turn(g, C)
    s = tlx.async_dot(q_tile, tlx.local_trans(tiles[1][buf]))
    _pass_turn(g, C)
    s = tlx.async_dot_wait(0, s)
    _release(k_empty[buf], item, C)
    # Without a mask or a sum of weights, keys past the end need no comparison: their scores of 0 meet zeros in V.
    CUT: tl.constexpr = C.act == "softmax" or mask_kind(C.mask) != "full"
    p, _, m, l = _activated(s, m, l, scale, first_key, seen, DTYPE, C, CUT)  # noqa: E741
    return tl.zeros((_ROWS, C.dim), tl.float32), p.to(DTYPE), m, l


@triton.jit
def _store_rows(acc, m, l, own_row, item, desc_o, lse, out_scale, o_tile, C: tl.constexpr):  # noqa: E741
    """The group's output and log-sum-exp."""
    head, start_out, len_q = item[0], item[1], item[2]
    if C.act == "softmax":
        acc = acc * tl.where(l == 0.0, 0.0, out_scale / l)[:, None]
        rows = own_row + tl.arange(0, _ROWS)
        lse_rows = (m + tl.math.log2(l)) * LN2
        tl.store(lse + (start_out + rows).to(tl.int64) * C.heads + head, lse_rows, mask=rows < len_q)
    else:
        acc = acc * out_scale
    tlx.local_store(o_tile, acc.to(tlx.dtype_of(desc_o)))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_o, o_tile, ragged(start_out, len_q, own_row, head * C.dim))


@triton.jit
def _attend_rows(count, turn, item, desc_o, lse, scale, out_scale, hand_out, tiles, o_tiles, loads,
                 g: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """This group's rows of an item; returns ``count`` and the next item."""
    len_q, len_kv, blocks = item[2], item[5], item[7]
    lo = _first_key(item, C)
    q_full, q_empty, _, _, v_full, v_empty = loads
    own_row = item[3] + g * _ROWS
    APART: tl.constexpr = _groups_see_apart(C.mask, _ROWS * C.groups, C.block_kv)
    own_blocks = _own_blocks(own_row, len_q, len_kv, lo, blocks, C)
    lo_rows, hi_rows = key_range(own_row + tl.arange(0, _ROWS), len_q, len_kv, C.mask)
    seen = (lo_rows, hi_rows, len_kv)
    q_buf, q_phase = _queries(turn, g, C)
    q_tile = tiles[0][q_buf]
    if APART:
        # Before the group waits for more blocks than the rings hold: the load role may wait for these queries.
        _give_queries_back(turn, g, loads, C)
        for _i in range(blocks - own_blocks):
            _skip(count, item, loads, g, C)
            count += 1

    tlx.barrier_wait(q_full[q_buf], q_phase)
    first_key = lo + (own_blocks - 1) * C.block_kv
    sums = _first_block(count, item, scale, first_key, seen, q_tile, tiles, loads, g, tlx.dtype_of(desc_o), C)
    count += 1
    if not APART:
        _give_queries_back(turn, g, loads, C)

    begin, end = unmasked_blocks(own_row, len_q, len_kv, lo, own_blocks, C.block_kv, _ROWS, C.mask)
    if mask_kind(C.mask) != "full":
        for i in range(1, own_blocks - end):
            sums = _block(sums, count, item, scale, first_key - i * C.block_kv, seen, q_tile, tiles, loads, g, C, True)
            count += 1
    for _i in range(begin, end):
        sums = _block(sums, count, item, scale, 0, seen, q_tile, tiles, loads, g, C, False)
        count += 1
    if not mask_opens(C.mask, 0):
        for i in range(begin):
            key = lo + (begin - 1 - i) * C.block_kv
            sums = _block(sums, count, item, scale, key, seen, q_tile, tiles, loads, g, C, True)
            count += 1
    acc, p, m, l = sums  # noqa: E741
    if C.q_stages == 1:
        tlx.barrier_arrive(q_empty[q_buf], 1)
    last, last_phase = ring(count - 1, C.v_stages)
    tlx.barrier_wait(v_full[last], last_phase)
    acc = tlx.async_dot(p, tiles[2][last], acc)
    # The next item arrives under the last product.
    following = _receive(hand_out, turn + 1)
    if C.q_stages == 1:
        # The store of the item before has read the staging tile.
        tlx.async_descriptor_store_wait(0)
        o_tile = o_tiles[g]
    else:
        # Of two tiles of queries, this item's is read no more.
        o_tile = tile_to_store(o_tiles, q_buf, g, C.groups * C.q_stages, C.groups)
    acc = tlx.async_dot_wait(0, acc)
    _release(v_empty[last], item, C)
    _store_rows(acc, m, l, own_row, item, desc_o, lse, out_scale, o_tile, C)
    return _count_after(count, item, C), following


@triton.jit
def _pass_by(count, turn, item, hand_out, loads, g: tl.constexpr, C: tl.constexpr):
    """What ``_attend_rows`` does for the other roles, by a group whose rows are all past the end of the queries."""
    q_buf, q_phase = _queries(turn, g, C)
    _give_queries_back(turn, g, loads, C)
    tlx.barrier_wait(loads[0][q_buf], q_phase)
    for _i in range(item[7]):
        _skip(count, item, loads, g, C)
        count += 1
    return _count_after(count, item, C), _receive(hand_out, turn + 1)


@triton.jit
def attend(g: tl.constexpr, desc_o, out, lse, where, scale, out_scale, hand_out, tiles, o_tiles, loads,
           C: tl.constexpr):  # fmt: skip
    """64 rows of queries of each item: scores, weights, output and log-sum-exp."""
    if C.act == "softmax":
        scale = scale * LOG2E
    elif leaves_factor_out(C.act, tlx.dtype_of(desc_o)):
        out_scale = out_scale * (0.5 * scale)
    count = 0
    turn = 0
    if C.turns and g == C.groups - 1:
        tlx.named_barrier_arrive(_TURN_OF_0, 256)
    item = _receive(hand_out, turn)
    while item[7] > 0:
        # The first group has a row in every item.
        if g == 0 or item[3] + g * _ROWS < item[2]:
            count, item = _attend_rows(
                count, turn, item, desc_o, lse, scale, out_scale, hand_out, tiles, o_tiles, loads, g, C
            )  # fmt: skip
        else:
            count, item = _pass_by(count, turn, item, hand_out, loads, g, C)
        turn += 1
    if C.broadcast_q:
        write_empty(out, lse, where, g, C.heads, C.dim, C.groups, _ROWS, C.act == "softmax")
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["max_entries", "num_sequences", "num_queries", "total_kv"])
def forward(desc_q, desc_k, desc_v, desc_o, out, lse, table, offsets_q, offsets_kv, counter,
            max_entries, num_sequences, num_queries, total_kv, query_tiles, scale, out_scale,
            C: tl.constexpr):  # fmt: skip
    """``out`` and ``lse`` of every entry of the table and every head; ``num_queries`` is T_q, or S of broadcast-Q.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, k_full, v_full | 1 + bytes | load | attend (q: its group; k, v: all groups) |
    | q_empty | 1 | with one tile of Q its attend group, after its last scores | load |
    | q_empty | 1 | with two its attend group, under the next item, when the output has left | load |
    | k_empty, v_empty | groups × 128 | every attend group, unless the block stays for the next item | load |
    | item_full, item_empty | 1, groups | load, every attend group | every attend group, load |
    | named 9 + g | 256 threads | the group before, having issued its products | group g, before issuing |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tiles = tlx.local_alloc((_ROWS, C.dim), DTYPE, C.groups * C.q_stages)
    k_tiles = tlx.local_alloc((C.block_kv, C.dim), DTYPE, C.k_stages)
    v_tiles = tlx.local_alloc((C.block_kv, C.dim), DTYPE, C.v_stages)
    o_tiles = q_tiles  # of two tiles of queries an item's own takes its output
    if C.q_stages == 1:
        o_tiles = tlx.local_alloc((_ROWS, C.dim), DTYPE, C.groups)
    q_full = tlx.alloc_barriers(C.groups * C.q_stages)
    q_empty = tlx.alloc_barriers(C.groups * C.q_stages)
    k_full = tlx.alloc_barriers(C.k_stages)
    k_empty = tlx.alloc_warp_barrier(C.k_stages, 4, C.groups)
    v_full = tlx.alloc_barriers(C.v_stages)
    v_empty = tlx.alloc_warp_barrier(C.v_stages, 4, C.groups)
    slots = tlx.local_alloc((1,), tl.int32, 2 * ITEM_SLOT)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, C.groups)
    where = (table, offsets_q, offsets_kv, max_entries, num_sequences, num_queries, total_kv, query_tiles)
    hand_out = (slots, item_full, item_empty)
    tiles = (q_tiles, k_tiles, v_tiles)
    loads = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    for_groups = (desc_o, out, lse, where, scale, out_scale, hand_out, tiles, o_tiles, loads)
    for_load = (desc_q, desc_k, desc_v, where, counter, hand_out, tiles, loads)
    # The default task has four warps: a load role of one leaves it to a group. The number of the first of the others.
    FIRST: tl.constexpr = 0 if C.load_warps == 4 else 1
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if C.load_warps == 4:
                load(*for_load, C)
            else:
                attend(0, *for_groups, C)
        if C.groups > FIRST:
            with tlx.async_task(num_warps=4, registers=C.registers, replicate=C.groups - FIRST):
                attend(tlx.async_task_replica_id() + FIRST, *for_groups, C)
        if C.load_warps == 1:
            with tlx.async_task(num_warps=1, registers=24):
                load(*for_load, C)
