"""What each pair of data and pooling is trained with: the best of one grid, the same for all four (docs/ranking.md)."""

from dataclasses import replace
from itertools import product

from .model import Pooling
from .training import TrainConfig

DATA = ("synthetic", "movielens")
POOLINGS: tuple[Pooling, ...] = ("attention", "mean")

LEARNING_RATES = (2e-3, 4e-3, 8e-3)
EMBEDDING_BOOSTS = (10.0, 25.0)

# Most users of MovieLens' held-out part are new, so training shows the model the shared id of the unseen half the time.
_BASE = {
    "synthetic": TrainConfig(epochs=3),
    "movielens": TrainConfig(epochs=2, batch_size=256, hide_items=0.02, hide_users=0.5),
}
# (learning rate, embedding boost): the lowest validation NE in examples/results/ranking_tuning.csv, which
# `python examples/ranking_results.py --tune` writes.
CHOSEN: dict[tuple[str, Pooling], tuple[float, float]] = {
    ("synthetic", "attention"): (8e-3, 25.0),
    ("synthetic", "mean"): (8e-3, 25.0),
    ("movielens", "attention"): (2e-3, 25.0),
    ("movielens", "mean"): (2e-3, 25.0),
}


def recipe(data: str, pooling: Pooling, seed: int) -> TrainConfig:
    """The tuned configuration."""
    return _with(data, pooling, seed, *CHOSEN[data, pooling])


def grid(data: str, pooling: Pooling, seed: int) -> list[TrainConfig]:
    """The configurations that tuning compares."""
    return [_with(data, pooling, seed, *point) for point in product(LEARNING_RATES, EMBEDDING_BOOSTS)]


def _with(data: str, pooling: Pooling, seed: int, learning_rate: float, boost: float) -> TrainConfig:
    return replace(_BASE[data], pooling=pooling, seed=seed, learning_rate=learning_rate, embedding_boost=boost)
