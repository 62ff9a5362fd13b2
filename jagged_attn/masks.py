"""Masks: which keys a query may attend to.

Every mask here allows each query one contiguous range of keys, so a mask is one function, ``key_range``; backends
derive their loop bounds and their element tests from the same numbers.
"""

from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, cast, get_args

Align = Literal["bottom_right", "top_left"]


def _check_align(align: object) -> None:
    if align not in get_args(Align):
        raise ValueError(f"align must be one of {', '.join(map(repr, get_args(Align)))}, got {align!r}.")


def _check_reach(name: str, reach: object) -> None:
    if reach is None:
        return
    if not isinstance(reach, int) or isinstance(reach, bool):
        raise TypeError(f"{name} must be a non-negative int or None for an open side, got {reach!r}.")
    if not 0 <= reach < 2**30:
        raise ValueError(f"{name} must be in [0, 2**30), got {reach}.")


@dataclass(frozen=True)
class Mask:
    """Base class of the masks.

    In a sequence with ``len_q`` queries and ``len_kv`` keys, query ``i`` sees keys ``lo <= j < hi`` where
    ``lo, hi = key_range(i, len_q, len_kv)``.
    """

    def key_range(self, i: Any, len_q: Any, len_kv: Any) -> tuple[Any, Any]:
        """The half-open range of keys that query ``i`` sees, before it is clipped to ``[0, len_kv)``.

        Args:
            i: index of the query in its sequence; an int or an integer tensor.
            len_q: number of queries of the sequence; an int or a tensor that broadcasts with ``i``.
            len_kv: number of keys of the sequence; likewise.
        """
        raise NotImplementedError

    @property
    def code(self) -> str:
        """The mask as a string that ``parse_mask`` reads back; operators carry it in their schema."""
        raise NotImplementedError


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key of its sequence."""

    def key_range(self, i: Any, len_q: Any, len_kv: Any) -> tuple[Any, Any]:
        """See ``Mask.key_range``: ``[0, len_kv)``."""
        return i * 0, i * 0 + len_kv

    @property
    def code(self) -> str:
        """See ``Mask.code``."""
        return "full"


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees keys j with ``i + shift - left <= j <= i + shift + right``.

    ``shift`` is ``len_kv - len_q`` for ``align="bottom_right"`` (FlashAttention's rule) and 0 for ``"top_left"`` (the
    rule of Meta's GDPA kernels). Both agree in self-attention.

    Args:
        left: keys seen to the left of the query's own; ``None`` leaves that side open.
        right: keys seen to the right of it; ``None`` leaves that side open.
        align: where the windows are anchored if a sequence has more or fewer keys than queries.

    Raises:
        TypeError: ``left`` or ``right`` is neither an int nor None.
        ValueError: one of them is negative, or ``align`` is not known.

    Example:
        >>> SlidingWindow(2, 1).key_range(5, 10, 10)
        (3, 7)
    """

    left: int | None
    right: int | None
    align: Align = "bottom_right"

    def __post_init__(self) -> None:
        _check_reach("left", self.left)
        _check_reach("right", self.right)
        _check_align(self.align)

    def key_range(self, i: Any, len_q: Any, len_kv: Any) -> tuple[Any, Any]:
        """See ``Mask.key_range``."""
        own = i + (len_kv - len_q) if self.align == "bottom_right" else i
        lo = own * 0 if self.left is None else own - self.left
        hi = own * 0 + len_kv if self.right is None else own + self.right + 1
        return lo, hi

    @property
    def code(self) -> str:
        """See ``Mask.code``."""
        left, right = ("-" if reach is None else index(reach) for reach in (self.left, self.right))
        return f"window:{left}:{right}:{self.align}"


@dataclass(frozen=True)
class Causal(SlidingWindow):
    """Query i sees its own key and all earlier ones: ``SlidingWindow(None, 0, align)``.

    Args:
        align: see ``SlidingWindow``.

    Example:
        >>> Causal().key_range(0, 2, 5)  # two queries at the end of five keys
        (0, 4)
    """

    left: int | None = field(default=None, init=False, repr=False)
    right: int | None = field(default=0, init=False, repr=False)
    align: Align = "bottom_right"


@dataclass(frozen=True)
class BlockDiagonal(Mask):
    """Query i sees key j when both lie in the same block of ``size`` rows, counted from the sequence's start.

    Needs as many keys as queries in each sequence, that is, self-attention.

    Args:
        size: rows of a block, at least 1.

    Raises:
        TypeError: ``size`` is not an int.
        ValueError: ``size`` is less than 1.

    Example:
        >>> BlockDiagonal(64).key_range(70, 100, 100)
        (64, 128)
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool):
            raise TypeError(f"size must be a positive int, got {self.size!r}.")
        if not 1 <= self.size < 2**30:
            raise ValueError(f"size must be in [1, 2**30), got {self.size}.")

    def key_range(self, i: Any, len_q: Any, len_kv: Any) -> tuple[Any, Any]:
        """See ``Mask.key_range``."""
        lo = i // self.size * self.size
        return lo, lo + self.size

    @property
    def code(self) -> str:
        """See ``Mask.code``."""
        return f"block:{index(self.size)}"


def parse_mask(code: str) -> Mask:
    """The mask whose ``code`` this is."""
    kind, *fields = code.split(":")
    if kind == "full":
        return Full()
    if kind == "block":
        return BlockDiagonal(int(fields[0]))
    if kind == "window":
        left, right = (None if field == "-" else int(field) for field in fields[:2])
        align = cast(Align, fields[2])
        return Causal(align) if (left, right) == (None, 0) else SlidingWindow(left, right, align)
    raise ValueError(f"mask code must start with full, window or block, got {code!r}.")
