"""A synthetic log of clicks and impressions with timestamps, whose true click probabilities are known.

The story. Items belong to categories; popularity follows Zipf's law. A user has two interests, and pursues each or
not. If he does, one click on it mostly follows the other within minutes; if not, there is mostly a pause of hours, or a
click on something else, in between. Two kinds of events are logged, what the user clicked and what was shown
without a click. What counts is what he pursues::

    a click is continued    if the click before it is less than ten minutes older and of the same category
    a(c)    = share of the continued clicks that lie in category c, 0 if there are none
    f(c)    = log(1 + impressions of category c in the last two days)
    logit p = bias + quality(item) + taste · a(c) - fatigue · f(c)          for a candidate of category c

Half of the candidates are of an interest of the user, the others of any category.

So time gaps and interests interact. Neither says anything alone: interests of both kinds have equally many clicks, and
half of either's clicks come within minutes of the click before; only a short gap between two clicks of the same
category does. The models see items, times and gaps, never categories, qualities or which interests are pursued. No
model can beat the log-loss of p in expectation: that is the Bayes-optimal NE.
"""

from dataclasses import dataclass

import numpy as np

EVENT_TYPES = ("click", "impression")
MINUTE, HOUR, DAY = 60, 3600, 86_400
CONTINUED = 10 * MINUTE
NUM_INTERESTS = 2
_NOW = 1_760_000_000  # some moment of the year 2025, in seconds since 1970


@dataclass(frozen=True)
class LogConfig:
    """Parameters of the log; the module's docstring explains the formula that the last four enter.

    Attributes:
        num_requests: users, one request each; the last fifth is held out.
        num_items: items; a multiple of the categories. Item 0 stands for none.
        num_categories: categories, at least as many as a user has interests.
        median_clicks: median of the log-normal number of clicks.
        median_impressions: median of the log-normal number of impressions.
        sigma: standard deviation of the logarithm of both.
        max_events: most events of one type.
        no_history: part of the users without events.
        stay: probability that an event is of the category of the one before.
        rhythm: probability that a gap is as the kind of interest says: short for a pursued interest when it is of the
            category of the one before, long when it is not; the other way round for the other interests.
        bias, quality, taste, fatigue: of the logit; ``quality`` is the standard deviation over items.
    """

    num_requests: int = 40_000
    num_items: int = 12
    num_categories: int = 6
    median_clicks: float = 14.0
    median_impressions: float = 8.0
    sigma: float = 0.7
    max_events: int = 64
    no_history: float = 0.03
    stay: float = 0.5
    rhythm: float = 0.9
    bias: float = -2.0
    quality: float = 0.4
    taste: float = 6.0
    fatigue: float = 0.7

    def __post_init__(self) -> None:
        if self.num_requests < 10:
            raise ValueError(f"num_requests must be at least 10, got {self.num_requests}.")
        if self.num_categories < NUM_INTERESTS:
            raise ValueError(f"num_categories must be at least {NUM_INTERESTS}, got {self.num_categories}.")
        if self.num_items % self.num_categories:
            raise ValueError(f"num_items must be a multiple of num_categories, got {self.num_items}.")


@dataclass(frozen=True)
class Events:
    """Events of one type, by user and then by time: ``item`` and ``time`` ``[E]``, ``offsets`` ``[N + 1]``."""

    item: np.ndarray
    time: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Log:
    """Requests, one a user, with the events before them.

    Attributes:
        config: what it was made with.
        events: by event type.
        time: ``[N]`` seconds since 1970, after all events of the user.
        candidate: ``[N]`` item.
        label: ``[N]`` float32, 1 for a click.
        probability: ``[N]``, the true one.
    """

    config: LogConfig
    events: dict[str, Events]
    time: np.ndarray
    candidate: np.ndarray
    label: np.ndarray
    probability: np.ndarray

    def split(self, held_out: str) -> tuple[np.ndarray, np.ndarray]:
        """Requests to learn from and to predict. ``"validation"`` leaves the test part out altogether."""
        end = len(self.label)
        cut = end * 4 // 5
        if held_out == "validation":
            end, cut = cut, cut * 4 // 5
        return np.arange(cut), np.arange(cut, end)


def generate(seed: int, config: LogConfig = LogConfig()) -> Log:  # noqa: B008  it is frozen
    """The log of a seed."""
    rng = np.random.default_rng(seed)
    num, kinds = config.num_requests, config.num_categories
    per_category = config.num_items // kinds
    items = rng.permutation(config.num_items).reshape(kinds, per_category) + 1
    category_of = np.zeros(config.num_items + 1, dtype=np.int64)
    category_of[items] = np.arange(kinds)[:, None]
    quality = rng.normal(0.0, config.quality, config.num_items + 1)
    interests = rng.permuted(np.tile(np.arange(kinds), (num, 1)), axis=1)[:, :NUM_INTERESTS]
    pursued = rng.random((num, NUM_INTERESTS)) < 0.5
    time = _NOW + rng.integers(0, 30 * DAY, num)
    cold = rng.random(num) < config.no_history

    def draw_items(categories: np.ndarray) -> np.ndarray:
        rank = np.searchsorted(_zipf(per_category), rng.random(len(categories)))
        return items[categories, rank]

    events = {}
    for name, median in (("click", config.median_clicks), ("impression", config.median_impressions)):
        lengths = np.exp(rng.normal(np.log(median), config.sigma, num)).astype(np.int64).clip(1, config.max_events)
        last = time - _seconds(rng, 2 * HOUR, 1.5, num) - 1
        categories, when, offsets = _histories(rng, config, interests, pursued, np.where(cold, 0, lengths), last)
        events[name] = Events(draw_items(categories), when, offsets)

    taste = _interest(events["click"], category_of, kinds)
    fatigue = _fatigue(events["impression"], category_of, time, kinds)
    row = np.arange(num)
    shown = interests[row, rng.integers(0, NUM_INTERESTS, num)]
    shown = np.where(rng.random(num) < 0.5, rng.integers(0, kinds, num), shown)
    candidate = draw_items(shown)
    logit = config.bias + quality[candidate] + config.taste * taste[row, shown] - config.fatigue * fatigue[row, shown]
    probability = 1.0 / (1.0 + np.exp(-logit))
    label = (rng.random(num) < probability).astype(np.float32)
    return Log(config, events, time, candidate, label, probability)


def _zipf(count: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, count + 1)
    return np.cumsum(weights) / weights.sum()


def _seconds(rng: np.random.Generator, median: float, sigma: float, shape: int | tuple[int, int]) -> np.ndarray:
    return np.exp(rng.normal(np.log(median), sigma, shape)).astype(np.int64)


def _histories(
    rng: np.random.Generator, config: LogConfig, interests: np.ndarray, pursued: np.ndarray, lengths: np.ndarray,
    last: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Category and time of each event, and offsets; each user's last event happens at ``last``."""
    num, longest = len(lengths), int(lengths.max())
    row = np.arange(num)
    which, short = np.empty((num, longest), dtype=np.int64), np.empty((num, longest), dtype=bool)
    for position in range(longest):
        before = which[:, position - 1] if position else rng.integers(0, NUM_INTERESTS, num)
        step = rng.integers(1, NUM_INTERESTS, num)  # to any other interest
        step[rng.random(num) < config.stay] = 0
        now = (before + step) % NUM_INTERESTS
        which[:, position], short[:, position] = now, (step == 0) == pursued[row, now]
    short ^= rng.random(short.shape) > config.rhythm
    gap = np.where(short, _seconds(rng, 2 * MINUTE, 0.6, short.shape), _seconds(rng, 6 * HOUR, 0.9, short.shape))
    exists = np.arange(longest) < lengths[:, None]
    total = np.cumsum(gap, axis=1)
    when = last[:, None] - (total[row, np.maximum(lengths - 1, 0)][:, None] - total)
    categories = np.take_along_axis(interests, which, axis=1)
    return categories[exists], when[exists], np.concatenate([[0], np.cumsum(lengths)])


def _interest(clicks: Events, category_of: np.ndarray, kinds: int) -> np.ndarray:
    """``a``: ``[N, categories]``."""
    user = np.repeat(np.arange(len(clicks.offsets) - 1), np.diff(clicks.offsets))
    category = category_of[clicks.item]
    continued = np.zeros(len(user), dtype=bool)
    continued[1:] = (user[1:] == user[:-1]) & (category[1:] == category[:-1]) & (np.diff(clicks.time) < CONTINUED)
    cell = (user * kinds + category)[continued]
    count = np.bincount(cell, minlength=(len(clicks.offsets) - 1) * kinds).reshape(-1, kinds)
    return count / np.maximum(count.sum(axis=1, keepdims=True), 1)


def _fatigue(impressions: Events, category_of: np.ndarray, time: np.ndarray, kinds: int) -> np.ndarray:
    """``f``: ``[N, categories]``."""
    user = np.repeat(np.arange(len(time)), np.diff(impressions.offsets))
    recent = time[user] - impressions.time < 2 * DAY
    cell = (user * kinds + category_of[impressions.item])[recent]
    return np.log1p(np.bincount(cell, minlength=len(time) * kinds)).reshape(-1, kinds)
