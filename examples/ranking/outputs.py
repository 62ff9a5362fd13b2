"""Files that are either complete or not there, and the picture of the curves."""

import csv
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there in one step.

    If ``write`` fails, the temporary file goes and ``path`` stays as it was.

    Args:
        path: where the file shall be; its folder is made.
        write: writes the path that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Write rows as CSV with a header line."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(path, write)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that ``write_csv`` wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot_curves(path: Path, title: str, epochs: list[dict[str, float]], bayes_ne: float | None) -> None:
    """Draw NE and AUC by epoch as a PNG.

    Args:
        path: where the PNG shall be.
        title: stands above the two panels.
        epochs: one dict an epoch with ``epoch``, ``train_loss``, ``ne`` and ``auc``.
        bayes_ne: the lowest NE that any model can expect, where it is known.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    number = [row["epoch"] for row in epochs]
    left.plot(number, [row["ne"] for row in epochs], marker="o", label="held out")
    left.axhline(1.0, color="grey", linestyle=":", label="constant predictor")
    if bayes_ne is not None:
        left.axhline(bayes_ne, color="black", linestyle="--", label="Bayes-optimal")
    left.set(xlabel="epoch", ylabel="normalised entropy", xticks=number)
    left.legend()
    right.plot(number, [row["auc"] for row in epochs], marker="o")
    right.set(xlabel="epoch", ylabel="held-out AUC", xticks=number)
    figure.suptitle(title)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))
    plt.close(figure)
