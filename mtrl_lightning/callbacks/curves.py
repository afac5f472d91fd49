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
from mtrl_lightning.reports.metrics_file import Curve, read_metrics
from mtrl_lightning.runs import replacing

QUANTITIES = ("success", "return", "score")
"""Plotted quantities, where an evaluation measured them."""
BOUNDED = ("success", "score")
"""Quantities between 0 and 1."""
LINE_STYLES = ("-", "--", ":")
"""Each is used with all of Matplotlib's ten colours before the next."""
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
    # imported here because it takes a second
    from cycler import cycler
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    lines = cycler(linestyle=LINE_STYLES) * rcParams["axes.prop_cycle"]
    curves = read_metrics(run_folder)
    path = Path(run_folder) / "curves.png"
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
            axes.set_prop_cycle(lines)
            if len(shown) > 1:
                _plot_averages(axes, curves, shown, quantity)
            else:
                _plot_tasks(axes, curves, shown[0], quantity)
            title = shown[0] if len(rows) > 1 and len(shown) == 1 else "evaluation"
            _label(axes, quantity, title)
            handles = axes.get_legend_handles_labels()
        if handles and len(handles[0]) <= MAX_LEGEND_ENTRIES:
            part.legend(*handles, loc="outside right upper", fontsize="small", handlelength=3.5)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120)
    return path


def _splits(curves: dict[str, Curve]) -> list[str]:
    """Return the prefixes of the metrics of each evaluated split."""
    parts = [name.split("/") for name in curves]
    prefixes = {
        part[0]
        for part in parts
        if len(part) == 2 and (part[0] == "eval" or part[0].startswith("eval_"))
    }
    return sorted(prefixes) or ["eval"]


def _plot_averages(
    axes: Any, curves: dict[str, Curve], splits: Sequence[str], quantity: str
) -> None:
    """Plot the average over each split's tasks."""
    for split in splits:
        if f"{split}/{quantity}" in curves:
            axes.plot(*curves[f"{split}/{quantity}"], marker=".", linewidth=2.5, label=split)


def _plot_tasks(axes: Any, curves: dict[str, Curve], split: str, quantity: str) -> None:
    """Plot a split's tasks and their average."""
    average = f"{split}/{quantity}"
    for name in sorted(name for name in curves if name.startswith(f"{average}/")):
        label = name.removeprefix(f"{average}/")
        axes.plot(*curves[name], marker=".", linewidth=1, label=label)
    if average in curves:
        axes.plot(*curves[average], color="black", linestyle="-", linewidth=2.5, label="average")


def _label(axes: Any, quantity: str, title: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set(xlabel="environment steps, all tasks", ylabel=f"{title} {quantity}")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if quantity in BOUNDED:
        axes.set_ylim(-0.03, 1.03)


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
