"""Sizes of the Hopper kernels: what is legal, and what is chosen for a call."""

from dataclasses import dataclass
from functools import lru_cache

from ..masks import BlockDiagonal, Full, Mask, SlidingWindow
from .arch import shared_bytes_per_program

# Shared memory of an sm_90 multiprocessor that the system takes for itself, from each CTA's share.
_SYSTEM_BYTES = 1024
# Rows of one wgmma.
ROWS = 64
# Barriers take 8 bytes each and come after the tiles; with their alignment no kernel here needs more.
_BARRIER_BYTES = 1024


@dataclass(frozen=True)
class ForwardConfig:
    """The sizes of the forward kernel.

    Attributes:
        block_kv: keys of a block.
        groups: consumer warp groups, 64 query rows each.
        k_stages: blocks of keys in flight.
        v_stages: blocks of values in flight.
        registers: of a thread of a consumer group.
        turns: whether the two groups take turns at issuing products.
        q_stages: tiles of queries; with two the next item's come while this one is computed.
        ctas_per_processor: CTAs that share a multiprocessor.
        run: entries of the tile table that a CTA takes at once for one head, for keys to stay from one to the next.
    """

    block_kv: int
    groups: int
    k_stages: int
    v_stages: int
    registers: int
    turns: bool
    q_stages: int = 2
    ctas_per_processor: int = 1
    run: int = 1

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return ROWS * self.groups

    @property
    def keys_in_flight(self) -> int:
        """The most keys whose blocks, and those of their values, the rings hold at once."""
        return min(self.k_stages, self.v_stages) * self.block_kv

    @property
    def max_registers(self) -> int | None:
        """The compiler's limit, which makes room for a second CTA; ``None``: its own."""
        return 128 if self.ctas_per_processor == 2 else None

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a CTA: queries and output, keys, values, barriers."""
        rows = (self.q_stages + 1) * self.block_q + (self.k_stages + self.v_stages) * self.block_kv
        return rows * head_dim * itemsize + _BARRIER_BYTES

    def refusal(self, head_dim: int, itemsize: int) -> str | None:
        """Why this config does not run such a call; ``None`` if it does."""
        if self.turns and self.groups != 2:
            return f"turns are for two groups, got {self.groups}"
        if self.run > 1 and self.q_stages == 1:
            return f"a run of {self.run} entries needs two tiles of queries, got one"
        needed, alone = self.shared_bytes(head_dim, itemsize), shared_bytes_per_program((9, 0), is_hip=False)
        limit = (alone + _SYSTEM_BYTES) // self.ctas_per_processor - _SYSTEM_BYTES
        if needed > limit:
            return f"{self} needs {needed} bytes of shared memory, of {limit}"
        return None


# Measured on an H200: docs/performance-log.md.
_PAIR = {64: ForwardConfig(128, 2, 3, 3, 232, True), 128: ForwardConfig(128, 2, 2, 2, 232, True)}
# Shared queries meet whole sequences: long items, for which a block of values more is worth more than queries early.
_PAIR_SHARED = {64: _PAIR[64], 128: ForwardConfig(128, 2, 2, 3, 232, True, 1)}
_SINGLE = {64: ForwardConfig(64, 1, 5, 5, 208, False, 1, 2), 128: ForwardConfig(64, 1, 3, 2, 208, False, 1, 2)}


# A row that sees no more keys than this is narrow: its tile is best as small as the rows of one group. Measured for
# windows of 101 and 201 keys, 2048 long: 1.67 and 2.16 ms by single groups, 2.14 and 3.02 by pairs.
_NARROW = 256


def keys_seen(mask: Mask) -> int | None:
    """The most keys that a row can see, if the mask bounds them."""
    if isinstance(mask, BlockDiagonal):
        return mask.size
    if isinstance(mask, SlidingWindow) and mask.left is not None and mask.right is not None:
        return mask.left + mask.right + 1
    return None


@lru_cache(maxsize=1024)
def forward_config(head_dim: int, num_queries: int | None, mask: Mask) -> ForwardConfig:
    """The config of the forward kernel.

    Args:
        head_dim: D, 64 or 128.
        num_queries: S of broadcast-Q; ``None`` for self and cross attention.
        mask: of the call.
    """
    seen = keys_seen(mask)
    if (num_queries is not None and num_queries <= ROWS) or (seen is not None and seen <= _NARROW):
        return _SINGLE[head_dim]
    return (_PAIR if num_queries is None else _PAIR_SHARED)[head_dim]


# Entries of a run, and the fewest runs for each multiprocessor: whole runs are handed out, so the last of them must be
# short beside all the others.
RUN = 4
_RUNS_PER_PROCESSOR = 16


def forward_run(
    kind: str, head_dim: int, mask: Mask, rows: tuple[int, int], num_sequences: int, items: int, processors: int
) -> int:
    """``run`` of a call: more than 1 for cross attention in which keys mostly stay in shared memory.

    Lengths are on the device, so the mean sequence decides: its keys fit the rings, and its queries are a tile and a
    half or more. Elsewhere keys do not stay, and runs only part CTAs that read the same keys at a time, from the L2
    cache. Of self-attention most tiles are of sequences too long to stay where the mean one has two.

    Args:
        kind: of the call, as in ``AttentionSpec``.
        head_dim: D, 64 or 128.
        mask: of the call.
        rows: T_q and T_kv.
        num_sequences: B.
        items: entries of the tile table times heads.
        processors: multiprocessors of the device.
    """
    if kind != "cross" or mask != Full() or items < RUN * _RUNS_PER_PROCESSOR * processors:
        return 1
    config = forward_config(head_dim, None, mask)
    rows_q, rows_kv = rows
    # An eighth more: rows of no sequence, such as those that fill a buffer up, are counted in.
    has_few_keys = 8 * rows_kv <= 9 * num_sequences * config.keys_in_flight
    has_tiles = 2 * rows_q >= 3 * num_sequences * config.block_q
    return RUN if has_few_keys and has_tiles else 1
