"""From the rows of many runs to the table, the picture and the verdicts of ``docs/ranking.md``."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from .errors import InputError
from .outputs import write_atomically

Row = dict[str, str]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def last_epochs(rows: Iterable[Row], data: str, pooling: str) -> list[Row]:
    """The last epoch of each run on ``data`` with ``pooling``, by seed."""
    last: dict[int, Row] = {}
    for row in rows:
        if (row["data"], row["pooling"]) == (data, pooling):
            seed = int(row["seed"])
            if seed not in last or int(row["epoch"]) > int(last[seed]["epoch"]):
                last[seed] = row
    return [last[seed] for seed in sorted(last)]


def column(rows: Iterable[Row], name: str) -> list[float]:
    """A column as numbers."""
    return [float(row[name]) for row in rows]


def gap_closed(row: Row) -> float:
    """Part of the way from the constant predictor (NE 1) to the Bayes-optimal NE."""
    return (1.0 - float(row["ne"])) / (1.0 - float(row["bayes_ne"]))


def standard_error(numbers: list[float]) -> float:
    """Of the mean: standard deviation (n - 1) over the root of n; 0 for one number."""
    return statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0.0


def tuned(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """Learning rate and embedding boost with the lowest NE after the last epoch, by data and pooling."""
    last: dict[tuple[str, str], dict[tuple[float, float], float]] = {}
    for row in rows:  # in the order of the epochs
        point = (float(row["learning_rate"]), float(row["embedding_boost"]))
        last.setdefault((row["data"], row["pooling"]), {})[point] = float(row["ne"])
    return {run: min(ne, key=ne.__getitem__) for run, ne in last.items()}


def verdicts(rows: list[Row]) -> list[tuple[bool, str]]:
    """Each bar that the rows can answer: whether it is met, and a sentence with the figures."""
    found = []
    attention, mean = (last_epochs(rows, "synthetic", pooling) for pooling in ("attention", "mean"))
    if attention:
        least = min(gap_closed(row) for row in attention)
        found.append((least >= 0.5, f"synthetic: attention closes at least {least:.1%} of the gap (bar: 50%)"))
    if attention and mean:
        ours, theirs = column(attention, "ne"), column(mean, "ne")
        gain = statistics.mean(theirs) - statistics.mean(ours)
        spread = max(max(ne) - min(ne) for ne in (ours, theirs))
        text = (
            f"synthetic: attention's NE is {gain:.4f} below mean pooling's (bar: the spread over seeds, {spread:.4f})"
        )
        found.append((gain > spread, text))
    attention, mean = (last_epochs(rows, "movielens", pooling) for pooling in ("attention", "mean"))
    if attention and mean:
        ours, theirs = column(attention, "auc"), column(mean, "auc")
        lead, error = statistics.mean(ours) - statistics.mean(theirs), standard_error(theirs)
        bar = f"bar: minus one standard error, {-error:.4f}"
        text = f"MovieLens: attention's AUC minus mean pooling's is {lead:+.4f} ({bar})"
        found.append((lead >= -error, text))
    return found


def markdown(rows: list[Row]) -> str:
    """The results as a table, and the verdicts below it."""
    lines = [
        "| data | pooling | seeds | held-out NE | held-out AUC | gap to Bayes closed | training |",
        "|---|---|---|---|---|---|---|",
    ]
    for data in ("synthetic", "movielens"):
        for pooling in ("attention", "mean"):
            runs = last_epochs(rows, data, pooling)
            if runs:
                lines.append(_table_row(rows, data, pooling, runs))
    first = rows[0]
    lines += [
        "",
        "Mean ± standard error over the seeds, after the last epoch; training is the mean time of a run, with the "
        "evaluation after each epoch.",
        "",
        *(f"- {'met' if met else '**not met**'}: {text}." for met, text in verdicts(rows)),
        "",
        f"`{first['command']}`, {first['date']}, commit {first['commit']}, Python {first['python']}, torch "
        f"{first['torch']}, torchrec {first['torchrec']}, {first['device']}, {first['threads']} threads.",
    ]
    return "\n".join(lines)


def _table_row(rows: list[Row], data: str, pooling: str, runs: list[Row]) -> str:
    def average(numbers: list[float]) -> str:
        return f"{statistics.mean(numbers):.4f} ± {standard_error(numbers):.4f}"

    seconds = sum(column((row for row in rows if (row["data"], row["pooling"]) == (data, pooling)), "seconds"))
    closed = "–" if not runs[0]["bayes_ne"] else f"{statistics.mean(map(gap_closed, runs)):.1%}"
    cells = [
        data, pooling, ", ".join(row["seed"] for row in runs), average(column(runs, "ne")),
        average(column(runs, "auc")), closed, f"{seconds / len(runs):.0f} s",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def around_results(page: Path) -> tuple[str, str]:
    """What stands before and after the two markers in a Markdown page.

    Raises:
        InputError: the page does not have each of them once, in this order.
    """
    before, *rest = page.read_text().split(BEGIN)
    after = "".join(rest).split(END)
    if len(rest) != 1 or len(after) != 2 or END in before:
        raise InputError(f"{page}: must have {BEGIN} and then {END}, each once")
    return before, after[1]


def insert(page: Path, text: str) -> None:
    """Replace what stands between the two markers in a Markdown page."""
    before, after = around_results(page)
    write_atomically(page, lambda temporary: temporary.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}") and None)


def plot(path: Path, rows: list[Row]) -> None:
    """Held-out NE by epoch of every run, one panel a data source."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, data in zip(axes, ("synthetic", "movielens"), strict=True):
        for pooling, color in (("attention", "tab:blue"), ("mean", "tab:orange")):
            runs = [row for row in rows if (row["data"], row["pooling"]) == (data, pooling)]
            for i, seed in enumerate(sorted({int(row["seed"]) for row in runs})):
                run = [row for row in runs if int(row["seed"]) == seed]
                label = pooling if i == 0 else None
                axis.plot(column(run, "epoch"), column(run, "ne"), marker="o", color=color, alpha=0.7, label=label)
        bayes = [float(row["bayes_ne"]) for row in rows if row["data"] == data and row["bayes_ne"]]
        if bayes:
            axis.axhspan(min(bayes), max(bayes), color="black", alpha=0.5, label="Bayes-optimal")
        epochs = sorted({int(row["epoch"]) for row in rows if row["data"] == data})
        axis.axhline(1.0, color="grey", linestyle=":", label="constant predictor")
        axis.set(title=data, xlabel="epoch", ylabel="held-out normalised entropy", xticks=epochs)
        axis.legend()
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=100))
    plt.close(figure)
