"""Ranking requests over an event log: what every data source produces and what the model reads, batch by batch.

A *request* is one moment at which a user is shown one or more candidate items. Its history is a contiguous run of rows
of the event log (the log is sorted by user, then time), so histories that overlap are stored once.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from .errors import InputError

FEATURES = ("history_item", "history_rating", "history_age", "candidate_item", "user")
UNSEEN = 0  # the id that items, users and ratings not seen in training share
_AGES_PER_DOUBLING = 2


@dataclass(frozen=True)
class Schema:
    """How many ids each feature has; valid ids are ``0 <= id < count``, and 0 is the shared id of the unseen."""

    num_items: int
    num_users: int
    num_ratings: int
    num_ages: int = 64


@dataclass(frozen=True)
class Requests:
    """Requests and the event log that their histories are read from.

    Attributes:
        event_item: ``[E]`` int64, item of each event of the log.
        event_rating: ``[E]`` int64, what the user thought of it (0 where the log does not say).
        event_time: ``[E]`` int64, when; within a user it never decreases.
        user: ``[N]`` int64.
        time: ``[N]`` int64, when the request was made, after every event of its history.
        history_start: ``[N]`` int64, first row of the history in the log.
        history_stop: ``[N]`` int64, end of the history: rows ``history_start <= row < history_stop``.
        candidate_offsets: ``[N + 1]`` int64.
        candidate_item: ``[C]`` int64.
        label: ``[C]`` float32, 1 for a click.
        probability: ``[C]`` float64, the true click probability, where the source knows it.
    """

    event_item: np.ndarray
    event_rating: np.ndarray
    event_time: np.ndarray
    user: np.ndarray
    time: np.ndarray
    history_start: np.ndarray
    history_stop: np.ndarray
    candidate_offsets: np.ndarray
    candidate_item: np.ndarray
    label: np.ndarray
    probability: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.user)

    def select(self, index: np.ndarray) -> "Requests":
        """The requests at ``index``, with the whole event log."""
        rows, offsets = _rows(self.candidate_offsets[index], self.candidate_offsets[index + 1])
        return Requests(
            self.event_item, self.event_rating, self.event_time,
            self.user[index], self.time[index], self.history_start[index], self.history_stop[index],
            offsets, self.candidate_item[rows], self.label[rows],
            None if self.probability is None else self.probability[rows],
        )  # fmt: skip

    def validate(self, schema: Schema) -> "Requests":
        """Raise ``InputError`` unless every id has a row in its embedding table and every number is finite."""
        for name, ids, count in (
            ("item id of an event", self.event_item, schema.num_items),
            ("rating of an event", self.event_rating, schema.num_ratings),
            ("candidate item id", self.candidate_item, schema.num_items),
            ("user id", self.user, schema.num_users),
        ):
            bad = np.flatnonzero((ids < 0) | (ids >= count))
            if bad.size:
                raise InputError(f"{name} must be in [0, {count}), got {ids[bad[0]]} in row {bad[0]}.")
        for name, numbers in (("label", self.label), ("click probability", self.probability)):
            if numbers is not None and not np.isfinite(numbers).all():
                row = int(np.flatnonzero(~np.isfinite(numbers))[0])
                raise InputError(f"{name} must be finite, got {numbers[row]} in row {row}.")
        return self


@dataclass(frozen=True)
class Dataset:
    """What a data source returns.

    Attributes:
        name: the source.
        schema: sizes of the embedding tables.
        train: requests to learn from.
        held_out: requests that are only predicted.
    """

    name: str
    schema: Schema
    train: Requests
    held_out: Requests


@dataclass(frozen=True)
class Batch:
    """Requests as the model reads them.

    Attributes:
        features: the keys ``FEATURES``. Three describe the history, one row an event; two the candidates, one row a
            candidate.
        label: ``[C]`` float32, in the order of the rows of ``candidate_item``.
    """

    features: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``."""
        return Batch(self.features.to(device), self.label.to(device))


def _rows(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all ranges ``start[i] <= row < stop[i]``, one range after another, and the ranges' offsets."""
    lengths = stop - start
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], lengths), offsets


def age_bucket(age: np.ndarray, num_ages: int) -> np.ndarray:
    """Bucket of an age, two for each doubling: ``floor(2 · log2(age))``, at most ``num_ages - 1``; 0 for age 1."""
    return np.minimum((_AGES_PER_DOUBLING * np.log2(np.maximum(age, 1))).astype(np.int64), num_ages - 1)


def make_batch(requests: Requests, index: np.ndarray, schema: Schema, hide: "Hide | None" = None) -> Batch:
    """Gather the requests at ``index``.

    Args:
        requests: where from.
        index: ``[B]`` int64.
        schema: sizes of the tables.
        hide: ids to replace by the shared id of the unseen, in training.
    """
    history, history_offsets = _rows(requests.history_start[index], requests.history_stop[index])
    candidates, candidate_offsets = _rows(requests.candidate_offsets[index], requests.candidate_offsets[index + 1])
    history_lengths, candidate_lengths = np.diff(history_offsets), np.diff(candidate_offsets)
    age = np.repeat(requests.time[index], history_lengths) - requests.event_time[history]
    columns = [
        (requests.event_item[history], history_lengths),
        (requests.event_rating[history], history_lengths),
        (age_bucket(age, schema.num_ages), history_lengths),
        (requests.candidate_item[candidates], candidate_lengths),
        (np.repeat(requests.user[index], candidate_lengths), candidate_lengths),
    ]
    if hide is not None:
        columns = hide(columns)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.from_numpy(np.concatenate([values for values, _ in columns])),
        lengths=torch.from_numpy(np.concatenate([lengths for _, lengths in columns])),
    )
    return Batch(features, torch.from_numpy(requests.label[candidates]))


@dataclass(frozen=True)
class Hide:
    """Replaces a random part of the ids by the shared id of the unseen, so that training teaches the model that id too.

    Attributes:
        generator: source of the randomness.
        items: part of the items of history and candidates to hide.
        users: part of the users to hide.
    """

    generator: np.random.Generator
    items: float
    users: float

    def __call__(self, columns: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The columns of ``FEATURES``, some ids hidden."""
        part = {"history_item": self.items, "candidate_item": self.items, "user": self.users}
        return [
            (np.where(self.generator.random(len(values)) < part[name], UNSEEN, values), lengths)
            if part.get(name)
            else (values, lengths)
            for name, (values, lengths) in zip(FEATURES, columns, strict=True)
        ]
