"""What each pair of data and pooling is trained with: the best of one grid, the same for all four (docs/ranking.md)."""

from dataclasses import replace
from itertools import product

from .model import ModelConfig, Pooling
from .training import TrainConfig

DATA = ("synthetic", "movielens")
POOLINGS: tuple[Pooling, ...] = ("attention", "mean")

LEARNING_RATES = (1e-3, 2e-3, 4e-3)
DROPOUTS = (0.1, 0.3)

# MovieLens hides all users: four in five of the held-out ones are new, and an id seldom seen is learnt by heart.
_BASE = {
    "synthetic": TrainConfig(epochs=3),
    "movielens": TrainConfig(epochs=2, hide_items=0.02, hide_users=1.0),
}
# (learning rate, dropout), by validation NE: `python examples/ranking_results.py --tune`.
_CHOSEN: dict[tuple[str, Pooling], tuple[float, float]] = {
    ("synthetic", "attention"): (2e-3, 0.1),
    ("synthetic", "mean"): (2e-3, 0.1),
    ("movielens", "attention"): (2e-3, 0.1),
    ("movielens", "mean"): (2e-3, 0.1),
}


def recipe(data: str, pooling: Pooling, seed: int) -> TrainConfig:
    """The tuned configuration."""
    return _with(data, pooling, seed, *_CHOSEN[data, pooling])


def grid(data: str, pooling: Pooling, seed: int) -> list[TrainConfig]:
    """The configurations that tuning compares."""
    return [_with(data, pooling, seed, *point) for point in product(LEARNING_RATES, DROPOUTS)]


def _with(data: str, pooling: Pooling, seed: int, learning_rate: float, dropout: float) -> TrainConfig:
    model = ModelConfig(dropout=dropout)
    return replace(_BASE[data], pooling=pooling, seed=seed, learning_rate=learning_rate, model=model)
