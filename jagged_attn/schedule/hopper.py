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
        registers: of a thread of a consumer group; with ``load_warps`` of 1, the first has what the others leave.
        turns: whether the groups take turns at issuing products.
        ctas_per_processor: CTAs that share a multiprocessor.
        run: entries of the tile table that a CTA takes at once for one head, for keys to stay from one to the next.
        load_warps: of the load role: 1, or the 4 of the compiler's default task, which else is a consumer group's.
    """

    block_kv: int
    groups: int
    k_stages: int
    v_stages: int
    registers: int
    turns: bool
    ctas_per_processor: int = 1
    run: int = 1
    load_warps: int = 4

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return ROWS * self.groups

    @property
    def q_stages(self) -> int:
        """Tiles of queries: with two the next item's come under this one, and outputs leave through them."""
        return 1 if self.groups == 1 else 2

    @property
    def keys_in_flight(self) -> int:
        """The most keys whose blocks, and those of their values, the rings hold at once."""
        return min(self.k_stages, self.v_stages) * self.block_kv

    @property
    def max_registers(self) -> int | None:
        """The compiler's limit, which makes room for a second CTA; ``None``: its own."""
        return 128 if self.ctas_per_processor == 2 else None

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a CTA: two tiles of queries, or one and the output; keys, values, barriers."""
        rows = 2 * self.block_q + (self.k_stages + self.v_stages) * self.block_kv
        return rows * head_dim * itemsize + _BARRIER_BYTES

    def refusal(self, head_dim: int, itemsize: int) -> str | None:
        """Why this config does not run such a call; ``None`` if it does."""
        if self.load_warps not in (1, 4):
            return f"load_warps must be 1 or 4, got {self.load_warps}"
        if self.groups == 1 and (self.turns or self.run > 1):
            return f"one group has nobody to take turns with, and no second tile of queries for runs, got {self}"
        needed, alone = self.shared_bytes(head_dim, itemsize), shared_bytes_per_program((9, 0), is_hip=False)
        limit = (alone + _SYSTEM_BYTES) // self.ctas_per_processor - _SYSTEM_BYTES
        if needed > limit:
            return f"{self} needs {needed} bytes of shared memory, of {limit}"
        return None


# Measured on an H200: docs/performance-log.md. Three groups hide more of the beginning and the end of one another's
# items, and read keys less often; their blocks must be small, for the registers. A load role of one warp gains 1 to 2 %
# where it is said to be one; of pairs and threes at D = 128 it costs 0 to 1 %.
_TRIPLE = {
    64: ForwardConfig(64, 3, 6, 6, 160, False, load_warps=1),
    128: ForwardConfig(64, 3, 4, 4, 160, False),
}
_PAIR = {64: ForwardConfig(128, 2, 3, 3, 232, False), 128: ForwardConfig(128, 2, 2, 2, 232, True)}
# Shared queries meet whole sequences: long items, for which a block of values more is worth it.
_PAIR_SHARED = {
    64: ForwardConfig(128, 2, 3, 3, 232, True, load_warps=1),
    128: ForwardConfig(128, 2, 2, 3, 232, True, load_warps=1),
}
_SINGLE = {
    64: ForwardConfig(64, 1, 5, 5, 232, False, 2, load_warps=1),
    128: ForwardConfig(64, 1, 2, 3, 232, False, 2, load_warps=1),
}

# The most keys of the mean sequence for which three groups are faster, by head dim: at 64 always. At 128 lengths of 512
# gain 10 %, of up to 1,024 rows 5, of up to 2,048 none; lengths of 1024 lose 10: small blocks keep shared memory busy.
_SHORT = {64: None, 128: 640}
# A row that sees no more keys than this is narrow: its tile is best as small as the rows of one group. Windows of
# sequences of up to 2,048 rows, ms by one group and by pairs: D = 128, 201 keys 1.91 and 3.21, 601 keys 3.2 and 4.0,
# 1,001 keys 4.8 both, 1,401 keys 5.8 and 5.4; D = 64, 801 keys 2.7 and 3.5, 1,001 keys 3.1 and 3.4, 1,801 keys 4.3 and
# 4.1. Blocks of 512 keys are within 3 % at either D.
_NARROW_WINDOW, _NARROW_BLOCK = 1024, 256


def keys_seen(mask: Mask) -> int | None:
    """The most keys that a row can see, if the mask bounds them."""
    if isinstance(mask, BlockDiagonal):
        return mask.size
    if isinstance(mask, SlidingWindow) and mask.left is not None and mask.right is not None:
        return mask.left + mask.right + 1
    return None


def are_short(head_dim: int, rows_kv: int, num_sequences: int) -> bool:
    """Whether the mean sequence is short enough for three groups.

    The mean decides because the host does not know a single length.

    Args:
        head_dim: D, 64 or 128.
        rows_kv: T_kv, rows of keys of all sequences.
        num_sequences: B.
    """
    longest = _SHORT[head_dim]
    return longest is None or rows_kv <= longest * num_sequences


@lru_cache(maxsize=1024)
def forward_config(head_dim: int, num_queries: int | None, mask: Mask, short: bool = True) -> ForwardConfig:
    """The config of the forward kernel.

    Args:
        head_dim: D, 64 or 128.
        num_queries: S of broadcast-Q; ``None`` for self and cross attention.
        mask: of the call.
        short: ``are_short`` of the call.
    """
    if num_queries is not None:
        triples, pairs = (-(-num_queries // config[head_dim].block_q) for config in (_TRIPLE, _PAIR_SHARED))
        # Each tile of the shared queries reads all keys: 192 queries gain 14 %, 320 and 384 7 and 4, 256 lose 11.
        return (_SINGLE if num_queries <= ROWS else _TRIPLE if triples < pairs else _PAIR_SHARED)[head_dim]
    seen = keys_seen(mask)
    if seen is not None and seen <= (_NARROW_BLOCK if isinstance(mask, BlockDiagonal) else _NARROW_WINDOW):
        return _SINGLE[head_dim]
    # At D = 128 a mask that hides the first keys of a sequence would cost three groups registers that they do not have.
    sees_first = mask == Full() or (isinstance(mask, SlidingWindow) and mask.left is None)
    return (_TRIPLE if short and sees_first else _PAIR)[head_dim]


# Entries of a run, and the fewest runs for each multiprocessor: whole runs are handed out, so the last of them must be
# short beside all the others.
RUN = 4
_RUNS_PER_PROCESSOR = 16


def has_few_keys(head_dim: int, mask: Mask, rows_kv: int, num_sequences: int) -> bool:
    """Whether the keys of the mean sequence fit the rings of three groups, without a mask; arguments as elsewhere."""
    # An eighth more: rows of no sequence, such as those that fill a buffer up, are counted in.
    return mask == Full() and 8 * rows_kv <= 9 * num_sequences * _TRIPLE[head_dim].keys_in_flight


def forward_run(
    kind: str, head_dim: int, few_keys: bool, rows_q: int, num_sequences: int, items: int, processors: int
) -> int:
    """``run`` of a call: more than 1 for cross attention in which keys mostly stay.

    They do if they are few and the mean sequence has queries for a tile and a half or more; and there have to be runs
    enough. Elsewhere runs only part CTAs that read the same keys at a time, from the L2 cache. Of self-attention most
    tiles are of sequences too long to stay where the mean one has two.

    Args:
        kind: of the call, as in ``AttentionSpec``.
        head_dim: D, 64 or 128.
        few_keys: ``has_few_keys`` of the call.
        rows_q: T_q.
        num_sequences: B.
        items: entries of the tile table times heads.
        processors: multiprocessors of the device.
    """
    has_tiles = 2 * rows_q >= 3 * num_sequences * _TRIPLE[head_dim].block_q
    has_runs = items >= RUN * _RUNS_PER_PROCESSOR * processors
    return RUN if kind == "cross" and few_keys and has_tiles and has_runs else 1
