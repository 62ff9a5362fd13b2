# mypy: allow-untyped-defs
"""Tile tables made by one kernel: ``schedule.tiles.tile_table`` on a GPU takes fifteen launches for the same table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...schedule.tiles import max_tiles
from .prepared import PreparedKernel

# Each program compares its sequences with all others, so the work grows with B squared.
MAX_SEQUENCES = 8192
_ROWS = 32


@triton.jit
def _lengths(offsets, b, num_sequences, total_rows):
    """Rows of sequences ``b [N]``, clamped as in ``jagged.sequence_rows``; sequence B is the rows of none."""
    last = tl.maximum(num_sequences - 1, 0)
    present = (b >= 0) & (num_sequences > 0)
    start = tl.load(offsets + tl.minimum(b, last), mask=present, other=0).to(tl.int64)
    end = tl.load(offsets + tl.minimum(b, last) + 1, mask=present, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), total_rows)
    end = tl.maximum(tl.minimum(tl.maximum(end, 0), total_rows), start)
    return tl.where(b < num_sequences, end - start, total_rows - end).to(tl.int32)


@triton.jit
def _ranks(i, cost_i, offsets, cost_offsets, num_sequences, total_rows, cost_rows, BLOCK: tl.constexpr,
           ROWS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """How many tiles the sequences have that come before each of ``i``, and how many all have."""
    before = tl.zeros([ROWS], tl.int32)
    total = num_sequences * 0
    for first in range(0, num_sequences, CHUNK):
        j = first + tl.arange(0, CHUNK)
        rows = _lengths(offsets, j, num_sequences, total_rows)
        cost = _lengths(cost_offsets, j, num_sequences, cost_rows)
        tiles = tl.where(j < num_sequences, (rows + (BLOCK - 1)) // BLOCK, 0)
        earlier = (j[None, :] < i[:, None]) & (cost[None, :] == cost_i[:, None])
        earlier = earlier | (cost[None, :] > cost_i[:, None]) | (i >= num_sequences)[:, None]
        before += tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
        total += tl.sum(tiles, 0)
    return before, total


@triton.jit(do_not_specialize=["num_sequences", "total_rows", "cost_rows", "num_entries"])
def _fill_table(offsets, cost_offsets, table, num_sequences, total_rows, cost_rows, num_entries, BLOCK: tl.constexpr,
                ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The entries of ROWS sequences, and this program's share of the entries that stand for nothing.

    A sequence's first entry is the number of tiles of all sequences that cost more, or as much and are numbered lower:
    counted, not sorted, so that no program waits for another. Sequence B, the rows of none, comes last.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = _lengths(offsets, i, num_sequences, total_rows)
    cost = _lengths(cost_offsets, i, num_sequences, cost_rows)
    before, total = _ranks(i, cost, offsets, cost_offsets, num_sequences, total_rows, cost_rows, BLOCK, ROWS, CHUNK)
    tiles = tl.where(i <= num_sequences, (rows + (BLOCK - 1)) // BLOCK, 0)
    most = tl.max(tiles, 0)
    for first in range(0, most, STEP):
        t = first + tl.arange(0, STEP)
        entry = table + 2 * (before[:, None] + t[None, :])
        ok = t[None, :] < tiles[:, None]
        tl.store(entry, tl.broadcast_to(i[:, None], (ROWS, STEP)), mask=ok)
        tl.store(entry + 1, tl.broadcast_to(t[None, :] * BLOCK, (ROWS, STEP)), mask=ok)
    rest = tl.max(_lengths(offsets, num_sequences + tl.zeros([1], tl.int32), num_sequences, total_rows), 0)
    used = total + (rest + (BLOCK - 1)) // BLOCK
    for first in range(used + tl.program_id(0) * CHUNK, num_entries, tl.num_programs(0) * CHUNK):
        n = first + tl.arange(0, CHUNK)
        tl.store(table + 2 * n, tl.full([CHUNK], -1, tl.int32), mask=n < num_entries)
        tl.store(table + 2 * n + 1, tl.zeros([CHUNK], tl.int32), mask=n < num_entries)


_KERNELS: dict[int, PreparedKernel] = {}


def tile_table(offsets: Tensor, cost_offsets: Tensor, total_rows: int, cost_rows: int, block: int) -> Tensor:
    """``schedule.tiles.tile_table``, the same numbers, for at most ``MAX_SEQUENCES`` sequences."""
    num_sequences = max(offsets.numel() - 1, 0)
    entries = max_tiles(total_rows, num_sequences, block)
    table = torch.empty((entries, 2), dtype=torch.int32, device=offsets.device)
    if block not in _KERNELS:
        constants = {"BLOCK": block, "ROWS": _ROWS, "CHUNK": 256, "STEP": 32}
        _KERNELS[block] = PreparedKernel(_fill_table, constants, {"num_warps": 4})
    _KERNELS[block].launch(
        num_sequences // _ROWS + 1,
        (offsets.contiguous(), cost_offsets.contiguous(), table),
        (num_sequences, total_rows, cost_rows, entries),
        (),
    )
    return table
