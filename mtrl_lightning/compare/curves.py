"""curves.png of a run: the metrics of its evaluations."""

from __future__ import annotations

from pathlib import Path

from mtrl_lightning.compare.charts import Chart, Curve, save_png
from mtrl_lightning.compare.record import RunRecord, is_bounded, read_run
from mtrl_lightning.compare.statistics import Estimate

CURVES = "curves.png"


def plot_curves(run_folder: str | Path) -> Path:
    """Plot the metrics of evaluations, by task and on average, and return the plot's path.

    Where several splits are evaluated, each has a row, below one that compares their averages.

    Args:
        run_folder: The folder with ``metrics.jsonl``; the plot is ``curves.png`` in it.

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """
    charts = evaluation_charts(read_run(Path(run_folder)))
    num_quantities = len({chart.title.rpartition("/")[2] for chart in charts})
    return save_png(charts, Path(run_folder) / CURVES, columns=num_quantities)


def evaluation_charts(run: RunRecord) -> list[Chart]:
    """Return a chart of each metric of evaluations; of several splits, first one of all of them."""
    metrics = run.evaluated()
    splits = sorted({metric.partition("/")[0] for metric in metrics})
    charts = []
    if len(splits) > 1:
        for quantity in dict.fromkeys(metric.partition("/")[2] for metric in metrics):
            averages = [
                _curve(run, f"{split}/{quantity}", split, index)
                for index, split in enumerate(splits)
                if f"{split}/{quantity}" in run.curves
            ]
            charts.append(Chart(quantity, averages, is_bounded(quantity), run.step_unit))
    by_split = sorted(metrics, key=lambda metric: metric.partition("/")[0])
    return charts + [_task_chart(run, metric) for metric in by_split]


def _task_chart(run: RunRecord, metric: str) -> Chart:
    """Return the chart of a metric: a curve of each task, and the average."""
    curves = [
        _curve(run, f"{metric}/{task}", task, index)
        for index, task in enumerate(run.tasks_of(metric))
    ]
    if metric in run.curves:
        curves.append(_curve(run, metric, "average", None))
    return Chart(metric, curves, is_bounded(metric), run.step_unit)


def _curve(run: RunRecord, metric: str, name: str, color_index: int | None) -> Curve:
    env_steps, values = run.curves[metric]
    return Curve(name, env_steps, Estimate(values), color_index)
