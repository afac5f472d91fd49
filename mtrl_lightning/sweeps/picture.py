"""The picture of a sweep: its history, what matters, and parallel coordinates. No PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl_lightning.runs import replacing
from mtrl_lightning.sweeps.study import Study
from mtrl_lightning.sweeps.sweep_file import Parameter, SweepFile
from mtrl_lightning.sweeps.table import MIN_TRIALS, Row, importances, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "sweep.png"
COLORS = "viridis"
JITTER = 0.06
"""Distance, as a share of the axis, by which lines through one choice are moved apart."""


def draw(study: Study, sweep: SweepFile, rows: list[Row], folder: Path) -> Path:
    """Draw a sweep and return the path of the picture.

    Args:
        study: with the trials.
        sweep: what the sweep file says.
        rows: the trials.
        folder: of the sweep.
    """
    from matplotlib.figure import Figure, SubFigure  # takes a second to import

    complete = [row for row in rows if row.state == "complete" and row.value is not None]
    figure = Figure(figsize=(12, 8), layout="constrained")
    upper: SubFigure
    lower: SubFigure
    upper, lower = figure.subfigures(2, 1)  # type: ignore[misc]  # an array of them
    history, importance = upper.subplots(1, 2, width_ratios=(3, 2))
    _draw_history(history, sweep, rows)
    _draw_importance(importance, study, sweep, complete)
    _draw_coordinates(lower.subplots(), sweep, complete)
    path = folder / PICTURE
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=85)
    return path


def _draw_history(axes: Axes, sweep: SweepFile, rows: list[Row]) -> None:
    """Plot each trial's value, and the best so far."""
    from matplotlib.ticker import MaxNLocator

    by_number = sorted((row for row in rows if row.value is not None), key=lambda row: row.trial)
    complete = [row for row in by_number if row.state == "complete"]
    pruned = [row for row in by_number if row.state == "pruned"]
    for shown, marker, label in ((complete, "o", "trial"), (pruned, "x", "ended early")):
        if shown:
            values = [row.value for row in shown if row.value is not None]
            axes.plot([row.trial for row in shown], values, marker, label=label)
    label = "IQM over seeds and tasks, 95 % interval"
    for row in complete:
        if row.low is not None and row.middle is not None and row.high is not None:
            axes.plot([row.trial] * 2, [row.low, row.high], color="C1", alpha=0.7, label=label)
            axes.plot([row.trial], [row.middle], "_", color="C1")
            label = "_"  # one entry of the legend for all
    if complete:
        best = np.maximum.accumulate if sweep.is_maximized else np.minimum.accumulate
        so_far = best([row.value for row in complete if row.value is not None])
        numbers = [row.trial for row in complete]
        axes.step(numbers, so_far, where="post", color="black", label="best so far")
        axes.legend(fontsize="small")
    axes.set(xlabel="trial", ylabel=sweep.metric, title="history")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _draw_importance(axes: Axes, study: Study, sweep: SweepFile, complete: list[Row]) -> None:
    """Plot how much of the differences each parameter explains, by PED-ANOVA."""
    axes.set_title("importance of the parameters (PED-ANOVA)")
    found = importances(study, sweep, complete)
    if not found:
        _write(axes, f"needs {MIN_TRIALS} complete trials and a parameter that varies")
        return
    names = short_names([parameter.name for parameter in sweep.parameters])
    ordered = sorted(found, key=lambda name: found[name])
    axes.barh([names[name] for name in ordered], [found[name] for name in ordered])
    axes.set_xlim(0, 1)
    axes.grid(alpha=0.3, axis="x")


def _draw_coordinates(axes: Axes, sweep: SweepFile, complete: list[Row]) -> None:
    """Plot a line for each trial through its values, colored by its result."""
    names = short_names([parameter.name for parameter in sweep.parameters])
    axes.set_title("parallel coordinates of the complete trials")
    if not complete or not names:
        _write(axes, "needs complete trials and a parameter")
        return
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = np.array([row.value for row in complete])
    scale = Normalize(values.min(), values.max())
    colors = matplotlib.colormaps[COLORS]
    generator = np.random.default_rng(0)
    order = np.argsort(values if sweep.is_maximized else -values)  # the best on top
    for index in order:
        row = complete[index]
        heights = [
            _height(parameter, row.parameters.get(parameter.name), generator)
            for parameter in sweep.parameters
        ]
        heights.append(float(scale(row.value)) if len(values) > 1 else 0.5)
        axes.plot(range(len(heights)), heights, color=colors(scale(row.value)), linewidth=1.5)
    for place, parameter in enumerate(sweep.parameters):
        _label_axis(axes, place, parameter)
    last = len(sweep.parameters)
    axes.axvline(last, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, last + 0.3)
    axes.set_ylim(-0.08, 1.08)
    axes.set_xticks(range(last + 1), [*names.values(), sweep.metric])
    axes.set_yticks([])
    figure = axes.figure
    figure.colorbar(ScalarMappable(scale, colors), ax=axes, label=sweep.metric, pad=0.01)


def _height(parameter: Parameter, value: Any, generator: np.random.Generator) -> float:
    """Return where a parameter's axis has a value, between 0 and 1."""
    if parameter.choices:
        place = parameter.choices.index(value) if value in parameter.choices else 0
        middle = place / max(len(parameter.choices) - 1, 1)
        return middle + generator.uniform(-JITTER, JITTER) / 2
    low = parameter.low
    high = parameter.high
    if parameter.is_log:
        return float(np.log(value / low) / np.log(high / low))
    return float((value - low) / (high - low))


def _label_axis(axes: Axes, place: int, parameter: Parameter) -> None:
    """Draw a parameter's axis with its values."""
    axes.axvline(place, color="black", linewidth=0.8)
    if parameter.choices:
        count = max(len(parameter.choices) - 1, 1)
        labels = [(k / count, str(value)) for k, value in enumerate(parameter.choices)]
    else:
        labels = [(0.0, f"{parameter.low:.3g}"), (1.0, f"{parameter.high:.3g}")]
    for height, text in labels:
        axes.annotate(
            text[-24:],
            (place, height),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize="small",
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1.5},
        )


def _write(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()
