"""Makes the modules of ``examples/`` importable, as they are when a script there runs."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have.
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401

from ranking.movielens import HEADER  # noqa: E402
from ranking.requests import Dataset  # noqa: E402
from ranking.synthetic import SyntheticConfig  # noqa: E402
from ranking.synthetic import load as load_synthetic  # noqa: E402


@pytest.fixture(scope="session")
def small_log() -> Dataset:
    """A synthetic log that trains in about a second."""
    return load_synthetic(3, config=SyntheticConfig(num_requests=400, max_length=61, median_length=13.0))


@pytest.fixture
def ratings_file(tmp_path: Path) -> Path:
    """A file in MovieLens' format: 11 users, 23 items, many ratings in the same second, rows in no order."""
    rng = np.random.default_rng(7)
    lines = {
        (rng.integers(1, 12), rng.integers(1, 24), rng.integers(1, 6), 1000 + rng.integers(0, 97)) for _ in range(500)
    }
    path = tmp_path / "ratings.inter"
    path.write_text("\n".join([HEADER, *("\t".join(map(str, line)) for line in lines)]) + "\n")
    return path
