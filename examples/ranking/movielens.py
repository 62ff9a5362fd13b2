"""MovieLens-100k, from the file that the ``recbole`` package ships: who rated which film how, and when.

A request is a user at one moment: the candidates are the films rated at that second, the label is rating >= 4, and the
history is the user's strictly earlier ratings, the last 200 of them. The log is split by time: nothing of the held-out
part, and nothing later, is seen in training. Items and users that training does not see share one id.

F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
"""

import importlib.util
import math
from pathlib import Path

import numpy as np

from .errors import InputError
from .requests import UNSEEN, Dataset, Requests, Schema

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
NUM_USERS, NUM_ITEMS, MAX_RATING = 943, 1682, 5  # as the data set's README states them
MAX_HISTORY = 200
CLICK_RATING = 4
HELD_OUT_PART = 0.2


def find_file() -> Path:
    """The ratings file inside the ``recbole`` package, which is looked for but not imported."""
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "MovieLens-100k comes with the package recbole, which is missing: pip install --no-deps recbole."
        )
    return Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k" / "ml-100k.inter"


def load(path: Path | None = None, held_out: str = "test") -> Dataset:
    """Read the ratings and split them by time.

    Args:
        path: a file with the header ``HEADER`` and tab-separated rows; ``None`` finds the one in ``recbole``.
        held_out: ``"test"`` holds out the last fifth of the ratings; ``"validation"`` leaves those out altogether and
            holds out the last fifth of the earlier ones.

    Raises:
        InputError: the file is missing, malformed, or too short to be split.
    """
    path = find_file() if path is None else path
    ratings = read_ratings(path)
    time = ratings[:, 3]
    if held_out == "validation":
        ratings = ratings[time < np.quantile(time, 1 - HELD_OUT_PART)]
        time = ratings[:, 3]
    cut = np.quantile(time, 1 - HELD_OUT_PART) if len(time) else 0
    if not len(time) or time.min() >= cut:
        raise InputError(f"{path}: must hold ratings from before and after a split by time, got {len(time)} ratings.")
    return split(ratings, cut)


def read_ratings(path: Path) -> np.ndarray:
    """The file's rows as ``[n, 4]`` int64: user, item, rating, timestamp.

    Raises:
        InputError: names the file, the line and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}.") from error
    if not lines or lines[0] != HEADER:
        raise InputError(f"{path}:1: must be the header {HEADER!r}, got {lines[0] if lines else 'an empty file'!r}.")
    rows = np.empty((len(lines) - 1, 4), dtype=np.int64)
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows[number - 2] = _parse(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
    return rows


def _parse(line: str) -> tuple[int, int, int, int]:
    fields = line.split("\t")
    if len(fields) != 4:
        raise ValueError(f"must have 4 tab-separated fields, got {len(fields)}.")
    return (
        _integer("user_id", fields[0], 1, NUM_USERS),
        _integer("item_id", fields[1], 1, NUM_ITEMS),
        _integer("rating", fields[2], 1, MAX_RATING),
        _integer("timestamp", fields[3], 0, 2**40),
    )


def _integer(name: str, text: str, low: int, high: int) -> int:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}.") from None
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number in [{low}, {high}], got {text}.")
    return int(value)


def split(ratings: np.ndarray, cut: float) -> Dataset:
    """Requests from before ``cut`` to learn from, those at or after it held out.

    Args:
        ratings: ``[n, 4]`` int64: user, item, rating, timestamp.
        cut: a timestamp.
    """
    ratings = ratings[np.lexsort((ratings[:, 1], ratings[:, 3], ratings[:, 0]))]
    user, item, rating, time = ratings.T
    in_train = time < cut
    item_id, num_items = _ids_seen(item, in_train)
    user_id, num_users = _ids_seen(user, in_train)

    # A request begins wherever the user or the second changes; its candidates are the rows up to the next one.
    is_first = np.ones(len(user), dtype=bool)
    is_first[1:] = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
    first = np.flatnonzero(is_first)
    user_start = np.searchsorted(user, user[first])
    requests = Requests(
        event_item=item_id,
        event_rating=rating,
        event_time=time,
        user=user_id[first],
        time=time[first],
        history_start=np.maximum(user_start, first - MAX_HISTORY),
        history_stop=first,
        candidate_offsets=np.concatenate([first, [len(user)]]),
        candidate_item=item_id,
        label=(rating >= CLICK_RATING).astype(np.float32),
    )
    schema = Schema(num_items, num_users, num_ratings=MAX_RATING + 1)
    train, held_out = np.flatnonzero(in_train[first]), np.flatnonzero(~in_train[first])
    return Dataset(
        "movielens", schema, requests.select(train).validate(schema), requests.select(held_out).validate(schema)
    )


def _ids_seen(raw: np.ndarray, in_train: np.ndarray) -> tuple[np.ndarray, int]:
    """Ids 1, 2, ... for what training sees, ``UNSEEN`` for the rest; and the number of ids, ``UNSEEN`` included."""
    seen = np.unique(raw[in_train])
    position = np.searchsorted(seen, raw).clip(max=len(seen) - 1)
    return np.where(seen[position] == raw, position + 1, UNSEEN), len(seen) + 1
