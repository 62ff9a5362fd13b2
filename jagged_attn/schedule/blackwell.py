"""Sizes and switches of the Blackwell forward kernel: what is legal, and what is chosen for a call."""

import os
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from ..masks import Mask
from .arch import shared_bytes_per_program

# Rows of one product of a CTA: the lanes of tensor memory.
ROWS = 128
TENSOR_COLUMNS = 512
# Vectors of fp32 that the roles exchange (for two streams), and barriers with their alignment.
_VECTOR_BYTES = 2 * ROWS * 4
_BARRIER_BYTES = 1280


@dataclass(frozen=True)
class ForwardConfig:
    """The sizes and switches of the forward kernel.

    A tile has two streams of scores, so that one stream's exponentials run under the other's products. They are two
    tiles of query rows, or, with ``split``, the even and the odd key blocks of one.

    Attributes:
        block_kv: keys of a block.
        k_stages: blocks of keys in flight.
        v_stages: blocks of values in flight.
        o_stages: tiles of output on their way out.
        split: whether the streams share the query rows and take the key blocks in turn.
        p_over_s: whether the weights lie over their scores in tensor memory; else scores are released early.
        two_ctas: whether pairs of CTAs multiply together, each with half of the keys and values.
        deal: how tiles are dealt: ``"counter"``, as CTAs become free, or ``"alternate"``, in rounds that go back and
            forth, longest tiles first in both.
        threshold: growth of a row's maximum, in powers of two, up to which its sums are not rescaled; 0: always.
        packed: whether scores are scaled two at a time (``fma.f32x2``).
        polynomial: quarters of the exponentials that a polynomial computes on the FMA units.
        softmax_registers: of a thread of the two softmax groups.
        scalar_registers: of a thread of the load, product and store roles.
    """

    block_kv: int
    k_stages: int
    v_stages: int
    o_stages: int
    split: bool = False
    p_over_s: bool = False
    two_ctas: bool = False
    deal: Literal["counter", "alternate"] = "counter"
    threshold: float = 8.0
    packed: bool = True
    polynomial: int = 1
    softmax_registers: int = 192
    scalar_registers: int = 32

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.two_ctas else 1

    @property
    def q_tiles(self) -> int:
        """Tiles of ``ROWS`` query rows in a CTA."""
        return 1 if self.split else 2

    @property
    def block_q(self) -> int:
        """Query rows of a work item."""
        return ROWS * self.q_tiles * self.ctas

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a CTA: queries, output, keys, values, vectors, barriers."""
        rows = (self.q_tiles + self.o_stages) * ROWS + (self.k_stages + self.v_stages) * self.block_kv // self.ctas
        return rows * head_dim * itemsize + _VECTOR_BYTES + _BARRIER_BYTES

    def tensor_columns(self, head_dim: int) -> int:
        """Columns of tensor memory: scores, weights in two bytes, and output of two streams."""
        return 2 * (self.block_kv + (0 if self.p_over_s else self.block_kv // 2) + head_dim)

    def refusal(self, head_dim: int, itemsize: int, num_queries: int | None = None) -> str | None:
        """Why this config does not run such a call (S = ``num_queries`` with broadcast-Q); ``None`` if it does."""
        if self.two_ctas and head_dim != 128:
            return f"pairs of CTAs are for head dim 128, got {head_dim}"
        if self.two_ctas and num_queries is not None and num_queries < 2 * ROWS:
            return f"pairs of CTAs are for 256 shared queries or more, got {num_queries}"
        if self.split and num_queries is None:
            return "split is for broadcast-Q: it has no masks"
        if min(self.k_stages, self.v_stages) < 2:
            return f"the streams need two blocks each in flight, got {self.k_stages} and {self.v_stages}"
        if self.block_kv not in (64, 128) or not 0 <= self.polynomial <= 4:
            return f"block_kv is 64 or 128, polynomial 0 to 4, got {self.block_kv} and {self.polynomial}"
        columns, needed = self.tensor_columns(head_dim), self.shared_bytes(head_dim, itemsize)
        if columns > TENSOR_COLUMNS:
            return f"{self} needs {columns} columns of tensor memory, of {TENSOR_COLUMNS}"
        limit = shared_bytes_per_program((10, 0), is_hip=False)
        if needed > limit:
            return f"{self} needs {needed} bytes of shared memory, of {limit}"
        return None


# Two tiles of queries, or one against two streams of keys; of one CTA, and of a pair.
_PAIR = {64: ForwardConfig(128, 3, 3, 2), 128: ForwardConfig(64, 3, 3, 2)}
_SPLIT = {64: ForwardConfig(128, 5, 5, 1, split=True), 128: ForwardConfig(64, 5, 4, 1, split=True)}
_TWO_PAIR = ForwardConfig(64, 6, 6, 2, two_ctas=True)
_TWO_SPLIT = ForwardConfig(64, 10, 9, 1, split=True, two_ctas=True)


@lru_cache(maxsize=1024)
def forward_config(head_dim: int, num_queries: int | None, mask: Mask) -> ForwardConfig:
    """The config of the forward kernel, with the switches that ``JAGGED_ATTN_BLACKWELL_FORWARD`` names.

    Pairs of CTAs are chosen where their tile fits whatever the lengths: shared queries. For self and cross attention
    a pair's tile has 512 rows, too many for short sequences, whose lengths nobody knows here.

    Args:
        head_dim: D, 64 or 128.
        num_queries: S of broadcast-Q; ``None`` for self and cross attention.
        mask: of the call.

    Raises:
        ValueError: a switch that does not exist, or a config that is not legal.
    """
    if num_queries is None:
        config = _PAIR[head_dim]
    elif num_queries <= ROWS:
        config = _SPLIT[head_dim]
    elif head_dim == 128 and num_queries >= 2 * ROWS:
        config = _TWO_SPLIT if num_queries == 2 * ROWS else _TWO_PAIR
    else:
        config = _PAIR[head_dim]
    config = switched(config, "JAGGED_ATTN_BLACKWELL_FORWARD")
    reason = config.refusal(head_dim, 2, num_queries)
    if reason is not None:
        raise ValueError(reason)
    return config


def switched(config: Any, variable: str) -> Any:
    """The config with the switches that an environment variable names, as in ``"two_ctas=1,polynomial=0"``."""
    changes = dict(part.split("=", 1) for part in os.environ.get(variable, "").split(",") if part)
    names = {field.name for field in fields(config)}
    if not set(changes) <= names:
        raise ValueError(f"{variable} must name some of {sorted(names)}, got {sorted(changes)}.")
    kinds = {name: type(getattr(config, name)) for name in changes}
    return replace(config, **{name: kinds[name](int(x) if kinds[name] is bool else x) for name, x in changes.items()})
