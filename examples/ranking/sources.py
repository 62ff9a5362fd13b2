"""The one door to the data sources."""

from pathlib import Path

from . import movielens, synthetic
from .errors import InputError
from .requests import Dataset


def load(
    data: str, seed: int, held_out: str = "test", requests: int | None = None, path: Path | None = None
) -> Dataset:
    """The data set of a name.

    Args:
        data: ``"synthetic"`` or ``"movielens"``.
        seed: of the synthetic log.
        held_out: ``"test"``, or ``"validation"`` for tuning, which never looks at the test part.
        requests: size of the synthetic log; ``None``: its default.
        path: the MovieLens file; ``None``: the one that ``recbole`` ships.

    Raises:
        InputError: an option does not fit the source, or its file is not usable.
    """
    if data == "movielens":
        if requests is not None:
            raise InputError("--requests must not be given with --data movielens, whose size is its file's.")
        return movielens.load(path, held_out)
    if path is not None:
        raise InputError("--movielens-file must not be given with --data synthetic.")
    if requests is None:
        return synthetic.load(seed, held_out)
    if requests < 10:
        raise InputError(f"--requests must be at least 10, got {requests}.")
    return synthetic.load(seed, held_out, synthetic.SyntheticConfig(num_requests=requests))
