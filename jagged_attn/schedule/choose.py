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
        broadcast_q_forward_wide: as ``forward``, for many shared queries against long sequences (``is_wide``).
        broadcast_q_partial: the shared queries stay, the keys of all sequences pass; dQ alone.
        broadcast_q_fused: the same with dK and dV, for up to ``block_q`` shared queries; smallest first, maybe none.
            All have the ``block_kv`` of ``broadcast_q_partial``, because S is not known when tables are made.
    """

    forward: TileConfig
    backward_q: TileConfig
    backward_kv: TileConfig
    broadcast_q_forward_wide: TileConfig
    broadcast_q_partial: TileConfig
    broadcast_q_fused: tuple[TileConfig, ...]


def is_wide(num_queries: int, num_sequences: int, total_kv: int) -> bool:
    """Whether broadcast-Q's forward takes its wide tile: S fills it, and the mean length pays for its slower start.

    Decided by shapes alone. On an H200, S = 128, D = 128: wide 0.89 ms against 0.94 at a mean of 1024 keys, 0.36
    against 0.33 at 256 (docs/log-triton.md).
    """
    return num_queries > 64 and total_kv >= 512 * num_sequences


def pad_head_dim(head_dim: int) -> int:
    """The head dim as kernels hold it: a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


# The first that fits into shared memory is taken. Measured for D = 128 on an H200: docs/log-triton.md. Two programs of
# four warps on a processor hide each other's waits better than one of eight, as long as both fit.
_UP_TO_128: dict[Role, tuple[TileConfig, ...]] = {
    "forward": (TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 2)),
    "backward_q": (TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 2), TileConfig(32, 32, 4, 2)),
    "backward_kv": (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2), TileConfig(32, 32, 4, 2)),
    "broadcast_q_backward": (TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 2)),
}
_UP_TO_256: dict[Role, tuple[TileConfig, ...]] = {
    "forward": (TileConfig(128, 64, 8, 2), TileConfig(64, 32, 4, 2), TileConfig(32, 32, 4, 2)),
    "backward_q": (TileConfig(64, 64, 8, 2), TileConfig(64, 32, 8, 2), TileConfig(32, 32, 4, 1)),
    "backward_kv": (TileConfig(32, 64, 8, 2), TileConfig(32, 32, 4, 2), TileConfig(32, 32, 4, 1)),
    "broadcast_q_backward": (TileConfig(64, 64, 8, 2), TileConfig(64, 32, 8, 2), TileConfig(32, 32, 4, 1)),
}
# Without TF32 the products of fp32 run on no tensor core, and are unrolled over the dimension they sum.
_SINGLE: dict[Role, tuple[TileConfig, ...]] = {
    role: (TileConfig(32, 32, 4, 2), TileConfig(32, 32, 4, 1)) for role in _UP_TO_128
}
_BROADCAST_Q_WIDE = (TileConfig(128, 128, 8, 3), TileConfig(128, 64, 8, 3))
_FUSED = (TileConfig(64, 64, 8, 3), TileConfig(128, 64, 8, 3))
_LEAST = TileConfig(16, 16, 4, 1)
# The interpreter takes about as long for a large tile as for a small one; of different sizes, so that none can stand in
# for the other.
_INTERPRETED = TileConfig(64, 32, 4, 1)


@lru_cache(maxsize=1024)
def triton_configs(
    head_dim: int,
    value_head_dim: int,
    itemsize: int,
    device_type: str,
    capability: tuple[int, int] | None,
    is_hip: bool,
) -> TritonConfigs | None:
    """The configs of a call; ``None`` if a kernel has no tile that fits into shared memory.

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
        return TritonConfigs(tile, tile, TileConfig(32, 64, 4, 1), tile, tile, (tile,))
    limit = shared_bytes_per_program(capability, is_hip)
    problem = Problem(pad_head_dim(head_dim), pad_head_dim(value_head_dim), itemsize, limit)
    is_half, widest = itemsize == 2, max(problem.head_dim, problem.value_head_dim)
    lists = _SINGLE if not is_half else _UP_TO_128 if widest <= 128 else _UP_TO_256

    def legal(role: Role, candidates: tuple[TileConfig, ...]) -> tuple[TileConfig, ...]:
        return tuple(c for c in candidates if c.refusal(role, problem) is None)

    picked = {role: legal(role, (*candidates, _LEAST))[:1] for role, candidates in lists.items()}
    if not all(picked.values()):
        return None
    forward, partial = picked["forward"][0], picked["broadcast_q_backward"][0]
    wide = legal("forward", _BROADCAST_Q_WIDE) if is_half and widest <= 128 else ()
    fused = legal("broadcast_q_backward", _FUSED if is_half and widest <= 128 else (partial,))
    return TritonConfigs(
        forward=forward,
        backward_q=picked["backward_q"][0],
        backward_kv=picked["backward_kv"][0],
        broadcast_q_forward_wide=next(iter(wide), forward),
        broadcast_q_partial=partial,
        broadcast_q_fused=tuple(c for c in fused if c.block_kv == partial.block_kv),
    )
