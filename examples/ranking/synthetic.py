"""A synthetic click log whose true click probabilities are known.

The story. Items belong to categories; within a category, and among categories, popularity follows Zipf's law. A user
has a few favourite categories, and at any moment one current interest, which now and then drifts: to another
favourite, or to something new. The user's history is a run of items, mostly of the interest of its moment. History
lengths are log-normal; some users have no history. When the user comes back, a recommender shows a few candidates, some
for what the user did lately, some for long-standing favourites, some because they are popular. The click on candidate c
follows

    logit p = bias + quality(c) + a_short · short(c) + a_long · long(c)

``long(c)`` is the share of the whole history that lies in c's category; ``short(c)`` is the same share with event j
weighted by ``exp(-age_j / tau)``: what the user is after now counts most. Both are 0 without a history. The model sees
items and ages, never categories, interests or qualities.

So a mean over the history knows the long-term taste, and, as interests drift slowly, something about the current one. A
mean over normalised events can also learn to shrink old ones, but by their own age alone; attention weighs each event
against the rest of its history, as the formula does. ``p`` depends on the row's features alone, hence no model can beat
the log-loss of ``p`` in expectation: that is the Bayes-optimal NE of the log.
"""

from dataclasses import dataclass

import numpy as np

from .requests import Dataset, Requests, Schema


@dataclass(frozen=True)
class SyntheticConfig:
    """Parameters of the log; the module's docstring explains the formula they enter.

    Attributes:
        num_requests: users, one request each; the last fifth is held out.
        num_items: items, the shared id of the unseen not counted.
        num_categories: categories, each with the same number of items.
        median_length: median of the log-normal history length.
        sigma: standard deviation of the logarithm of the length.
        max_length: longest history.
        no_history: part of the users without a history.
        max_candidates: candidates of a request: 1 to this many, uniformly.
        num_favourites: favourite categories of a user.
        drift: probability that the interest changes from one event to the next.
        loyalty: probability that a new interest is one of the favourites.
        focus: probability that an event's item is of the current interest.
        bias: log-odds of a click without taste or quality.
        short_weight: a_short.
        long_weight: a_long.
        tau: events after which an event's weight in ``short`` has fallen to 1/e.
        quality: standard deviation of ``quality``.
    """

    num_requests: int = 16_000
    num_items: int = 500
    num_categories: int = 10
    median_length: float = 75.0
    sigma: float = 0.83
    max_length: int = 400
    no_history: float = 0.03
    max_candidates: int = 20
    num_favourites: int = 3
    drift: float = 0.05
    loyalty: float = 0.7
    focus: float = 0.8
    bias: float = -3.0
    short_weight: float = 4.5
    long_weight: float = 1.5
    tau: float = 10.0
    quality: float = 0.5


def load(seed: int, held_out: str = "test", config: SyntheticConfig = SyntheticConfig()) -> Dataset:  # noqa: B008
    """Generate the log of a seed.

    Args:
        seed: of everything random in the log.
        held_out: ``"test"`` holds out the last fifth of the users; ``"validation"`` leaves those out altogether and
            holds out the last fifth of the others.
        config: parameters of the log.
    """
    rng = np.random.default_rng(seed)
    catalogue = _Catalogue.draw(rng, config)
    lengths = _history_lengths(rng, config)
    event_user = np.repeat(np.arange(config.num_requests), lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    favourites = catalogue.draw_categories(rng, (config.num_requests, config.num_favourites))
    interest = _interests(rng, config, catalogue, favourites, event_user, offsets)
    of_interest = rng.random(len(event_user)) < config.focus
    category = np.where(of_interest, interest, catalogue.draw_categories(rng, len(event_user)))
    event_time = np.arange(len(event_user)) - offsets[event_user]

    short, long = _affinities(config, category, event_user, lengths[event_user] - event_time)
    candidates = rng.integers(1, config.max_candidates + 1, config.num_requests)
    candidate_user = np.repeat(np.arange(config.num_requests), candidates)
    shown = _shown_categories(rng, config, catalogue, favourites, category, lengths, offsets, candidate_user)
    candidate_item = catalogue.draw_items(rng, shown)
    logit = (
        config.bias
        + catalogue.quality[candidate_item]
        + config.short_weight * short[candidate_user, shown]
        + config.long_weight * long[candidate_user, shown]
    )
    probability = 1.0 / (1.0 + np.exp(-logit))
    requests = Requests(
        event_item=catalogue.draw_items(rng, category),
        event_rating=np.zeros(len(event_user), dtype=np.int64),
        event_time=event_time,
        user=np.zeros(config.num_requests, dtype=np.int64),
        time=lengths,
        history_start=offsets[:-1],
        history_stop=offsets[1:],
        candidate_offsets=np.concatenate([[0], np.cumsum(candidates)]),
        candidate_item=candidate_item,
        label=(rng.random(len(probability)) < probability).astype(np.float32),
        probability=probability,
    )
    # Every user comes once, so none of the held-out ones was seen in training: all share one id.
    schema = Schema(num_items=config.num_items + 1, num_users=1, num_ratings=1)
    train, test = _split(np.arange(config.num_requests))
    if held_out == "validation":
        train, test = _split(train)
    return Dataset("synthetic", schema, requests.select(train).validate(schema), requests.select(test).validate(schema))


def _split(users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cut = len(users) * 4 // 5
    return users[:cut], users[cut:]


def _zipf(count: int) -> np.ndarray:
    """Cumulative probabilities of ranks 1 to ``count`` under Zipf's law with exponent 1."""
    weights = 1.0 / np.arange(1, count + 1)
    return np.cumsum(weights) / weights.sum()


@dataclass(frozen=True)
class _Catalogue:
    """Items by category: row k of ``items`` lists the items of category k, the most popular first."""

    items: np.ndarray
    quality: np.ndarray
    category_cdf: np.ndarray
    item_cdf: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, config: SyntheticConfig) -> "_Catalogue":
        per_category = config.num_items // config.num_categories
        if per_category * config.num_categories != config.num_items:
            raise ValueError(f"num_items must be a multiple of num_categories, got {config}.")
        items = rng.permutation(config.num_items).reshape(config.num_categories, per_category) + 1
        quality = rng.normal(0.0, config.quality, config.num_items + 1)
        return cls(items, quality, _zipf(config.num_categories), _zipf(per_category))

    def draw_categories(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        """Categories by popularity."""
        return np.searchsorted(self.category_cdf, rng.random(size))

    def draw_items(self, rng: np.random.Generator, categories: np.ndarray) -> np.ndarray:
        """An item of each category, by popularity."""
        return self.items[categories, np.searchsorted(self.item_cdf, rng.random(len(categories)))]


def _history_lengths(rng: np.random.Generator, config: SyntheticConfig) -> np.ndarray:
    lengths = np.exp(rng.normal(np.log(config.median_length), config.sigma, config.num_requests)).astype(np.int64)
    return np.where(rng.random(config.num_requests) < config.no_history, 0, lengths.clip(1, config.max_length))


def _interests(
    rng: np.random.Generator, config: SyntheticConfig, catalogue: _Catalogue,
    favourites: np.ndarray, event_user: np.ndarray, offsets: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """``[E]``: the user's interest at each event; it changes at a user's first event and wherever it drifts."""
    changes = rng.random(len(event_user)) < config.drift
    changes[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(changes)
    favourite = favourites[event_user[starts], rng.integers(0, config.num_favourites, len(starts))]
    is_loyal = rng.random(len(starts)) < config.loyalty
    drawn = np.where(is_loyal, favourite, catalogue.draw_categories(rng, len(starts)))
    return drawn[np.cumsum(changes) - 1]


def _affinities(
    config: SyntheticConfig, category: np.ndarray, event_user: np.ndarray, age: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``short`` and ``long``: ``[num_requests, num_categories]`` weighted shares of each user's events."""
    cell = event_user * config.num_categories + category
    size = config.num_requests * config.num_categories

    def share(weight: np.ndarray) -> np.ndarray:
        mass = np.bincount(cell, weight, size).reshape(config.num_requests, config.num_categories)
        return mass / np.maximum(mass.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)

    return share(np.exp(-age / config.tau)), share(np.ones(len(category)))


def _shown_categories(
    rng: np.random.Generator, config: SyntheticConfig, catalogue: _Catalogue, favourites: np.ndarray,
    category: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, user: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """``[C]``: a third each for one of the last ten events, for a favourite, and by popularity."""
    back = (rng.random(len(user)) * np.minimum(lengths[user], 10)).astype(np.int64)
    recent_row = offsets[user + 1] - 1 - back
    favourite = favourites[user, rng.integers(0, config.num_favourites, len(user))]
    popular = catalogue.draw_categories(rng, len(user))
    # A user without a history has no recent event to go by.
    recent = np.where(lengths[user] > 0, category[np.maximum(recent_row, 0)], popular)
    return np.choose(rng.integers(0, 3, len(user)), [recent, favourite, popular])
