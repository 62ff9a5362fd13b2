"""The chart of a run. Matplotlib is imported here alone, and only when a chart is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .problem import BACKWARD, FORWARD
from .provenance import Provenance
from .report import OK, Row

# What a chart's file may end with.
FORMATS = (".png", ".svg", ".pdf")
_OURS = ("#0b6e4f", "#3fb68b", "#8fd6b8", "#c9ecdd")
_PEERS = ("#b5471b", "#e08e45", "#5f6b7a", "#a9b3bf")
_GROUP_HEIGHT = 0.8


def plot_rows(path: Path, rows: Sequence[Row], provenance: Provenance) -> None:
    """Draw forward and backward times as grouped bars, with the 20th to 80th percentile as whiskers.

    A bar's length is its time over the slowest 80th percentile of its workload, so that workloads of any size can be
    read side by side; the time itself stands behind the bar.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a forward or backward time.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row.status == OK and row.phase in (FORWARD, BACKWARD)]
    if not timed:
        raise ValueError("rows must hold a forward or backward time to draw, got none.")
    workloads = list(dict.fromkeys(row.workload for row in timed))
    colors = _colors(timed)
    per_group = max(len({r.contestant for r in timed if r.workload == w}) for w in workloads)
    height = 1.6 + len(workloads) * (0.26 * per_group + 0.22)
    figure, axes = plt.subplots(1, 2, figsize=(13, height), sharey=True, layout="constrained")
    try:
        for axis, phase in zip(axes, (FORWARD, BACKWARD), strict=True):
            _draw_phase(axis, phase, [row for row in timed if row.phase == phase], workloads, colors)
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
        figure.legend(handles, list(colors), loc="outside upper center", ncols=len(colors), frameon=False)
        figure.supxlabel(
            f"{provenance.device}, {timed[0].dtype}, {timed[0].scale} size, {provenance.date}, "
            f"torch {provenance.torch}, commit {provenance.commit}",
            fontsize=8,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """A color for each contestant: greens are ours."""
    colors: dict[str, str] = {}
    for is_ours, palette in ((True, _OURS), (False, _PEERS)):
        names = dict.fromkeys(row.contestant for row in rows if row.is_ours == is_ours)
        colors |= {name: palette[i % len(palette)] for i, name in enumerate(names)}
    return colors


def _draw_phase(axis: Any, phase: str, rows: Sequence[Row], workloads: Sequence[str], colors: dict[str, str]) -> None:
    for group, workload in enumerate(workloads):
        mine = [row for row in rows if row.workload == workload]
        slowest = max((row.p80_ms for row in mine), default=1.0)
        thickness = _GROUP_HEIGHT / max(len(mine), 1)
        for place, row in enumerate(mine):
            y = group - _GROUP_HEIGHT / 2 + (place + 0.5) * thickness
            length = row.median_ms / slowest
            whisker = [[(row.median_ms - row.p20_ms) / slowest], [(row.p80_ms - row.median_ms) / slowest]]
            axis.barh(y, length, 0.9 * thickness, color=colors[row.contestant], xerr=whisker, ecolor="#333333")
            axis.text(row.p80_ms / slowest + 0.015, y, f"{row.median_ms:.3g} ms", va="center", fontsize=7.5)
    axis.set_title(phase)
    axis.set_xlabel("time over the workload's slowest (bar: median, whisker: 20th to 80th percentile)", fontsize=8)
    axis.set_yticks(range(len(workloads)), workloads)
    axis.set_ylim(len(workloads) - 0.5, -0.5)
    axis.set_xlim(0, 1.15)
    axis.spines[["top", "right"]].set_visible(False)
