"""Tile tables: the units of work of a jagged kernel, made on the device so that no length is ever waited for."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..layout import row_bounds

Side = Literal["q", "kv"]
# One tile holds any sequence: a table of such tiles is the non-empty sequences in the order of their lengths.
WHOLE_SEQUENCE = 2**30


@dataclass(frozen=True)
class TableRequest:
    """A table that a backend asks for, described by static facts alone.

    Attributes:
        rows: whose rows are cut into tiles.
        block: rows of a tile.
        cost: whose lengths order the sequences, longest first; a tile's work grows with them.
    """

    rows: Side
    block: int
    cost: Side


def max_tiles(total_rows: int, num_sequences: int, block: int) -> int:
    """The most tiles of ``block`` rows that B sequences and the rows of no sequence can make."""
    return total_rows // block + num_sequences + 1


def tile_table(offsets: Tensor, cost_offsets: Tensor, total_rows: int, cost_rows: int, block: int) -> Tensor:
    """Cut every sequence into tiles, sequences with the most work first.

    A grid that takes the table's entries in order starts its longest tiles first, so that none is left for the end.

    Args:
        offsets: ``[B + 1]``, of the tensor that is cut.
        cost_offsets: ``[B + 1]``, of the tensor whose sequence lengths order the tiles.
        total_rows: rows of the tensor that is cut.
        cost_rows: rows of the tensor that ``cost_offsets`` describes.
        block: rows of a tile.

    Returns:
        ``[max_tiles, 2]`` int32 on the offsets' device: the sequence and the tile's first row in it. Tiles of sequence
        B, after all others, hold the rows that belong to no sequence; entries after the last tile are -1, 0.
    """
    num_sequences = max(offsets.numel() - 1, 0)
    starts, ends = row_bounds(offsets, total_rows)
    cost_starts, cost_ends = row_bounds(cost_offsets, cost_rows)
    order = torch.argsort(cost_ends - cost_starts, descending=True, stable=True)
    used = ends[-1:] if num_sequences else ends.new_zeros(1)
    lengths = torch.cat([(ends - starts)[order], total_rows - used])
    sequences = torch.cat([order, order.new_full((1,), num_sequences)])

    tiles = (lengths + (block - 1)) // block
    tile_ends = tiles.cumsum(0)
    index = torch.arange(max_tiles(total_rows, num_sequences, block), device=offsets.device)
    slot = torch.searchsorted(tile_ends, index, right=True)
    is_tile = slot <= num_sequences
    slot = slot.clamp(max=num_sequences)
    first_row = (index - (tile_ends - tiles)[slot]) * block
    table = torch.stack([torch.where(is_tile, sequences[slot], -1), torch.where(is_tile, first_row, 0)], dim=1)
    return table.to(torch.int32)
