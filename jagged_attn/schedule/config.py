"""The sizes of one launch, and the one predicate that says which are legal."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["forward", "backward_q", "backward_kv", "broadcast_q_backward"]


@dataclass(frozen=True)
class Problem:
    """What decides whether a config is legal.

    Attributes:
        head_dim: D, padded to a power of two.
        value_head_dim: Dv, likewise.
        itemsize: bytes of an element of q, k and v.
        shared_limit: bytes of shared memory that one program may use.
    """

    head_dim: int
    value_head_dim: int
    itemsize: int
    shared_limit: int


@dataclass(frozen=True)
class TileConfig:
    """The sizes of one kernel.

    Attributes:
        block_q: rows of a tile of queries.
        block_kv: rows of a tile of keys and values.
        num_warps: warps of a program.
        num_stages: tiles of the streamed side in flight.

    Raises:
        ValueError: a size that no kernel has, whatever the problem; ``refusal`` judges the rest.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("block_q", self.block_q, 16),
            ("block_kv", self.block_kv, 16),
            ("num_warps", self.num_warps, 1),
        ):
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least {least}, got {value}.")
        if self.num_warps > 16:
            raise ValueError(f"num_warps must be at most 16, got {self.num_warps}.")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {self.num_stages}.")

    def shared_bytes(self, role: Role, problem: Problem) -> int:
        """Shared memory of a program: tiles that stay, tiles in flight, and scores on their way to a product."""
        width = (problem.head_dim + problem.value_head_dim) * problem.itemsize
        rows_q, rows_kv = self.block_q * width, self.block_kv * width
        scores = self.block_q * self.block_kv * problem.itemsize
        if role == "forward":
            return self.block_q * problem.head_dim * problem.itemsize + self.num_stages * rows_kv
        if role == "backward_kv":
            return rows_kv + self.num_stages * rows_q + 2 * scores
        return rows_q + self.num_stages * rows_kv + 2 * scores

    def refusal(self, role: Role, problem: Problem) -> str | None:
        """Why this config does not run such a problem; ``None`` if it does."""
        needed = self.shared_bytes(role, problem)
        if needed > problem.shared_limit:
            return f"{role} with {self} needs {needed} bytes of shared memory, of {problem.shared_limit}"
        return None
