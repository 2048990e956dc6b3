"""Pictures of a run from its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError, MissingDependency
from megatron_rl.observe.sinks import read_metrics

PANELS = (
    ("reward/mean", "training reward", "#1f6fb4"),
    ("sft/loss", "training loss", "#b4551f"),
    ("preference/loss", "training loss", "#b4551f"),
    ("val/accuracy", "held-out accuracy", "#2a8a4a"),
)
SMOOTH = 0.9
"""Weight of the past in the smoothed line."""


def plot_curves(metrics_path: str | Path, png_path: str | Path, title: str | None = None) -> None:
    """Draw reward, loss and accuracy over steps, one panel for each that the run has.

    Training curves show each step faintly and a running mean (0.9) strongly; the band around the reward is one
    standard deviation of the step's samples. Raises DataError if the file has none of these metrics.
    """
    rows = read_metrics(metrics_path)
    panels = [panel for panel in PANELS if _rows_with(rows, panel[0])]
    if not panels:
        names = ", ".join(name for name, _, _ in PANELS)
        raise DataError(f"{metrics_path}: has none of {names} -- nothing to draw -- run at least one step")
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("curves need matplotlib -- pip install matplotlib") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.2 * len(panels), 3.6), dpi=130, layout="constrained")
        for number, (name, label, color) in enumerate(panels, start=1):
            axes = figure.add_subplot(1, len(panels), number)
            _draw(axes, rows, name, color)
            axes.set_title(label, loc="left", fontsize=11)
            axes.set_xlabel("step")
            axes.grid(alpha=0.25, linewidth=0.6)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        FigureCanvasAgg(figure).print_png(str(png_path))


def _draw(axes: Any, rows: Sequence[dict[str, float]], name: str, color: str) -> None:
    shown = _rows_with(rows, name)
    steps, values = [row["step"] for row in shown], [row[name] for row in shown]
    if name.startswith("val/"):
        axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.6)
        axes.set_ylim(-0.02, 1.02)
        for position in {0, len(steps) - 1}:
            axes.annotate(
                f"{values[position]:.2f}",
                (steps[position], values[position]),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=color,
            )
        return
    smooth = _smooth(values)
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9, label="step")
    axes.plot(steps, smooth, color=color, linewidth=1.9, label="running mean")
    if name == "reward/mean" and all(math.isfinite(row.get("reward/std", math.nan)) for row in shown):
        spread = _smooth([row["reward/std"] for row in shown])
        low = [middle - std for middle, std in zip(smooth, spread, strict=True)]
        high = [middle + std for middle, std in zip(smooth, spread, strict=True)]
        label = "+- 1 std of the samples"
        axes.fill_between(steps, low, high, color=color, alpha=0.1, linewidth=0, label=label)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _rows_with(rows: Sequence[dict[str, float]], name: str) -> list[dict[str, float]]:
    """The rows that have a finite number under the name."""
    return [row for row in rows if math.isfinite(row.get(name, math.nan))]


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential running mean with bias correction at the start."""
    smoothed: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTH * total + (1 - SMOOTH) * value
        weight = SMOOTH * weight + (1 - SMOOTH)
        smoothed.append(total / weight)
    return smoothed
