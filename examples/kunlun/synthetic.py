"""A synthetic log of clicks and impressions with timestamps, whose true click probabilities are known.

The story. Items belong to categories; popularity follows Zipf's law. A user's events come in sessions: within one they
are minutes apart and mostly of one category, between two lie hours or days. Two kinds of events are logged, what the
user clicked and what was shown without a click. At the moment of a request the user is either in the middle of a
session or back after a break, and that decides which interest counts::

    tau     = 1 hour if the last click is less than an hour ago, else 30 days
    a(c)    = share of the clicks that lie in category c, click j weighted by exp(-age_j / tau)
    f(c)    = log(1 + impressions of category c in the last two days)
    logit p = bias + quality(item) + taste · a(c) - fatigue · f(c)          for a candidate of category c

So the gap before the request and the interests interact: what was clicked a minute ago says nearly all in a running
session, and little after a break, when the long-term taste is back. The models see items, times and gaps, never
categories, qualities or taus. No model can beat the log-loss of p in expectation: that is the Bayes-optimal NE.
"""

from dataclasses import dataclass

import numpy as np

EVENT_TYPES = ("click", "impression")
HOUR, DAY = 3600, 86_400
_NOW = 1_760_000_000  # some moment of the year 2025, in seconds since 1970


@dataclass(frozen=True)
class LogConfig:
    """Parameters of the log; the module's docstring explains the formula that the last five enter.

    Attributes:
        num_requests: users, one request each; the last fifth is held out.
        num_items: items; a multiple of the categories. Item 0 stands for none.
        num_categories: categories.
        median_clicks: median of the log-normal number of clicks.
        median_impressions: median of the log-normal number of impressions.
        sigma: standard deviation of the logarithm of both.
        max_events: most events of one type.
        no_history: part of the users without events.
        focus: probability that an event is of its session's category.
        bias, quality, taste, fatigue: of the logit; ``quality`` is the standard deviation over items.
    """

    num_requests: int = 20_000
    num_items: int = 16
    num_categories: int = 8
    median_clicks: float = 14.0
    median_impressions: float = 8.0
    sigma: float = 0.7
    max_events: int = 64
    no_history: float = 0.03
    focus: float = 0.85
    bias: float = -1.5
    quality: float = 0.4
    taste: float = 5.0
    fatigue: float = 0.7

    def __post_init__(self) -> None:
        if self.num_requests < 10:
            raise ValueError(f"num_requests must be at least 10, got {self.num_requests}.")
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
    favourites = rng.integers(0, kinds, (num, 2))
    time = _NOW + rng.integers(0, 30 * DAY, num)
    cold = rng.random(num) < config.no_history
    running = rng.random(num) < 0.5
    last_age = np.where(running, np.exp(rng.normal(np.log(180), 1.0, num)), np.exp(rng.normal(np.log(DAY), 1.0, num)))
    last_age = np.where(running, np.minimum(last_age, HOUR - 1), np.maximum(last_age, HOUR)).astype(np.int64) + 1

    def draw_items(categories: np.ndarray) -> np.ndarray:
        rank = np.searchsorted(_zipf(per_category), rng.random(len(categories)))
        return items[categories, rank]

    events = {}
    for name, median in (("click", config.median_clicks), ("impression", config.median_impressions)):
        lengths = np.exp(rng.normal(np.log(median), config.sigma, num)).astype(np.int64).clip(1, config.max_events)
        offsets = np.concatenate([[0], np.cumsum(np.where(cold, 0, lengths))])
        age = last_age if name == "click" else np.exp(rng.normal(np.log(DAY / 4), 1.5, num)).astype(np.int64) + 1
        categories, when = _sessions(rng, config, favourites, offsets, time - age)
        events[name] = Events(draw_items(categories), when, offsets)

    taste = _interest(events["click"], category_of, time, kinds, np.where(last_age < HOUR, HOUR, 30 * DAY))
    fatigue = _fatigue(events["impression"], category_of, time, kinds)
    shown = _shown_categories(rng, events["click"], category_of, favourites, kinds)
    candidate = draw_items(shown)
    row = np.arange(num)
    logit = config.bias + quality[candidate] + config.taste * taste[row, shown] - config.fatigue * fatigue[row, shown]
    probability = 1.0 / (1.0 + np.exp(-logit))
    label = (rng.random(num) < probability).astype(np.float32)
    return Log(config, events, time, candidate, label, probability)


def _zipf(count: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, count + 1)
    return np.cumsum(weights) / weights.sum()


def _sessions(
    rng: np.random.Generator, config: LogConfig, favourites: np.ndarray, offsets: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Category and time of each event; each user's last event happens at ``last``."""
    count, lengths = int(offsets[-1]), np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    begins = rng.random(count) < 0.25
    begins[offsets[:-1][lengths > 0]] = True
    pause = np.exp(rng.normal(np.log(1.5 * DAY), 0.8, count))
    gap = np.where(begins, pause, np.exp(rng.normal(np.log(120), 0.8, count))).astype(np.int64)
    total = np.cumsum(gap)
    when = last[user] - (total[offsets[user + 1] - 1] - total)
    session = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    loyal = rng.random(len(starts)) < 0.7
    favourite = favourites[user[starts], rng.integers(0, 2, len(starts))]
    interest = np.where(loyal, favourite, rng.integers(0, config.num_categories, len(starts)))
    stray = rng.integers(0, config.num_categories, count)
    return np.where(rng.random(count) < config.focus, interest[session], stray), when


def _interest(clicks: Events, category_of: np.ndarray, time: np.ndarray, kinds: int, tau: np.ndarray) -> np.ndarray:
    """``a``: ``[N, categories]``."""
    user = np.repeat(np.arange(len(time)), np.diff(clicks.offsets))
    # Relative to the last click, so that no weight underflows.
    newest = clicks.time[clicks.offsets[user + 1] - 1]
    weight = np.exp((clicks.time - newest) / tau[user])
    mass = np.bincount(user * kinds + category_of[clicks.item], weight, len(time) * kinds).reshape(-1, kinds)
    return mass / np.maximum(mass.sum(axis=1, keepdims=True), 1e-12)


def _fatigue(impressions: Events, category_of: np.ndarray, time: np.ndarray, kinds: int) -> np.ndarray:
    """``f``: ``[N, categories]``."""
    user = np.repeat(np.arange(len(time)), np.diff(impressions.offsets))
    recent = time[user] - impressions.time < 2 * DAY
    cell = (user * kinds + category_of[impressions.item])[recent]
    return np.log1p(np.bincount(cell, minlength=len(time) * kinds)).reshape(-1, kinds)


def _shown_categories(
    rng: np.random.Generator, clicks: Events, category_of: np.ndarray, favourites: np.ndarray, kinds: int
) -> np.ndarray:
    """``[N]``: a third each of the last click's category, of a favourite, of any."""
    num = len(favourites)
    anything = rng.integers(0, kinds, num)
    last = np.where(
        np.diff(clicks.offsets) > 0, category_of[clicks.item[np.maximum(clicks.offsets[1:] - 1, 0)]], anything
    )
    favourite = favourites[np.arange(num), rng.integers(0, 2, num)]
    return np.choose(rng.integers(0, 3, num), [last, favourite, anything])
