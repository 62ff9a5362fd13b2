# mypy: allow-untyped-defs
"""Where the rows of a tile are: bounds of sequences, addresses, loads and stores that stay inside them.

Addresses are 64-bit before any multiply: ``row * stride`` passes 2**31 although the tensor is small, when it is a
narrow block of columns of a wide buffer.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_rows(offsets, b, num_sequences, total_rows):
    """First row (int64) and number of rows (int32) of sequence ``b``, clamped to the rows that exist.

    Sequence B stands for the rows after the last sequence, which belong to none. ``offsets`` may be empty if B = 0.
    """
    i = tl.minimum(b, tl.maximum(num_sequences - 1, 0))
    present = num_sequences > 0
    start = tl.load(offsets + i, mask=present, other=0).to(tl.int64)
    end = tl.load(offsets + i + 1, mask=present, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), total_rows)
    end = tl.maximum(tl.minimum(tl.maximum(end, 0), total_rows), start)
    if b >= num_sequences:
        start = end
        end = end * 0 + total_rows
    return start, (end - start).to(tl.int32)


@triton.jit
def partner_rows(offsets, b, num_sequences, total_rows):
    """``sequence_rows`` of the other side: the rows of no sequence have no keys, and no queries."""
    start, length = sequence_rows(offsets, b, num_sequences, total_rows)
    if b >= num_sequences:
        length = length * 0
    return start, length


@triton.jit
def row_pointers(base, first_row, row_stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers ``[BLOCK, BLOCK_D]`` to rows ``first_row + 0, 1, ...`` of a matrix with contiguous columns."""
    rows = tl.cast(first_row, tl.int64) + tl.arange(0, BLOCK)
    return base + rows[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def tile_offsets(row_stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """What ``row_pointers`` adds to the pointer to the tile's first element: 64-bit numbers only if WIDE.

    A loop that streams tiles keeps these and moves one scalar pointer. The caller sets WIDE unless ``BLOCK`` strides
    fit into 31 bits.
    """
    rows = tl.arange(0, BLOCK)
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(pointers, row_ok, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """The tile, with 0 in the columns past D and, if ROWS, in the rows that are not ok.

    What lies there belongs to others and may be NaN, so it is not read.
    """
    if ROWS:
        if D == BLOCK_D:
            return tl.load(pointers, mask=row_ok[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=row_ok[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)


@triton.jit
def store_tile(pointers, tile, row_ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows that are ok, columns below D, in the pointers' dtype."""
    if D == BLOCK_D:
        ok = row_ok[:, None]
    else:
        ok = row_ok[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=ok)


@triton.jit
def count_tiles(table, max_tiles):
    """Entries of a tile table before its padding of -1, by bisection."""
    low = max_tiles * 0
    high = max_tiles
    while low < high:
        middle = (low + high) // 2
        if tl.load(table + 2 * middle) >= 0:
            low = middle + 1
        else:
            high = middle
    return low
