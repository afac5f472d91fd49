"""curves.png: success and return over environment steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from mtrl_lightning.callbacks.common import SessionCallback, WarnOnce
from mtrl_lightning.callbacks.images import log_image
from mtrl_lightning.reports.budget import TimeBudget
from mtrl_lightning.reports.charts import (
    draw_band,
    format_axes,
    format_steps,
    line_style,
    plain_text,
)
from mtrl_lightning.reports.metrics_file import Curve, read_metrics
from mtrl_lightning.reports.record import is_bounded, is_evaluation
from mtrl_lightning.runs import replacing

QUANTITIES = ("success", "return", "score")
"""Plotted quantities, where an evaluation measured them."""
MAX_LEGEND_ENTRIES = 30
"""A row with more curves has no legend."""


def plot_curves(run_folder: str | Path) -> Path:
    """Plot success, return and score of evaluations, by task and on average.

    Where several splits are evaluated, each has a row, and a row above them compares their
    averages.

    Args:
        run_folder: The folder with ``metrics.csv``.

    Returns:
        The path of the plot, ``curves.png`` in the same folder.
    """
    path = Path(run_folder) / "curves.png"
    with plain_text():
        figure = _figure(read_metrics(run_folder))
        with replacing(path) as unfinished:
            figure.savefig(unfinished, dpi=120)
    return path


def _figure(curves: dict[str, Curve]) -> Any:
    from matplotlib.figure import Figure  # takes a second to import

    splits = _splits(curves)
    quantities = [
        name for name in QUANTITIES if any(f"{split}/{name}" in curves for split in splits)
    ] or ["return"]
    rows = [splits, *([split] for split in splits)] if len(splits) > 1 else [splits]
    figure = Figure(figsize=(11, 4.2 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), squeeze=False)[:, 0]
    for part, shown in zip(parts, rows, strict=True):
        handles: list[Any] = []
        all_axes = part.subplots(1, len(quantities), squeeze=False)[0]
        for axes, quantity in zip(all_axes, quantities, strict=True):
            if len(shown) > 1:
                _plot_averages(axes, curves, shown, quantity)
            else:
                _plot_tasks(axes, curves, shown[0], quantity)
            title = shown[0] if len(rows) > 1 and len(shown) == 1 else "evaluation"
            axes.set(xlabel="environment steps, all tasks", ylabel=f"{title} {quantity}")
            format_axes(axes, is_bounded(quantity))
            format_steps(axes)
            handles = axes.get_legend_handles_labels()
        if handles and len(handles[0]) <= MAX_LEGEND_ENTRIES:
            part.legend(*handles, loc="outside right upper", fontsize="small", handlelength=3.5)
    return figure


def _splits(curves: dict[str, Curve]) -> list[str]:
    """Return the prefixes of the metrics of each evaluated split."""
    names = {name.partition("/")[0] for name in curves if is_evaluation(name)}
    return sorted(names) or ["eval"]


def _plot_averages(
    axes: Any, curves: dict[str, Curve], splits: Sequence[str], quantity: str
) -> None:
    """Plot the average over each split's tasks."""
    for index, split in enumerate(splits):
        if f"{split}/{quantity}" in curves:
            _plot(axes, curves[f"{split}/{quantity}"], split, index, linewidth=2.5)


def _plot_tasks(axes: Any, curves: dict[str, Curve], split: str, quantity: str) -> None:
    """Plot a split's tasks and their average."""
    average = f"{split}/{quantity}"
    names = sorted(name for name in curves if name.startswith(f"{average}/"))
    for index, name in enumerate(names):
        _plot(axes, curves[name], name.removeprefix(f"{average}/"), index, linewidth=1)
    if average in curves:
        steps, values = curves[average]
        style = line_style(0, len(steps)) | {"color": "black", "linewidth": 2.5}
        draw_band(axes, steps, (values, None), style, "average")


def _plot(axes: Any, curve: Curve, label: str, index: int, linewidth: float) -> None:
    steps, values = curve
    style = line_style(index, len(steps)) | {"linewidth": linewidth}
    draw_band(axes, steps, (values, None), style, label)


class CurvesCallback(SessionCallback):
    """Rewrite ``curves.png`` in the run's folder after each evaluation.

    An evaluation is passed over where the image would take more than 1 % of the run's time; the
    last image shows all in any case. W&B and TensorBoard get it as the image ``curves`` if
    they are on. An image that cannot be written, or that a logger cannot take, ends nothing: it is
    reported once.
    """

    key = "curves"

    def __init__(self) -> None:
        self._budget = TimeBudget()
        self._is_outdated = False
        self._warn_once = WarnOnce("curves.png could not be written or logged")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session."""
        super().setup(trainer, pl_module, stage)
        self.session.after_evaluation.append(self.plot_if_affordable)
        self._budget = TimeBudget()

    def plot_if_affordable(self) -> None:
        """Plot the curves, unless that would take too much of the run's time."""
        self._is_outdated = not self._budget.allows()
        if not self._is_outdated:
            self._plot()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plot the curves of the whole run if the last evaluation was passed over."""
        if self._is_outdated:
            self._plot()

    @rank_zero_only
    def _plot(self) -> None:
        folder = self.session.folder
        if not (folder / "metrics.csv").exists():
            return
        with self._budget.measure(), self._warn_once:
            path = plot_curves(folder)
            for logger in self.session.loggers:
                log_image(logger, "curves", path, self.session.counters.env_steps)
