"""The named workloads: shapes of ads and recommendation models, and the rules that draw their lengths."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

from ..masks import Full, Mask, SlidingWindow
from ..spec import Kind
from ..testing.inputs import draw_lengths

_FULL = Full()
_SMALL_BATCH, _SMALL_LONGEST, _SMALL_SHARED, _SMALL_HEAD_DIM = 13, 131, 5, 16


@dataclass(frozen=True)
class Workload:
    """One shape to measure.

    Attributes:
        name: what ``--case`` selects.
        kind: ``"self"``, ``"cross"`` or ``"broadcast_q"``.
        batch: B.
        longest_kv: no key length exceeds it.
        lengths_kv: rule of the key lengths, a name of ``testing.inputs.LENGTHS``.
        mean_fill: mean over longest length, for the rules that take it.
        longest_q: no query length exceeds it (cross-attention).
        lengths_q: rule of the query lengths (cross-attention).
        num_shared_queries: S (broadcast-Q).
        num_heads: H.
        head_dim: D.
        mask: what may attend to what.
        activation: ``"softmax"`` or an element-wise activation.
        default_on: device types on which the command measures it when no ``--case`` is given.
        measures: ``"time"`` of forward and backward, or ``"overhead"``: host time of one call of the operator.
    """

    name: str
    kind: Kind
    batch: int
    longest_kv: int
    lengths_kv: str = "uniform_from_one"
    mean_fill: float = 0.5
    longest_q: int = 0
    lengths_q: str = "uniform_from_one"
    num_shared_queries: int | None = None
    num_heads: int = 4
    head_dim: int = 128
    mask: Mask = _FULL
    activation: str = "softmax"
    default_on: tuple[str, ...] = ()
    measures: Literal["time", "overhead"] = "time"

    def draw_lengths(self, seed: int) -> tuple[Tensor, Tensor | None]:
        """``[B]`` key lengths and, for cross-attention, ``[B]`` query lengths, on the CPU."""
        kv = draw_lengths(self.lengths_kv, self.batch, self.longest_kv, self.mean_fill, seed)
        if self.kind != "cross":
            return kv, None
        return kv, draw_lengths(self.lengths_q, self.batch, self.longest_q, self.mean_fill, seed + 1)

    def small(self) -> "Workload":
        """The same workload at a size that takes milliseconds: for trying the command out, not for figures."""
        shared = self.num_shared_queries
        return replace(
            self,
            batch=min(self.batch, _SMALL_BATCH),
            longest_kv=min(self.longest_kv, _SMALL_LONGEST),
            longest_q=min(self.longest_q, _SMALL_LONGEST),
            num_shared_queries=None if shared is None else min(shared, _SMALL_SHARED),
            head_dim=min(self.head_dim, _SMALL_HEAD_DIM),
        )

    def describe(self) -> str:
        """The shape in a line."""
        parts = [f"{self.kind} B={self.batch} H={self.num_heads} D={self.head_dim}"]
        if self.num_shared_queries is not None:
            parts.append(f"S={self.num_shared_queries}")
        if self.kind == "cross":
            parts.append(f"L_q<={self.longest_q} {self.lengths_q}")
        fill = f"({self.mean_fill:g})" if self.lengths_kv.endswith(("uniform", "_fill")) else ""
        parts.append(f"L_kv<={self.longest_kv} {self.lengths_kv}{fill}")
        if self.mask != _FULL:
            parts.append(repr(self.mask))
        if self.activation != "softmax":
            parts.append(self.activation)
        return ", ".join(parts)


def _bars() -> Iterable[Workload]:
    """What the library promises to be fast at; the default on a GPU and on a CPU."""
    gpu, everywhere = ("cuda",), ("cuda", "cpu")
    for longest in (512, 1024, 2048):
        yield Workload(f"self/{longest}", "self", 1152, longest, default_on=gpu)
    yield Workload("self/1024-dense", "self", 1152, 1024, "constant", default_on=gpu)
    yield Workload("cross/1024x256", "cross", 1152, 256, "constant", longest_q=1024, default_on=gpu)
    for shared, longest in ((32, 2048), (64, 2048), (128, 2048), (256, 2048), (128, 512)):
        name = f"broadcast_q/s{shared}-kv{longest}"
        yield Workload(name, "broadcast_q", 1152, longest, num_shared_queries=shared, default_on=gpu)
    yield Workload("window/2048-w100", "self", 1152, 2048, mask=SlidingWindow(100, 100), default_on=gpu)
    yield Workload(
        "gdpa/1024x256", "cross", 1152, 256, "constant", longest_q=1024, activation="fast_gelu", default_on=gpu
    )
    yield Workload("window/4096-w100", "self", 256, 4096, mask=SlidingWindow(100, 100), default_on=gpu)
    yield Workload("cpu/log_normal", "self", 256, 848, "log_normal", head_dim=32, default_on=("cpu",))
    yield Workload("cpu/all-128", "self", 256, 128, "constant", head_dim=32, default_on=("cpu",))
    yield Workload("overhead/self", "self", 4, 7, head_dim=64, default_on=everywhere, measures="overhead")
    yield Workload(
        "overhead/broadcast_q", "broadcast_q", 4, 7, num_shared_queries=3, head_dim=64, default_on=everywhere,
        measures="overhead",
    )  # fmt: skip


def _half_as_wide() -> Iterable[Workload]:
    """What a GPU should be fast at, with heads of 64."""
    for bar in _bars():
        if bar.head_dim == 128:
            yield replace(bar, name=f"d64/{bar.name.replace('/', '-')}", head_dim=64, default_on=())


def _grid() -> Iterable[Workload]:
    """The shapes of the Kunlun model at several fills, for whoever tunes or explores."""
    for longest in (512, 1024, 2048):
        for fill in (0.5, 1.0):
            yield Workload(f"grid/self-{longest}-fill{fill:g}", "self", 1152, longest, "uniform", fill)
    for shared in (32, 64, 128, 192, 256):
        for dim in (64, 128):
            for longest in (512, 1024, 2048, 4096, 8192):
                for fill in (0.1, 0.3, 0.5, 1.0):
                    name = f"grid/broadcast_q-s{shared}-d{dim}-kv{longest}-fill{fill:g}"
                    yield Workload(
                        name, "broadcast_q", 1152, longest, "uniform", fill, num_shared_queries=shared, head_dim=dim
                    )
    for n_kv in (128, 256):
        name = f"grid/pffn-1024x{n_kv}"
        yield Workload(name, "cross", 1152, n_kv, "constant", longest_q=1024, lengths_q="uniform", activation="gelu")
    # 160 of 500 is the mean fill of that published case.
    yield Workload(
        "grid/pffn-500x256", "cross", 2048, 256, "constant", 0.32, longest_q=500, lengths_q="uniform", head_dim=64,
        activation="gelu",
    )  # fmt: skip


WORKLOADS: dict[str, Workload] = {w.name: w for w in (*_bars(), *_half_as_wide(), *_grid())}


def select_workloads(patterns: Sequence[str], device_type: str) -> list[Workload]:
    """The workloads whose names match a pattern, in table order; the device's defaults if there is no pattern.

    Raises:
        ValueError: a pattern matches nothing.
    """
    if not patterns:
        return [w for w in WORKLOADS.values() if device_type in w.default_on]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in WORKLOADS):
            raise ValueError(f"--case must match a workload, got {pattern!r}; --list shows the names.")
    return [w for w in WORKLOADS.values() if any(fnmatchcase(w.name, p) for p in patterns)]
