# mypy: allow-untyped-defs
"""The backward kernel of self and cross attention for Hopper; ``_jit.backward_rows`` has what comes before and after.

``backward_kv`` keeps a tile of 128 keys, streams the queries that see it, and adds each query tile's share of dQ to an
fp32 sum in global memory; or leaves dQ to ``backward_queries``, where keys are few or a call must be repeatable, which
the order of additions is not. At head dim 64 a role of its own makes dQ; at 128, where the groups need its registers,
they do. The factor ``out_scale`` is left out of all scores' gradients until the end: the delta
handed in is divided by it, and dQ, dK and dV are multiplied by it once.

    dV = c P^T dO     dS = P (dO V^T - delta / c)     dK = c scale dS^T Q     dQ = c scale dS K     (c = out_scale)

``C`` is a ``Constants``: heads, group, dim, mask, act, fast_tanh; rows and keys of a tile of queries and of keys;
stages and ds_stages of the rings; dq, who makes it here: "groups", "role" or "none"; replicas (see the kernel).
"""

import triton
import triton.language as tl

from .._jit.backward_rows import first_query_of, key_item, masked, query_head, query_ranges
from .._jit.rings import ITEM_SLOT, next_item, pass_on, ragged, read_numbers, receive_numbers, ring
from .._jit.scores import LOG2E, activate, derivative, mask_kind, query_range
from .._jit.tlx import tlx

# Where a product leaves the elements of a 64 x 64 tile: of a lane, of a warp, of a register.
_PRODUCT_64X64 = tl.constexpr(tlx.layout(shape=((4, 8, 4), (2, 2, 8)), stride=((2, 64, 1024), (1, 512, 8))))


@triton.constexpr_function
def _holds_factors(dim, dq, act):
    """Whether a group has the registers for the factors of dP in fp32: it spares unpacking them."""
    return dim == 64 or (dq == "none" and act == "softmax")


@triton.constexpr_function
def _ways_out(dim):
    """Buffers through which dV and dK of a group leave: one each where there is room."""
    return 128 // dim


@triton.jit
def _take(number, turn, hand_out, where, C: tl.constexpr):
    """Look an item up and hand it to the other roles; they need not know its block of the row statistics."""
    slots, item_full, item_empty = hand_out
    item = key_item(number, *where, C.heads // C.group, C.rows, C.keys, C.mask)
    pass_on(slots, item_full, item_empty, turn, item[:8])
    return item


@triton.jit
def _load(desc_q, desc_k, desc_v, desc_do, row_stats, where, counter, hand_out, tiles, rows, loads,
          C: tl.constexpr):  # fmt: skip
    """Hand out the items, each looked up while the one before it is loaded, and bring their tiles."""
    q_tiles, do_tiles, k_tiles, v_tile = tiles
    lse_rows, delta_rows = rows
    q_full, do_full, tile_empty, k_full, k_empty, v_full, v_empty = loads
    SOFTMAX: tl.constexpr = C.act == "softmax"
    ROW_BYTES: tl.constexpr = C.dim * tlx.size_of(tlx.dtype_of(desc_q))
    TILE_BYTES: tl.constexpr = C.rows * (ROW_BYTES + (4 if SOFTMAX else 0))
    count = 0
    turn = 0
    item = _take(tl.program_id(0), turn, hand_out, where, C)
    while item[4] > 0:
        kv_head, start_q, len_q, begin, n, start_kv, len_kv, first_key, block = item
        following = item
        # Keys that no query sees are not loaded: what lies there may be NaN, and their gradients are 0.
        at_kv = ragged(start_kv, tl.where(len_q > 0, len_kv, 0), first_key, kv_head * C.dim)
        # Shared queries are not at their sequence's place, but the first rows of all.
        shared_q = start_q * (0 if C.replicas else 1)
        for trip in range(C.group * n):
            head = query_head(trip, kv_head, n, C.group)
            first_query = first_query_of(trip, begin, n, C.group, C.rows)
            buf, phase = ring(count, C.stages)
            stats = row_stats + (tl.cast(block + (first_query - begin) // C.rows, tl.int64) * C.heads + head) * (
                2 * C.rows
            )
            at = ragged(shared_q, len_q, first_query, head * C.dim)
            tlx.barrier_wait(tile_empty[buf], phase ^ 1)
            tlx.barrier_expect_bytes(q_full[buf], TILE_BYTES)
            tlx.async_descriptor_load(desc_q, q_tiles[buf], at, q_full[buf])
            if SOFTMAX:
                tlx.async_load(stats, lse_rows[buf], bulk=True, barrier=q_full[buf])
            if trip == 0:
                k_buf, k_phase = ring(turn, 2)
                tlx.barrier_wait(k_empty[k_buf], k_phase ^ 1)
                tlx.barrier_expect_bytes(k_full[k_buf], C.keys * ROW_BYTES)
                tlx.async_descriptor_load(desc_k, k_tiles[k_buf], at_kv, k_full[k_buf])
            at = ragged(start_q, len_q, first_query, head * C.dim)
            tlx.barrier_expect_bytes(do_full[buf], TILE_BYTES)
            tlx.async_descriptor_load(desc_do, do_tiles[buf], at, do_full[buf])
            if SOFTMAX:
                tlx.async_load(stats + C.rows, delta_rows[buf], bulk=True, barrier=do_full[buf])
            if trip == 0:
                tlx.barrier_wait(v_empty[0], (turn & 1) ^ 1)
                tlx.barrier_expect_bytes(v_full[0], C.keys * ROW_BYTES)
                tlx.async_descriptor_load(desc_v, v_tile[0], at_kv, v_full[0])
            if trip == tl.minimum(C.group * n - 1, 1):
                # When as much is under way as the rings hold: the look-up takes as long as a tile.
                following = _take(next_item(counter), turn + 1, hand_out, where, C)
            count += 1
        turn += 1
        item = following


@triton.jit
def _weights(s, lse_row, first_query, seen, scale, DTYPE: tl.constexpr, C: tl.constexpr):
    """From scores ``[keys, queries]``: the activated scores, rounded, and the factor of dP in their gradient.

    The factor is rounded where registers would not hold it. Keys and queries past the end are not masked:
    they are rows of zeros, whose scores of 0 give finite numbers, to be multiplied by such a row or not to be stored.
    """
    query_lo, query_hi, all_lo, all_hi = seen[0], seen[1], seen[2], seen[3]
    if C.act == "softmax":
        # The score of a row of zeros may exceed the lse by far: the minimum keeps it finite.
        p = tl.exp2(tl.minimum(s * (scale * LOG2E) - lse_row[None, :], 0.0))
        if mask_kind(C.mask) != "full":  # noqa: SIM102 - one is decided when this is compiled
            if (first_query < all_lo) | (first_query + C.rows > all_hi):
                p = masked(p, first_query, query_lo, query_hi, 1, 1, C.rows, C.mask)
        rounded = p.to(DTYPE)
        return rounded, p if _holds_factors(C.dim, C.dq, C.act) else rounded
    else:
        x = s * scale
        p = activate(x, C.act, C.fast_tanh)
        factor = derivative(x, C.act, C.fast_tanh)
        # Masked without a branch, which would cost registers here.
        if mask_kind(C.mask) != "full":
            p = masked(p, first_query, query_lo, query_hi, 1, 1, C.rows, C.mask)
            factor = masked(factor, first_query, query_lo, query_hi, 1, 1, C.rows, C.mask)
        return p.to(DTYPE), factor if _holds_factors(C.dim, C.dq, C.act) else factor.to(DTYPE)


@triton.jit
def _add(desc_sum, tile, dq, where, column):
    """Add 64 columns of a query tile's dQ, from ``column`` on, to the sum in global memory; see ``_where``."""
    tlx.local_store(tile, dq)
    tlx.fence("async_shared")
    at = [where[0], where[1], where[2], where[3] + column]
    tlx.async_descriptor_store(desc_sum, tile, at, store_reduce="add")


@triton.jit
def _tile(g: tl.constexpr, dk, dv, step, first_query, seen, last, scale, desc_sum, memory, DTYPE: tl.constexpr,
          C: tl.constexpr):  # fmt: skip
    """A tile of queries: its share of dK and dV, and dS; under that the groups' dQ of the tile before, ``last``."""
    trip, trips, count, turn = step
    tiles, rows, exchange, loads = memory
    q_tiles, do_tiles, k_tiles, v_tile = tiles
    lse_rows, delta_rows = rows
    ds_tiles, dq_tiles, _, ds_full, ds_empty = exchange
    q_full, do_full, tile_empty, _, k_empty, v_full, v_empty = loads
    HALF: tl.constexpr = C.keys // 2
    COLUMNS: tl.constexpr = C.dim // 2
    # The factor of dP waits for it in this group's part of the dS tile where registers would not hold it as well.
    PARK: tl.constexpr = C.act != "softmax" and C.dim == 128
    # Registers that hold the factors do not hold delta while dP is made, too.
    DELTA_IS_LATE: tl.constexpr = _holds_factors(C.dim, C.dq, C.act)
    buf, phase = ring(count, C.stages)
    ds_buf, ds_phase = ring(count, C.ds_stages)
    k_buf = turn % 2
    # Before a CTA's first tile there is none: this product of zeros is made and dropped.
    last_buf, last_phase = ring(count + (C.ds_stages - 1), C.ds_stages)
    tlx.barrier_wait(q_full[buf], phase)
    # Row statistics are read while products run: after those they would be waited for.
    lse_row = tl.zeros([C.rows], tl.float32)
    if C.act == "softmax":
        lse_row = tlx.local_load(lse_rows[buf])
    s = tlx.async_dot(tlx.local_slice(k_tiles[k_buf], [g * HALF, 0], [HALF, C.dim]), tlx.local_trans(q_tiles[buf]))
    if C.dq == "groups":
        if count > 0:
            tlx.barrier_wait(ds_full[last_buf], last_phase ^ 1)
        dq = tlx.async_dot(
            tlx.local_trans(ds_tiles[last_buf]),
            tlx.local_slice(k_tiles[last[4]], [0, g * COLUMNS], [C.keys, COLUMNS]),
        )
        s = tlx.async_dot_wait(1, s)
    else:
        s = tlx.async_dot_wait(0, s)
    p, factor = _weights(s, lse_row, first_query, seen, scale, DTYPE, C)
    if C.dq != "none" or PARK:
        own_ds = tlx.local_slice(ds_tiles[ds_buf], [g * HALF, 0], [HALF, C.rows])
    if PARK:
        if C.dq != "none":
            tlx.barrier_wait(ds_empty[ds_buf], ds_phase ^ 1)
        tlx.local_store(own_ds, factor)
    tlx.barrier_wait(do_full[buf], phase)
    if trip == 0:
        tlx.barrier_wait(v_full[0], turn & 1)
    dp = tlx.async_dot(tlx.local_slice(v_tile[0], [g * HALF, 0], [HALF, C.dim]), tlx.local_trans(do_tiles[buf]))
    if C.dq == "groups":
        tlx.async_descriptor_store_wait(0)
        dq = tlx.async_dot_wait(1, dq)
        if count > 0:
            tlx.barrier_arrive(ds_empty[last_buf], 1)
            if trip == 0:
                tlx.barrier_arrive(k_empty[last[4]], 1)
            _add(desc_sum, dq_tiles[g], dq, last, g * COLUMNS)
    dv = tlx.async_dot(p, do_tiles[buf], dv)
    if C.act == "softmax" and not DELTA_IS_LATE:
        delta_row = tlx.local_load(delta_rows[buf])
    dp = tlx.async_dot_wait(1, dp)
    if trip == trips - 1:
        tlx.barrier_arrive(v_empty[0], 1)
    if C.act == "softmax":
        if DELTA_IS_LATE:
            delta_row = tlx.local_load(delta_rows[buf])
        dp -= delta_row[None, :]
    if PARK:
        factor = tlx.local_load(own_ds, layout=_PRODUCT_64X64)
    ds = (factor.to(tl.float32) * dp).to(DTYPE)
    if C.dq != "none":
        if not PARK:
            tlx.barrier_wait(ds_empty[ds_buf], ds_phase ^ 1)
        tlx.local_store(own_ds, ds)
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_full[ds_buf], 1)
    dk = tlx.async_dot(ds, q_tiles[buf], dk)
    dv = tlx.async_dot_wait(1, dv)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(tile_empty[buf], 1)
    return dk, dv


@triton.jit
def _dq_of(g: tl.constexpr, count, last, desc_sum, memory, C: tl.constexpr):
    """The dQ of the tile before the ``count``-th, by itself."""
    k_tiles = memory[0][2]
    ds_tiles, dq_tiles, _, ds_full, ds_empty = memory[2]
    COLUMNS: tl.constexpr = C.dim // 2
    buf, phase = ring(count + (C.ds_stages - 1), C.ds_stages)
    tlx.barrier_wait(ds_full[buf], phase ^ 1)
    dq = tlx.async_dot(
        tlx.local_trans(ds_tiles[buf]), tlx.local_slice(k_tiles[last[4]], [0, g * COLUMNS], [C.keys, COLUMNS])
    )
    tlx.async_descriptor_store_wait(0)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(ds_empty[buf], 1)
    _add(desc_sum, dq_tiles[g], dq, last, g * COLUMNS)


@triton.jit
def _pass_by(g: tl.constexpr, step, last, desc_sum, memory, DTYPE: tl.constexpr, C: tl.constexpr):
    """What ``_tile`` does for the other group, and the dQ of the tile before, by one whose keys no query of it sees."""
    trip, trips, count, turn = step
    _, _, exchange, loads = memory
    ds_tiles, _, _, ds_full, ds_empty = exchange
    q_full, do_full, tile_empty, _, k_empty, v_full, v_empty = loads
    HALF: tl.constexpr = C.keys // 2
    buf, phase = ring(count, C.stages)
    tlx.barrier_wait(q_full[buf], phase)
    tlx.barrier_wait(do_full[buf], phase)
    if trip == 0:
        tlx.barrier_wait(v_full[0], turn & 1)
    if trip == trips - 1:
        tlx.barrier_arrive(v_empty[0], 1)
    if C.dq == "groups":  # noqa: SIM102 - one is decided when this is compiled
        if count > 0:
            _dq_of(g, count, last, desc_sum, memory, C)
            if trip == 0:
                tlx.barrier_arrive(k_empty[last[4]], 1)
    if C.dq != "none":
        ds_buf, ds_phase = ring(count, C.ds_stages)
        tlx.barrier_wait(ds_empty[ds_buf], ds_phase ^ 1)
        own_ds = tlx.local_slice(ds_tiles[ds_buf], [g * HALF, 0], [HALF, C.rows])
        tlx.local_store(own_ds, tl.zeros([HALF, C.rows], DTYPE))
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_full[ds_buf], 1)
    tlx.barrier_arrive(tile_empty[buf], 1)


@triton.jit
def _first_row_of_sum(start_q, len_q, C: tl.constexpr):
    """The row of the sum that the first query of an item is added to."""
    return tl.program_id(0) % C.replicas * len_q if C.replicas else start_q


@triton.jit
def _where(trip, turn, item, C: tl.constexpr):
    """Where the dQ of a tile of queries belongs, in coordinates of the sum, and the buffer of its keys."""
    kv_head, len_q, begin, n, rows_dq = item
    head = query_head(trip, kv_head, n, C.group)
    c0, c1, c2, c3 = ragged(rows_dq, len_q, first_query_of(trip, begin, n, C.group, C.rows), head * C.dim)
    return c0, c1, c2, c3, turn % 2


@triton.jit
def _tiles(g: tl.constexpr, count, turn, seen, item, last, scale, desc_sum, memory, DTYPE: tl.constexpr,
           C: tl.constexpr):  # fmt: skip
    """dK and dV of an item, from all tiles of queries; those that see none of the group's keys it passes by.

    Returns:
        dK; dV; where the last tile's dQ belongs.
    """
    begin, n = item[2], item[3]
    dk = tl.zeros([C.keys // 2, C.dim], tl.float32)
    dv = tl.zeros([C.keys // 2, C.dim], tl.float32)
    for trip in tl.range(0, C.group * n, disable_licm=True):
        step = (trip, C.group * n, count + trip, turn)
        first_query = first_query_of(trip, begin, n, C.group, C.rows)
        if mask_kind(C.mask) == "full":
            dk, dv = _tile(g, dk, dv, step, first_query, seen, last, scale, desc_sum, memory, DTYPE, C)
        else:
            if (first_query < seen[5]) & (first_query + C.rows > seen[4]):
                dk, dv = _tile(g, dk, dv, step, first_query, seen, last, scale, desc_sum, memory, DTYPE, C)
            else:
                _pass_by(g, step, last, desc_sum, memory, DTYPE, C)
        last = _where(trip, turn, item, C)
    return dk, dv, last


@triton.jit
def _gradients(g: tl.constexpr, desc_sum, desc_dk, desc_dv, scale, out_scale, hand_out, tiles, rows, exchange, loads,
               C: tl.constexpr):  # fmt: skip
    """Group g's 64 keys: their dK and dV, and columns ``[g D/2, (g + 1) D/2)`` of the dQ of all 128, if groups make it.

    The groups meet only in the ring of dS. That dQ of a query tile is made one tile late, under the next tile's
    exponentials, so that neither waits for the other's dS; that of an item's last tile under the next item's first.
    """
    slots, item_full, item_empty = hand_out
    memory = (tiles, rows, exchange, loads)
    out_tiles = exchange[2]
    k_full, k_empty = loads[3], loads[4]
    HALF: tl.constexpr = C.keys // 2
    WAYS_OUT: tl.constexpr = _ways_out(C.dim)
    DTYPE: tl.constexpr = tlx.dtype_of(desc_dk)
    count = 0
    turn = 0
    kv_head, start_q, len_q, begin, n = receive_numbers(slots, item_full, turn, 0, 5)
    start_kv, len_kv, first_key = read_numbers(slots, turn, 5, 8)
    # Nobody's: it is dropped.
    last = _where(0, 0, (kv_head, len_q, begin, tl.maximum(n, 1), start_q), C)
    while n > 0:
        rows_dq = _first_row_of_sum(start_q, len_q, C)
        seen = (tl.zeros([HALF], tl.int32), tl.zeros([HALF], tl.int32), 0, 0, 0, 0)
        if mask_kind(C.mask) != "full":
            own_key = first_key + g * HALF
            any_lo = query_range(own_key, len_q, len_kv, C.mask)[0]
            any_hi = query_range(tl.minimum(own_key + HALF, len_kv) - 1, len_q, len_kv, C.mask)[1]
            any_hi = tl.where(own_key < len_kv, any_hi, 0)
            lo, hi, all_lo, all_hi = query_ranges(own_key, len_q, len_kv, HALF, C.mask)
            seen = (lo, hi, all_lo, all_hi, any_lo, any_hi)
        k_buf, k_phase = ring(turn, 2)
        tlx.barrier_wait(k_full[k_buf], k_phase)
        item = (kv_head, len_q, begin, n, rows_dq)
        if g == 0 or mask_kind(C.mask) != "full":
            dk, dv, last = _tiles(g, count, turn, seen, item, last, scale, desc_sum, memory, DTYPE, C)
        else:
            # A loop of its own: a test in the other one would cost it registers.
            if first_key + HALF < len_kv:
                dk, dv, last = _tiles(g, count, turn, seen, item, last, scale, desc_sum, memory, DTYPE, C)
            else:
                dk = tl.zeros([HALF, C.dim], tl.float32)
                dv = tl.zeros([HALF, C.dim], tl.float32)
                for trip in range(C.group * n):
                    _pass_by(g, (trip, C.group * n, count + trip, turn), last, desc_sum, memory, DTYPE, C)
                    last = _where(trip, turn, item, C)
        if C.dq == "none":
            tlx.barrier_arrive(k_empty[k_buf], 1)
        count += C.group * n
        # Where the keys are is read now: kept from the start, it would cost registers in the loop above.
        start_kv, len_kv, first_key = read_numbers(slots, turn, 5, 8)
        at = ragged(start_kv, len_kv, first_key + g * HALF, kv_head * C.dim)
        # The next item arrives under the stores of this one, whose slot is free.
        tlx.barrier_arrive(item_empty[turn % 2], 1)
        turn += 1
        following = receive_numbers(slots, item_full, turn, 0, 5)
        following_keys = read_numbers(slots, turn, 5, 8)
        # What went before has been read from these buffers.
        tlx.async_descriptor_store_wait(0)
        dv_tile, dk_tile = out_tiles[g * WAYS_OUT], out_tiles[g * WAYS_OUT + WAYS_OUT - 1]
        tlx.local_store(dv_tile, (dv * out_scale).to(DTYPE))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(desc_dv, dv_tile, at)
        if WAYS_OUT == 1:
            tlx.async_descriptor_store_wait(0)
        tlx.local_store(dk_tile, (dk * (scale * out_scale)).to(DTYPE))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(desc_dk, dk_tile, at)
        kv_head, start_q, len_q, begin, n = following
        start_kv, len_kv, first_key = following_keys
    if C.dq == "groups":  # noqa: SIM102 - one is decided when this is compiled
        if count > 0:
            _dq_of(g, count, last, desc_sum, memory, C)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def _query_gradients(desc_sum, hand_out, tiles, exchange, loads, C: tl.constexpr):
    """The role of dQ: from the dS of both groups that of each tile of queries."""
    slots, item_full, item_empty = hand_out
    k_tiles = tiles[2]
    ds_tiles, dq_tiles, _, ds_full, ds_empty = exchange
    k_empty = loads[4]
    count = 0
    turn = 0
    kv_head, start_q, len_q, begin, n = receive_numbers(slots, item_full, turn, 0, 5)
    while n > 0:
        tlx.barrier_arrive(item_empty[turn % 2], 1)
        item = (kv_head, len_q, begin, n, _first_row_of_sum(start_q, len_q, C))
        for trip in range(C.group * n):
            buf, phase = ring(count, C.ds_stages)
            where = _where(trip, turn, item, C)
            # The keys are there, too: dS was made from them.
            tlx.barrier_wait(ds_full[buf], phase)
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[buf]), k_tiles[turn % 2])
            # The tile before the last has been read from its buffer.
            tlx.async_descriptor_store_wait(1)
            dq = tlx.async_dot_wait(0, dq)
            tlx.barrier_arrive(ds_empty[buf], 1)
            _add(desc_sum, dq_tiles[count % 2], dq, where, 0)
            count += 1
        tlx.barrier_arrive(k_empty[turn % 2], 1)
        turn += 1
        kv_head, start_q, len_q, begin, n = receive_numbers(slots, item_full, turn, 0, 5)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_kv", "items"])
def backward_kv(desc_q, desc_k, desc_v, desc_do, desc_sum, desc_dk, desc_dv, row_stats, table, counter,
                offsets_q, offsets_kv, num_sequences, total_q, total_kv, items, scale, out_scale,
                C: tl.constexpr):  # fmt: skip
    """dK and dV: persistent, a work item is a key tile of a key head.

    Unless ``dq`` is "none", dQ / (scale out_scale) is added to a sum in global memory. With ``replicas``
    the queries are shared by all sequences: ``offsets_q`` are those of dO, and dQ is added to one of that many sums, so
    that few CTAs add to the same rows. In the loop over queries the groups free buffers thread by thread: an arrival
    for all would make their warps meet twice each time.

    | barrier | count | arrives | waits |
    |---|---|---|---|
    | q_full, do_full | 1 + bytes | load: Q and lse; dO and delta | both gradient groups |
    | k_full, v_full | 1 + bytes | load, once an item | both gradient groups |
    | tile_empty | 2 × 128 | both groups, after dK, the last product of a tile of Q and dO | load |
    | k_empty | 2 × 128 | both groups, after the item's last dQ, under the next one's first tile | load |
    | k_empty | 128 | or the role of dQ, after the item's last dQ | load |
    | k_empty | 2 × 128 | or, without dQ, both groups, after the item's last tile | load |
    | v_empty | 2 × 128 | both groups, after the item's last dP | load |
    | ds_full | 2 × 128 | both groups, each with its half of the keys | who makes dQ |
    | ds_empty | 2 × 128, 128 | who makes dQ, after it | both groups, before they store the next dS |
    | item_full | 1 | load, when the slot holds an item | all others |
    | item_empty | 2, 3 | all others, when its slot has been read for the last time | load |
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    k_tiles = tlx.local_alloc((C.keys, C.dim), DTYPE, 2)
    v_tile = tlx.local_alloc((C.keys, C.dim), DTYPE, 1)
    q_tiles = tlx.local_alloc((C.rows, C.dim), DTYPE, C.stages)
    do_tiles = tlx.local_alloc((C.rows, C.dim), DTYPE, C.stages)
    MAKERS: tl.constexpr = 1 if C.dq == "role" else 2
    # At head dim 128 all leaves through one buffer of each group, which at 64 would not be where dQ's is.
    tl.static_assert(C.dq != "groups" or C.dim == 128)
    way_out = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    out_tiles = tlx.local_alloc((C.keys // 2, C.dim), DTYPE, 2 * _ways_out(C.dim), reuse=way_out)
    if C.dq == "role":
        dq_tiles = tlx.local_alloc((C.rows, C.dim), tl.float32, 2)
    else:
        dq_tiles = tlx.local_alloc((C.rows, C.dim // 2), tl.float32, 2, reuse=way_out)
    ds_tiles = out_tiles  # not read
    if C.dq != "none" or C.act != "softmax":
        ds_tiles = tlx.local_alloc((C.keys, C.rows), DTYPE, C.ds_stages)
    lse_rows = tlx.local_alloc((C.rows,), tl.float32, C.stages)
    delta_rows = tlx.local_alloc((C.rows,), tl.float32, C.stages)
    q_full = tlx.alloc_barriers(C.stages)
    tile_empty = tlx.alloc_warp_barrier(C.stages, 4, 2)
    do_full = tlx.alloc_barriers(C.stages)
    k_full = tlx.alloc_barriers(2)
    k_empty = tlx.alloc_warp_barrier(2, 4, MAKERS)
    v_full = tlx.alloc_barriers(1)
    v_empty = tlx.alloc_warp_barrier(1, 4, 2)
    ds_full = tlx.alloc_warp_barrier(C.ds_stages, 4, 2)
    ds_empty = tlx.alloc_warp_barrier(C.ds_stages, 4, MAKERS)
    slots = tlx.local_alloc((1,), tl.int32, 2 * ITEM_SLOT)
    item_full = tlx.alloc_barriers(2)
    item_empty = tlx.alloc_barriers(2, 4 - MAKERS)
    if C.dq == "groups":
        # The first dQ of all, which is dropped, reads the last buffer. Only dQ's wait before a dS guards that.
        tlx.local_store(ds_tiles[C.ds_stages - 1], tl.zeros([C.keys, C.rows], DTYPE))
        tlx.fence("async_shared")
    where = (items, table, offsets_q, offsets_kv, num_sequences, total_q, total_kv)
    hand_out = (slots, item_full, item_empty)
    tiles = (q_tiles, do_tiles, k_tiles, v_tile)
    rows = (lse_rows, delta_rows)
    exchange = (ds_tiles, dq_tiles, out_tiles, ds_full, ds_empty)
    loads = (q_full, do_full, tile_empty, k_full, k_empty, v_full, v_empty)
    for_load = (desc_q, desc_k, desc_v, desc_do, row_stats, where, counter, hand_out, tiles, rows, loads)
    for_groups = (desc_sum, desc_dk, desc_dv, scale, out_scale, hand_out, tiles, rows, exchange, loads)
    # The default task has four warps: a load role of one leaves it to a group. Where groups make dQ, it is slower.
    LOAD_WARPS: tl.constexpr = 1 if C.dq == "role" else 4
    # The number of the first of the other groups.
    FIRST: tl.constexpr = 0 if LOAD_WARPS == 4 else 1
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if LOAD_WARPS == 4:
                _load(*for_load, C)
            else:
                _gradients(0, *for_groups, C)
        # With the load role's 24, all registers there are.
        with tlx.async_task(num_warps=4, registers=208 if C.dq == "role" else 240, replicate=2 - FIRST):
            _gradients(tlx.async_task_replica_id() + FIRST, *for_groups, C)
        if C.dq == "role":
            with tlx.async_task(num_warps=4, registers=72):
                _query_gradients(desc_sum, hand_out, tiles, exchange, loads, C)
        if LOAD_WARPS == 1:
            with tlx.async_task(num_warps=1, registers=24):
                _load(*for_load, C)
