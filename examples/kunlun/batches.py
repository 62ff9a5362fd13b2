"""Requests of the log as the two models read them: the same facts in two forms."""

from dataclasses import dataclass

import numpy as np
import torch
from ranking.requests import FEATURES, Schema
from torch import Tensor
from torchrec import KeyedJaggedTensor

from .synthetic import EVENT_TYPES, Events, Log

NUM_GAPS = 48  # buckets of gaps and ages, two for each doubling, up to 194 days
NUM_DENSE = 3
EVENT_KEYS = tuple(f"{name}_{part}" for name in EVENT_TYPES for part in ("item", "age", "gap"))


@dataclass(frozen=True)
class Batch:
    """B requests.

    Attributes:
        dense: ``[B, NUM_DENSE]``: logarithms of the break before the request and of the numbers of events.
        sparse: key ``break``, the bucket of the break before the request.
        sequences: keys ``EVENT_KEYS``, item, bucket of age and bucket of gap of each event; and ``candidate_item``, one
            a request.
        timestamps: by event type, seconds of each event, int64.
        ranking: the keys of the ranking example's model: clicks and impressions in one history by time, the bucket of
            the gap to the event of the same type before in place of a rating (clicks and impressions apart), the bucket
            of the break in place of a user.
        label: ``[B]``.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    sequences: KeyedJaggedTensor
    timestamps: dict[str, Tensor]
    ranking: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``."""
        stamps = {name: t.to(device) for name, t in self.timestamps.items()}
        return Batch(
            self.dense.to(device), self.sparse.to(device), self.sequences.to(device), stamps,
            self.ranking.to(device), self.label.to(device),
        )  # fmt: skip


def ranking_schema(log: Log) -> Schema:
    """The tables of the ranking example's model for this log."""
    return Schema(log.config.num_items + 1, num_users=NUM_GAPS, num_ratings=2 * NUM_GAPS, num_ages=NUM_GAPS)


def bucket(seconds: np.ndarray) -> np.ndarray:
    """``floor(2 log2(seconds))``, at most ``NUM_GAPS - 1``; 0 for a second or less."""
    return np.minimum(2 * np.log2(np.maximum(seconds, 1)), NUM_GAPS - 1).astype(np.int64)


def _rows(events: Events, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the requests' events, one request after another, and how many each has."""
    starts, lengths = events.offsets[index], events.offsets[index + 1] - events.offsets[index]
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths), lengths


def _gaps(time: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Seconds since the event before; 0 for the first of each request."""
    gap = np.diff(time, prepend=time[:1])
    gap[(np.cumsum(lengths) - lengths)[lengths > 0]] = 0
    return gap


def make_batch(log: Log, index: np.ndarray) -> Batch:
    """Gather the requests at ``index``."""
    batch = np.arange(len(index))
    columns, merged, stamps = [], [], {}
    last = np.full(len(index), -1)
    for kind, name in enumerate(EVENT_TYPES):
        rows, lengths = _rows(log.events[name], index)
        item, time, owner = log.events[name].item[rows], log.events[name].time[rows], np.repeat(batch, lengths)
        age, gap = bucket(log.time[index][owner] - time), bucket(_gaps(time, lengths))
        columns += [(item, lengths), (age, lengths), (gap, lengths)]
        merged.append(np.stack([owner, time, item, age, gap + NUM_GAPS * kind]))
        stamps[name] = torch.from_numpy(time)
        np.maximum.at(last, owner, time)
    pause = np.where(last < 0, 2**30, log.time[index] - last)
    counts = [lengths for _, lengths in columns[::3]]
    dense = np.log1p(np.stack([pause, *counts], axis=1)) / 10
    one = np.ones(len(index), dtype=np.int64)
    return Batch(
        torch.from_numpy(dense.astype(np.float32)),
        _keyed({"break": (bucket(pause), one)}),
        _keyed({**dict(zip(EVENT_KEYS, columns, strict=True)), "candidate_item": (log.candidate[index], one)}),
        stamps,
        _ranking_features(np.concatenate(merged, axis=1), log.candidate[index], bucket(pause)),
        torch.from_numpy(log.label[index]),
    )


def _ranking_features(merged: np.ndarray, candidate: np.ndarray, pause: np.ndarray) -> KeyedJaggedTensor:
    order = np.lexsort((merged[1], merged[0]))
    owner, _, item, age, gap = merged[:, order]
    lengths, one = np.bincount(owner, minlength=len(candidate)), np.ones(len(candidate), dtype=np.int64)
    columns = [(item, lengths), (gap, lengths), (age, lengths), (candidate, one), (pause, one)]
    return _keyed(dict(zip(FEATURES, columns, strict=True)))


def _keyed(columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(columns),
        values=torch.from_numpy(np.concatenate([values for values, _ in columns.values()])),
        lengths=torch.from_numpy(np.concatenate([lengths for _, lengths in columns.values()])),
    )
