"""``JaggedLayout``: where each sequence of a packed tensor begins and ends, and what is derived from that."""

import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class JaggedLayout:
    """The geometry of B sequences packed end to end: sequence b holds rows ``offsets[b] <= row < offsets[b + 1]``.

    A layout is a thin, immutable view of its offsets tensor. What a backend derives from it (tile tables, buckets) is
    kept beside the offsets tensor for as long as that lives and is not written to, so every layer of a stack, and the
    backward pass, reuse it; two layouts of one offsets tensor share it too.

    Args:
        offsets: ``[B + 1]``, int32 or int64, on the values' device; first 0, non-decreasing. Its values are not checked
            here, because that would wait for the device: kernels clamp every bound to the rows that exist, and
            ``validate_sync`` raises. A view with gaps is copied.

    Raises:
        TypeError: ``offsets`` is not a tensor.
        ValueError: it is not one-dimensional, or neither int32 nor int64.

    Example:
        >>> layout = JaggedLayout.from_lengths(torch.tensor([2, 0, 3]))
        >>> layout.offsets, layout.num_sequences
        (tensor([0, 2, 2, 5]), 3)
    """

    offsets: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.offsets, Tensor):
            raise TypeError(f"offsets must be a torch.Tensor, got {type(self.offsets).__name__}.")
        if self.offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"offsets must be int32 or int64, got {self.offsets.dtype}.")
        if self.offsets.dim() != 1:
            raise ValueError(f"offsets must have one dimension, [B + 1], got shape {list(self.offsets.shape)}.")
        if not self.offsets.is_contiguous():
            object.__setattr__(self, "offsets", self.offsets.contiguous())

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "JaggedLayout":
        """The layout of sequences of these lengths.

        Args:
            lengths: ``[B]``, int32 or int64, non-negative. The offsets take its dtype and device.

        Raises:
            TypeError: ``lengths`` is not a tensor.
            ValueError: it is not one-dimensional, or neither int32 nor int64.
        """
        if not isinstance(lengths, Tensor):
            raise TypeError(f"lengths must be a torch.Tensor, got {type(lengths).__name__}.")
        if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"lengths must be int32 or int64 of shape [B], got {lengths.dtype} of shape {list(lengths.shape)}."
            )
        return cls(torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0)))

    @classmethod
    def uniform(cls, num_sequences: int, length: int, device: torch.device | str | None = None) -> "JaggedLayout":
        """The layout of ``num_sequences`` sequences of ``length`` rows each, as int64 offsets on ``device``.

        Raises:
            TypeError: one of the two is not an int.
            ValueError: one of the two is negative.
        """
        for name, value in (("num_sequences", num_sequences), ("length", length)):
            if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a non-negative int, got {value!r}.")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        return cls(torch.arange(num_sequences + 1, device=device) * length)

    @property
    def num_sequences(self) -> int:
        """B. An offsets tensor without an element, as ``JaggedTensor.empty()`` has, counts as B = 0."""
        return max(self.offsets.numel() - 1, 0)

    @property
    def lengths(self) -> Tensor:
        """``[B]``, the rows of each sequence, computed on the device."""
        return self.offsets.diff()

    def validate_sync(self, total_rows: int | None = None) -> "JaggedLayout":
        """Check the offsets' values; waits for the device.

        Args:
            total_rows: rows of the values tensor; ``None`` leaves that part out.

        Returns:
            The layout itself.

        Raises:
            ValueError: the first offset is not 0, one is less than the one before, or the last exceeds ``total_rows``.
        """
        offsets = self.offsets.tolist()
        if offsets and offsets[0] != 0:
            raise ValueError(f"offsets must begin with 0, got {offsets[0]}.")
        for b, (start, end) in enumerate(itertools.pairwise(offsets)):
            if end < start:
                raise ValueError(f"offsets must not decrease, got offsets[{b}] = {start} and offsets[{b + 1}] = {end}.")
        if total_rows is not None and offsets and offsets[-1] > total_rows:
            raise ValueError(f"offsets must end within the {total_rows} rows of the values, got {offsets[-1]}.")
        return self


@dataclass(frozen=True)
class _Derived:
    """A derived value, with what it was derived from: valid while both offsets tensors live unchanged."""

    value: Any
    version: int
    other: "weakref.ReferenceType[Tensor]"
    other_version: int

    def is_valid(self, offsets: Tensor) -> bool:
        """Whether neither tensor was freed or written to since."""
        other = self.other()
        return other is not None and self.version == offsets._version and self.other_version == other._version


class _Kept(NamedTuple):
    """What is kept beside one offsets tensor."""

    owner: "weakref.ReferenceType[Tensor]"
    entries: dict[Hashable, _Derived]


# By the id of the offsets tensor, which leaves as the tensor dies. PyTorch's WeakTensorKeyDictionary does the same at
# five times the CPU time a look.
_DERIVED: dict[int, _Kept] = {}
# Enough for the kinds of calls of a model. One that never repeats a call (a scale that changes) starts over.
_MOST_ENTRIES = 256


def _entries_of(offsets: Tensor) -> dict[Hashable, _Derived]:
    address = id(offsets)
    kept = _DERIVED.get(address)
    if kept is None or kept.owner() is not offsets:
        kept = _DERIVED[address] = _Kept(weakref.ref(offsets, partial(_forget, _DERIVED, address)), {})
    return kept.entries


def _forget(all_kept: dict[int, _Kept], address: int, owner: "weakref.ReferenceType[Tensor]") -> None:
    kept = all_kept.get(address)
    if kept is not None and kept.owner is owner:
        del all_kept[address]


def derived(offsets: Tensor, other: Tensor, key: object, build: Callable[[], T]) -> T:
    """``build()``, remembered for this pair of offsets tensors until either is written to or freed.

    Nothing is remembered while a CUDA graph is captured (the graph must contain the work, since its replays see other
    offsets) or for tensors made in inference mode (PyTorch does not count the writes to them).

    Args:
        offsets: the tensor beside which the value is kept. The value must not refer to it.
        other: a second tensor that the value depends on; the same one if there is none.
        key: tells apart what is derived from the same tensors; under a key without a hash nothing is remembered.
        build: computes the value.
    """
    if offsets.is_inference() or other.is_inference() or _is_capturing(offsets):
        return build()
    entries = _entries_of(offsets)
    full_key: Hashable = (key, id(other))
    try:
        entry = entries.get(full_key)
    except TypeError:  # it has no hash
        full_key = None
    if full_key is None:
        return build()
    # The key has the id of the other tensor: if what was there lives, it is this one.
    if entry is not None and entry.is_valid(offsets):
        return entry.value
    # Also when this call runs in inference mode: a training step that comes later saves the value for its backward.
    with torch.inference_mode(False):
        value = build()
    for stale in [k for k, e in entries.items() if not e.is_valid(offsets)]:
        entries.pop(stale, None)
    if len(entries) >= _MOST_ENTRIES:
        entries.clear()
    entries[full_key] = _Derived(value, offsets._version, weakref.ref(other), other._version)
    return value


def uniform_like(layout: JaggedLayout, length: int) -> JaggedLayout:
    """The layout of as many sequences of ``length`` rows, remembered beside the other's offsets."""

    def build() -> JaggedLayout:
        return JaggedLayout.uniform(layout.num_sequences, length, layout.offsets.device)

    if torch.compiler.is_compiling():
        return build()
    return derived(layout.offsets, layout.offsets, ("uniform", length), build)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def row_bounds(offsets: Tensor, total_rows: int) -> tuple[Tensor, Tensor]:
    """First row and end of each sequence, clamped to the rows that exist, as every kernel clamps them.

    Args:
        offsets: ``[B + 1]``.
        total_rows: rows of the values tensor.

    Returns:
        Two int64 tensors ``[B]`` with ``0 <= start <= end <= total_rows``, whatever the offsets hold.
    """
    offsets = offsets.long().clamp(0, total_rows)
    starts = offsets[:-1]
    return starts, torch.maximum(offsets[1:], starts)
