"""curves.png: success and return over environment steps."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback

Curve = tuple[list[int], list[float]]


def read_metrics(run_folder: str | Path) -> dict[str, Curve]:
    """Return every metric of a run as ``{name: (env_steps, values)}``, without empty cells."""
    curves: dict[str, Curve] = {}
    with (Path(run_folder) / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("env_steps", "step"):
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(int(row["env_steps"]))
                    values.append(float(value))
    return curves


def plot_curves(run_folder: str | Path) -> Path:
    """Plot what evaluations measured of success, return and score, by task and on average.

    Args:
        run_folder: The folder with ``metrics.csv``.

    Returns:
        The path of the plot, ``curves.png`` in the same folder.
    """
    # imported here because it takes a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    curves = read_metrics(run_folder)
    path = Path(run_folder) / "curves.png"
    names = ("success", "return", "score")
    quantities = [name for name in names if f"eval/{name}" in curves] or ["return"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    handles: list[Any] = []
    all_axes = figure.subplots(1, len(quantities), squeeze=False)[0]
    for axes, quantity in zip(all_axes, quantities, strict=True):
        prefix = f"eval/{quantity}/"
        for name in sorted(n for n in curves if n.startswith(prefix)):
            axes.plot(*curves[name], marker=".", linewidth=1, label=name.removeprefix(prefix))
        if f"eval/{quantity}" in curves:
            axes.plot(*curves[f"eval/{quantity}"], color="black", linewidth=2.5, label="average")
        axes.set(xlabel="environment steps, all tasks", ylabel=f"evaluation {quantity}")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        handles = axes.get_legend_handles_labels()
        if quantity in ("success", "score"):
            axes.set_ylim(-0.03, 1.03)
    if handles and len(handles[0]) <= 30:
        figure.legend(*handles, loc="outside right upper", fontsize="small")
    unfinished = path.with_suffix(".unfinished.png")
    figure.savefig(unfinished, dpi=120)
    unfinished.replace(path)
    return path


class CurvesCallback(SessionCallback):
    """Rewrite ``curves.png`` in the run's folder after each evaluation."""

    key = "curves"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session."""
        super().setup(trainer, pl_module, stage)
        self.session.after_evaluation.append(self._plot)

    @rank_zero_only
    def _plot(self) -> None:
        folder = self.session.folder
        if (folder / "metrics.csv").exists():
            try:
                plot_curves(folder)
            except OSError as error:  # a picture is no reason to lose a run
                rank_zero_warn(f"curves.png could not be written: {error}")
