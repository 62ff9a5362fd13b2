"""Between packed and padded: the rows that a chunk of sequences takes from a tensor, and gives back."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """The rows that a chunk takes from a tensor, and where each stands among the padding."""

    @property
    def count(self) -> int:
        """Number of sequences."""
        ...

    @property
    def length(self) -> int:
        """Rows of the longest of them."""
        ...

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[count, length, ...]`` in ``dtype``, zero where padded: a view if the rows permit, else a new tensor."""
        ...

    def scatter(self, into: Tensor, x: Tensor) -> None:
        """Write ``x [count, length, ...]``, less its padding, to the rows of ``into``."""
        ...


@dataclass(frozen=True)
class RowRange:
    """Sequences of one length that follow one another in the packed tensor: nothing to index, nothing to pad."""

    count: int
    length: int
    first: int

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Rows.gather``."""
        return self._of(x).to(dtype)

    def scatter(self, into: Tensor, x: Tensor) -> None:
        """See ``Rows.scatter``."""
        self._of(into).copy_(x)

    def _of(self, x: Tensor) -> Tensor:
        return x.narrow(0, self.first, self.count * self.length).unflatten(0, (self.count, self.length))


@dataclass(frozen=True)
class RowIndex:
    """Sequences of any lengths and places, padded to the longest.

    Attributes:
        count: number of sequences.
        length: rows of the longest of them.
        sources: ``[count * length]``, the packed row of each slot; some existing row for padding.
        targets: the same, but one past the last packed row for padding: ``scatter`` needs a spare row there.
        padding: ``[*]``, the slots that are padding.
    """

    count: int
    length: int
    sources: Tensor
    targets: Tensor
    padding: Tensor

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Rows.gather``."""
        rows = x.index_select(0, self.sources).to(dtype)
        if self.padding.numel():
            # Not a product with a mask: a NaN of the row that stands in for the padding would survive it.
            rows.index_fill_(0, self.padding, 0.0)
        return rows.unflatten(0, (self.count, self.length))

    def scatter(self, into: Tensor, x: Tensor) -> None:
        """See ``Rows.scatter``."""
        into.index_copy_(0, self.targets, x.to(into.dtype).flatten(0, 1))


@dataclass(frozen=True)
class SequenceIndex:
    """Whole sequences of a ``[B, S, ...]`` tensor, as broadcast-Q has for its outputs."""

    count: int
    length: int
    sequences: Tensor

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Rows.gather``."""
        return x.index_select(0, self.sequences).to(dtype)

    def scatter(self, into: Tensor, x: Tensor) -> None:
        """See ``Rows.scatter``."""
        into.index_copy_(0, self.sequences, x.to(into.dtype))
