"""Sizes and switches of the Blackwell backward kernel: what is legal, and what is chosen for a call."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .arch import shared_bytes_per_program
from .blackwell import ROWS, TENSOR_COLUMNS, switched

_VARIABLE = "JAGGED_ATTN_BLACKWELL_BACKWARD"
# What the compiler adds for the hand-over between warps and for alignment, as compiled, for each CTA of a cluster.
_EXTRA_BYTES = 720
# Columns of dQ that leave together, in fp32.
_CHUNK = 32
# Registers of a thread of each of four warp groups together, and the least that the one of outputs needs of them.
_REGISTERS, _OUTPUT_REGISTERS = 512, 80


@dataclass(frozen=True)
class BackwardConfig:
    """Key tiles of 128 rows; query tiles of 128 or, shared by all sequences, 64. One of the two sides stays on chip.

    Attributes:
        q_stages: tiles of Q in flight, with lse and delta; 1 where the queries stay.
        do_stages: tiles of dO in flight, one for each run of keys of a sequence where the queries stay.
        kv_stages: tiles of K and of V; where the keys stay, a second one loads the next item's early.
        scores: when the next tile's scores are issued: ``"first"``, as soon as those before have been read, for which
            P needs columns of its own (early release); ``"middle"``, between dV and dQ; ``"last"``, so that no product
            waits for a K that is on its way.
        over_dp: what lies over dP in tensor memory, and delays the next dP until it has left: ``"dq"`` where the keys
            stay, ``"dk"`` where the queries stay, or ``"none"``.
        dq_stages: chunks of dQ (and of dK and dV where the keys stay) on their way out.
        registers: of a thread of the two gradient groups.
        scalar_registers: of a thread of the load and product roles. What is left goes to the outputs' role.
        two_ctas: whether pairs of CTAs multiply together, where the keys stay: 128 in each.
    """

    q_stages: int
    do_stages: int
    kv_stages: int
    scores: Literal["first", "middle", "last"]
    over_dp: Literal["dq", "dk", "none"]
    dq_stages: int = 2
    registers: int = 176
    scalar_registers: int = 64
    two_ctas: bool = False

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.two_ctas else 1

    def shared_bytes(self, head_dim: int, rows: int, stays: Literal["keys", "queries"]) -> int:
        """Shared memory of a CTA: Q, dO, K, V and dS in 2 bytes, lse and delta, chunks on their way out, barriers."""
        # Each of a pair has half of Q, dO and K by rows or whole, and half by columns.
        tiles = (self.q_stages + self.do_stages) * rows + (2 * self.kv_stages + self.ctas - 1) * ROWS
        ds, out = 2 * ROWS * rows, self.dq_stages * rows * _CHUNK * 4
        statistics = self.q_stages if stays == "keys" else self.do_stages
        barriers = 2 * (self.q_stages + self.do_stages + 2 * self.kv_stages + statistics) + 8 * self.ctas + 8
        # Where the queries stay, dQ leaves once, by way of dS's buffer.
        staging = ds + out if stays == "keys" else max(ds, out)
        return 2 * tiles * head_dim + staging + statistics * 2 * rows * 4 + 8 * barriers + self.ctas * _EXTRA_BYTES

    def tensor_columns(self, head_dim: int, rows: int) -> int:
        """Columns of tensor memory: S, dP, dV, dK, dQ, but what lies over dP; and P, if it has its own."""
        own = 3 if self.over_dp == "none" else 2
        return 2 * rows + own * head_dim + (rows // 2 if self.scores == "first" else 0)

    def refusal(
        self, head_dim: int, rows: int, stays: Literal["keys", "queries"], num_queries: int | None = None
    ) -> str | None:
        """Why this config does not run with tiles of ``rows`` queries at a head dim; ``None`` if it does.

        ``num_queries``: S of broadcast-Q, where the keys stay.
        """
        if self.two_ctas and (head_dim != 128 or stays == "queries"):
            return f"pairs of CTAs are for head dim 128 and keys that stay, got {head_dim} and {stays}"
        if self.two_ctas and num_queries is not None and num_queries < 2 * ROWS:
            return f"pairs of CTAs are for 256 shared queries or more, got {num_queries}"
        if self.two_ctas and (self.scores, self.over_dp, self.q_stages, self.do_stages, self.kv_stages) != _PAIR_ORDER:
            return f"pairs of CTAs have one buffer of each and one order of products, {_PAIR_ORDER}, got {self}"
        if rows != ROWS and (stays == "keys" or rows != ROWS // 2):
            return f"takes tiles of 128 queries, or 64 where they stay, got {rows}"
        wide = self.over_dp == "none" or head_dim == rows
        if self.over_dp == ("dk" if stays == "keys" else "dq") or not wide:
            return f"{self.over_dp} cannot lie over dP where the {stays} stay, {rows} rows of head dim {head_dim}"
        if min(self.q_stages, self.do_stages, self.kv_stages, self.dq_stages) < 1:
            return f"every ring needs a buffer, got {self}"
        if stays == "queries" and (self.q_stages != 1 or self.kv_stages < 2):
            return f"queries that stay need one buffer, and keys that pass by two, got {self}"
        left = _REGISTERS - self.scalar_registers - 2 * self.registers
        if self.registers % 8 or self.scalar_registers % 8 or left < _OUTPUT_REGISTERS:
            return f"registers must be multiples of 8 that leave {_OUTPUT_REGISTERS} of {_REGISTERS}, got {self}"
        columns, needed = self.tensor_columns(head_dim, rows), self.shared_bytes(head_dim, rows, stays)
        limit = shared_bytes_per_program((10, 0), is_hip=False)
        if columns > TENSOR_COLUMNS:
            return f"{self} needs {columns} columns of tensor memory, of {TENSOR_COLUMNS}"
        return f"{self} needs {needed} bytes of shared memory, of {limit}" if needed > limit else None


# scores, over_dp, q_stages, do_stages, kv_stages.
_PAIR_ORDER = ("middle", "dq", 1, 1, 1)
_KEYS_STAY = {
    64: BackwardConfig(3, 2, 2, "first", "none", scalar_registers=80),
    128: BackwardConfig(2, 1, 1, "middle", "dq", scalar_registers=80),
}
TWO_CTAS = BackwardConfig(1, 1, 1, "middle", "dq", scalar_registers=80, two_ctas=True)
_QUERIES_STAY = {
    (64, 64): BackwardConfig(1, 4, 4, "first", "none"),
    (64, 128): BackwardConfig(1, 2, 4, "first", "none"),
    (128, 64): BackwardConfig(1, 2, 2, "last", "none"),
    (128, 128): BackwardConfig(1, 1, 2, "last", "dk"),
}


@lru_cache(maxsize=1024)
def backward_config(head_dim: int, rows: int | None = None, num_queries: int | None = None) -> BackwardConfig:
    """The config of the backward, with the switches that ``JAGGED_ATTN_BLACKWELL_BACKWARD`` names.

    Args:
        head_dim: D, 64 or 128.
        rows: of the tile of shared queries that stays; ``None`` where the keys stay.
        num_queries: S of broadcast-Q, where the keys stay.

    Raises:
        ValueError: a switch that does not exist, or a config that is not legal.
    """
    config = _KEYS_STAY[head_dim] if rows is None else _QUERIES_STAY[head_dim, rows]
    config = switched(config, _VARIABLE)
    reason = config.refusal(head_dim, rows or ROWS, "keys" if rows is None else "queries", num_queries)
    if reason is not None:
        raise ValueError(reason)
    return config


@lru_cache(maxsize=1024)
def block_kv(head_dim: int) -> int:
    """Keys of an item where the keys stay."""
    return ROWS * switched(_KEYS_STAY[head_dim], _VARIABLE).ctas
