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
from mtrl_lightning.reports.charts import Chart, Curve, draw_chart, plain_text
from mtrl_lightning.reports.record import RunRecord, is_bounded, is_evaluation, read_run
from mtrl_lightning.reports.run_report import task_chart
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
        figure = _figure(read_run(Path(run_folder)))
        with replacing(path) as unfinished:
            figure.savefig(unfinished, dpi=120)
    return path


def _figure(run: RunRecord) -> Any:
    from matplotlib.figure import Figure  # takes a second to import

    evaluations = [name.split("/") for name in run.curves if is_evaluation(name)]
    splits = sorted({parts[0] for parts in evaluations}) or ["eval"]
    measured = {parts[1] for parts in evaluations}
    quantities = [name for name in QUANTITIES if name in measured] or ["return"]
    rows = [splits, *([split] for split in splits)] if len(splits) > 1 else [splits]
    figure = Figure(figsize=(11, 4.2 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), squeeze=False)[:, 0]
    for part, shown in zip(parts, rows, strict=True):
        title = shown[0] if len(rows) > 1 and len(shown) == 1 else "evaluation"
        handles: list[Any] = []
        all_axes = part.subplots(1, len(quantities), squeeze=False)[0]
        for axes, quantity in zip(all_axes, quantities, strict=True):
            is_split = len(shown) == 1
            metric = f"{shown[0]}/{quantity}"
            chart = task_chart(run, metric) if is_split else _averages(run, shown, quantity)
            draw_chart(axes, chart)
            axes.set_ylabel(f"{title} {quantity}")
            handles = axes.get_legend_handles_labels()
        if handles and len(handles[0]) <= MAX_LEGEND_ENTRIES:
            part.legend(*handles, loc="outside right upper", fontsize="small", handlelength=3.5)
    return figure


def _averages(run: RunRecord, splits: Sequence[str], quantity: str) -> Chart:
    """Return the average over each split's tasks."""
    curves = [
        Curve(split, *run.curves[f"{split}/{quantity}"], index)
        for index, split in enumerate(splits)
        if f"{split}/{quantity}" in run.curves
    ]
    return Chart(quantity, curves, is_bounded(quantity))


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
