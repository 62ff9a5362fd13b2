"""From the static facts of a call to the configs of its kernels: the first legal one of a short list each.

Nothing is tuned while a program runs: a time taken on one batch of lengths says little of the next.
"""

from dataclasses import dataclass
from functools import lru_cache

from .arch import shared_bytes_per_program
from .config import Problem, Role, TileConfig


@dataclass(frozen=True)
class TritonConfigs:
    """The configs of the portable backend for one kind of call.

    Attributes:
        forward: queries stay, keys pass.
        backward_q: likewise.
        backward_kv: keys stay, queries pass.
        broadcast_q_forward: queries stay, keys pass; the smallest that holds all shared queries, or the last.
        broadcast_q_partial: the shared queries stay, the keys of all sequences pass; dQ alone.
        broadcast_q_fused: the same with dK and dV, for up to ``block_q`` shared queries; smallest first, maybe none.
            All have the ``block_kv`` of ``broadcast_q_partial``, because S is not known when tables are made.
    """

    forward: TileConfig
    backward_q: TileConfig
    backward_kv: TileConfig
    broadcast_q_forward: tuple[TileConfig, ...]
    broadcast_q_partial: TileConfig
    broadcast_q_fused: tuple[TileConfig, ...]


def pad_head_dim(head_dim: int) -> int:
    """The head dim as kernels hold it: a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


# Widest first; the first that fits into shared memory is taken.
_HALF: dict[Role, tuple[TileConfig, ...]] = {
    "forward": (TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 2), TileConfig(64, 32, 4, 2)),
    "backward_q": (TileConfig(128, 64, 8, 2), TileConfig(64, 64, 8, 2), TileConfig(64, 32, 4, 2)),
    "backward_kv": (TileConfig(64, 128, 8, 2), TileConfig(64, 64, 8, 2), TileConfig(32, 64, 4, 2)),
    "broadcast_q_backward": (TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 1)),
}
# Without TF32 the products of fp32 run on no tensor core, and are unrolled over the dimension they sum.
_SINGLE: dict[Role, tuple[TileConfig, ...]] = {
    role: (TileConfig(32, 32, 4, 2), TileConfig(32, 32, 4, 1)) for role in _HALF
}
_HALF_FUSED = (TileConfig(32, 64, 4, 2), TileConfig(64, 64, 4, 2), TileConfig(128, 64, 8, 2))
_HALF_BROADCAST_Q_FORWARD = (TileConfig(64, 64, 4, 2), TileConfig(128, 64, 8, 2))
_LEAST = TileConfig(16, 16, 4, 1)
# Small and of different sizes, so that tests meet every edge in a few steps.
_INTERPRETED = TileConfig(32, 16, 4, 1)


@lru_cache(maxsize=1024)
def triton_configs(
    head_dim: int,
    value_head_dim: int,
    itemsize: int,
    device_type: str,
    capability: tuple[int, int] | None,
    is_hip: bool,
) -> TritonConfigs:
    """The configs of a call.

    Args:
        head_dim: D.
        value_head_dim: Dv.
        itemsize: bytes of an element of q, k and v.
        device_type: ``"cuda"``, or ``"cpu"`` for Triton's interpreter.
        capability: compute capability of a CUDA device.
        is_hip: whether it is an AMD GPU.
    """
    if device_type == "cpu":
        tile = _INTERPRETED
        return TritonConfigs(tile, tile, TileConfig(16, 32, 4, 1), (tile,), tile, (tile,))
    limit = shared_bytes_per_program(capability, is_hip)
    problem = Problem(pad_head_dim(head_dim), pad_head_dim(value_head_dim), itemsize, limit)
    lists = _HALF if itemsize == 2 else _SINGLE

    def pick(role: Role) -> TileConfig:
        return next((c for c in lists[role] if c.refusal(role, problem) is None), _LEAST)

    partial = pick("broadcast_q_backward")
    candidates = _HALF_FUSED if itemsize == 2 and max(problem.head_dim, problem.value_head_dim) <= 128 else (partial,)
    fused = tuple(
        c for c in candidates if c.block_kv == partial.block_kv and c.refusal("broadcast_q_backward", problem) is None
    )
    wide = _HALF_BROADCAST_Q_FORWARD if itemsize == 2 else ()
    shared = tuple(c for c in wide if c.refusal("forward", problem) is None) or (pick("forward"),)
    return TritonConfigs(pick("forward"), pick("backward_q"), pick("backward_kv"), shared, partial, fused)
