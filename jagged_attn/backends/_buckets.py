"""Buckets: which sequences of a jagged batch are padded together.

Sequences of similar (query length, key length) share a bucket, so little of the padded work is wasted; a bucket is cut
into chunks, so memory stays bounded. The plan is made on the host, by a fixed number of vectorised steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..layout import row_bounds
from ._rows import RowIndex, RowRange, Rows, SequenceIndex

# Named wherever a tensor is made, since a user may have set another default device.
_HOST = torch.device("cpu")


@cache
def _class_ends() -> Tensor:
    """Largest length of each class: steps of 16 up to 128, then 8 steps an octave.

    Padding to the longest of a class adds less than 16 rows or an eighth. Finer classes make more and smaller chunks,
    each with a fixed cost. Made by the first plan and not by the import, which may happen while a graph is traced.
    """
    octaves = [step << octave for octave in range(4, 40) for step in range(8, 16)]
    return torch.tensor([*range(16, 128, 16), *octaves], device=_HOST)


@dataclass(frozen=True)
class Chunk:
    """Sequences that are computed together.

    Attributes:
        rows_q: rows of the queries, and of the output.
        rows_kv: rows of keys and values.
        lengths_q: ``[count]`` on the device, or one int if all are equal.
        lengths_kv: the same of the keys.
        shifts: least and greatest ``len_kv - len_q``.
    """

    rows_q: Rows
    rows_kv: Rows
    lengths_q: Tensor | int
    lengths_kv: Tensor | int
    shifts: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """The chunks of a batch. Sequences without queries or without keys are in none.

    Attributes:
        chunks: in order of their lengths.
        fills_q: whether every row of the queries is in a chunk; else outputs must be filled beforehand.
        fills_kv: the same of keys and values.
    """

    chunks: tuple[Chunk, ...]
    fills_q: bool
    fills_kv: bool


@dataclass(frozen=True)
class Cost:
    """What a chunk may hold, in elements.

    Attributes:
        budget: elements of a chunk, unless a single sequence has more.
        per_pair: elements for each pair of a query and a key.
        per_row: elements for each row of queries or keys.
        whole: whether a batch of consecutive sequences of one length is one chunk, whatever it holds.
    """

    budget: int
    per_pair: int
    per_row: int
    whole: bool


def plan_sync(offsets_q: Tensor | None, offsets_kv: Tensor, rows_q: int, rows_kv: int, cost: Cost) -> Plan:
    """Sort sequences into buckets of similar lengths, and cut these into chunks. Waits for the offsets' device.

    Args:
        offsets_q: ``[B + 1]``; ``None`` for broadcast-Q.
        offsets_kv: ``[B + 1]``; the same tensor for self-attention.
        rows_q: rows of the queries; S for broadcast-Q.
        rows_kv: rows of keys and values.
        cost: what bounds a chunk.

    Returns:
        The plan, with its indices on the offsets' device. Bad offsets are clamped to the rows that exist; sequences
        that then share rows are computed all the same.
    """
    device = offsets_kv.device
    starts_kv, lengths_kv, disjoint_kv = _read_sync(offsets_kv, rows_kv)
    if offsets_q is None:
        starts_q, lengths_q, disjoint_q = starts_kv, torch.full_like(lengths_kv, rows_q), True
    elif offsets_q is offsets_kv:
        starts_q, lengths_q, disjoint_q = starts_kv, lengths_kv, disjoint_kv
    else:
        starts_q, lengths_q, disjoint_q = _read_sync(offsets_q, rows_q)

    order = _order(lengths_q, lengths_kv)
    lengths_q, lengths_kv = lengths_q[order], lengths_kv[order]
    segments = _cut(lengths_q, lengths_kv, starts_q[order], starts_kv[order], cost)
    side_kv = _rows(starts_kv[order], lengths_kv, segments, rows_kv, device)
    if offsets_q is None:
        parts = order.to(device, non_blocking=True).split(segments.counts)
        side_q: Sequence[Rows] = [SequenceIndex(len(part), rows_q, part) for part in parts]
    elif offsets_q is offsets_kv:
        side_q = side_kv
    else:
        side_q = _rows(starts_q[order], lengths_q, segments, rows_q, device)

    shifts = lengths_kv - lengths_q
    chunks = zip(
        side_q,
        side_kv,
        _ragged(lengths_q, segments, device),
        _ragged(lengths_kv, segments, device),
        zip(segments.reduce(shifts, "amin").tolist(), segments.reduce(shifts, "amax").tolist(), strict=True),
        strict=True,
    )
    visited_q = int(lengths_q.sum()) if offsets_q is not None else len(order)
    total_q = rows_q if offsets_q is not None else len(starts_kv)
    return Plan(
        tuple(Chunk(*facts) for facts in chunks),
        fills_q=disjoint_q and visited_q == total_q,
        fills_kv=disjoint_kv and int(lengths_kv.sum()) == rows_kv,
    )


def _read_sync(offsets: Tensor, total_rows: int) -> tuple[Tensor, Tensor, bool]:
    """First rows and lengths on the host, and whether no two sequences share a row (bad offsets can make them)."""
    starts, ends = row_bounds(offsets.cpu(), total_rows)
    return starts, ends - starts, bool((starts[1:] >= ends[:-1]).all())


def _order(lengths_q: Tensor, lengths_kv: Tensor) -> Tensor:
    """The sequences that have work, by class of both lengths, then by number of keys, then as they came."""
    active = ((lengths_q > 0) & (lengths_kv > 0)).nonzero().squeeze(1)
    order = active[lengths_kv[active].argsort(stable=True)]
    return order[_classes(lengths_q[order], lengths_kv[order]).argsort(stable=True)]


def _classes(lengths_q: Tensor, lengths_kv: Tensor) -> Tensor:
    ends = _class_ends()
    return torch.bucketize(lengths_q, ends) * len(ends) + torch.bucketize(lengths_kv, ends)


@dataclass(frozen=True)
class _Segments:
    """Consecutive runs of the ordered sequences.

    Attributes:
        of: ``[n]``, the run of each sequence.
        firsts: ``[runs]``, the first sequence of each run.
        counts: the number of sequences of each.
    """

    of: Tensor
    firsts: Tensor
    counts: list[int]

    @classmethod
    def starting(cls, is_first: Tensor) -> "_Segments":
        firsts = is_first.nonzero().squeeze(1)
        counts = torch.cat([firsts, firsts.new_tensor([len(is_first)])]).diff().tolist() if len(firsts) else []
        return cls(is_first.long().cumsum(0) - 1, firsts, counts)

    @property
    def rank(self) -> Tensor:
        """``[n]``, the place of each sequence in its run."""
        return torch.arange(len(self.of), device=_HOST) - self.firsts[self.of]

    def reduce(self, x: Tensor, how: str) -> Tensor:
        """``[runs]``, ``amin``, ``amax`` or ``sum`` of ``x [n]``."""
        return x.new_zeros(len(self.firsts)).scatter_reduce_(0, self.of, x, how, include_self=False)


def _cut(lengths_q: Tensor, lengths_kv: Tensor, starts_q: Tensor, starts_kv: Tensor, cost: Cost) -> _Segments:
    """The chunks of sequences that are in order."""
    classes = _classes(lengths_q, lengths_kv)
    is_first = torch.ones_like(classes, dtype=torch.bool)
    is_first[1:] = classes[1:] != classes[:-1]
    buckets = _Segments.starting(is_first)
    longest_q, longest_kv = (buckets.reduce(x, "amax") for x in (lengths_q, lengths_kv))
    if (
        cost.whole
        and len(buckets.firsts) == 1
        and all(
            bool((starts == starts[0] + length * torch.arange(len(starts), device=_HOST)).all())
            and bool((lengths == length).all())
            for starts, lengths, length in ((starts_q, lengths_q, longest_q), (starts_kv, lengths_kv, longest_kv))
        )
    ):
        return buckets
    elements = cost.per_pair * longest_q * longest_kv + cost.per_row * (longest_q + longest_kv)
    capacity = (cost.budget // elements.clamp_min(1)).clamp_min(1)
    return _Segments.starting(is_first | (buckets.rank % capacity[buckets.of] == 0))


def _rows(
    starts: Tensor, lengths: Tensor, segments: _Segments, total_rows: int, device: torch.device
) -> Sequence[Rows]:
    """One side of every chunk."""
    longest = segments.reduce(lengths, "amax")
    # A run of consecutive sequences of one length: the row at which the run would begin is the same for all of them.
    origin = starts - segments.rank * longest[segments.of]
    is_range = (segments.reduce(lengths, "amin") == longest) & (
        segments.reduce(origin, "amin") == segments.reduce(origin, "amax")
    )
    slots = torch.where(is_range[segments.of], 0, longest[segments.of])
    sequence = torch.repeat_interleave(slots)
    position = torch.arange(len(sequence), device=_HOST) - (slots.cumsum(0) - slots)[sequence]
    is_row = position < lengths[sequence]
    row = starts[sequence] + position
    chunk_slots = segments.reduce(slots, "sum")
    padding = (~is_row).nonzero().squeeze(1)
    padding_chunk = segments.of[sequence[padding]]
    padding = padding - (chunk_slots.cumsum(0) - chunk_slots)[padding_chunk]

    sizes = chunk_slots.tolist()
    num_padding = torch.bincount(padding_chunk, minlength=len(sizes)).tolist()
    sources, targets, paddings = (
        x.to(device, non_blocking=True).split(parts)
        for x, parts in (
            (torch.where(is_row, row, 0), sizes),
            (torch.where(is_row, row, total_rows), sizes),
            (padding, num_padding),
        )
    )
    facts = zip(segments.counts, longest.tolist(), is_range.tolist(), starts[segments.firsts].tolist(), strict=True)
    return [
        RowRange(count, length, first) if in_range else RowIndex(count, length, sources[c], targets[c], paddings[c])
        for c, (count, length, in_range, first) in enumerate(facts)
    ]


def _ragged(lengths: Tensor, segments: _Segments, device: torch.device) -> list[Tensor | int]:
    """For each chunk, its one length, or its lengths."""
    low, high = segments.reduce(lengths, "amin").tolist(), segments.reduce(lengths, "amax").tolist()
    parts = lengths.to(device, non_blocking=True).split(segments.counts)
    return [high_ if low_ == high_ else part for low_, high_, part in zip(low, high, parts, strict=True)]
