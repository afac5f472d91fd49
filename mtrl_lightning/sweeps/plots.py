"""Plots of a sweep, drawn by Optuna: history, curves, importances, slices, parallel coordinates."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl_lightning.runs import replacing
from mtrl_lightning.sweeps.sweep_file import SweepFile, import_optuna
from mtrl_lightning.sweeps.table import short_names

if TYPE_CHECKING:
    import optuna

PLOTS = "plots"
"""The plots' folder in that of the sweep."""
MIN_TRIALS = 4
"""Complete trials without which the importance of a parameter is not estimated."""
STYLE: dict[Any, Any] = {
    "figure.figsize": (10, 5),
    "axes.titlesize": "medium",
    "axes.labelsize": "small",
}


def write_plots(study: optuna.Study, sweep: SweepFile, folder: Path) -> list[Path]:
    """Draw a sweep's complete trials as PNG files and return their paths; none without trials.

    Args:
        study: with the trials.
        sweep: content of the sweep file.
        folder: of the sweep.
    """
    from matplotlib import pyplot  # takes a second to import

    shown = _with_short_names(study, sweep)
    drawn = _plots(shown, sweep.metric)
    paths = []
    with pyplot.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental.*")
        for name, draw in drawn.items():
            draw()
            paths.append(folder / PLOTS / f"{name}.png")
            paths[-1].parent.mkdir(exist_ok=True)
            with replacing(paths[-1]) as unfinished:
                pyplot.savefig(unfinished, format="png", dpi=85, bbox_inches="tight")
            pyplot.close()
    return paths


def _plots(study: optuna.Study, metric: str) -> dict[str, Callable[[], Any]]:
    """Return the functions that draw a study, by the name of the plot."""
    optuna = import_optuna()
    draw = optuna.visualization.matplotlib
    complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    if not complete:
        return {}
    plots: dict[str, Callable[[], Any]] = {
        "history": functools.partial(draw.plot_optimization_history, study, target_name=metric),
        "curves": functools.partial(draw.plot_intermediate_values, study),
    }
    names = list(complete[0].params)
    varied = [name for name in names if len({str(one.params[name]) for one in complete}) > 1]
    if varied and len(complete) >= MIN_TRIALS:
        plots["importances"] = functools.partial(
            draw.plot_param_importances,
            study,
            evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
            params=varied,
            target_name=metric,
        )
    if names:
        plots["slices"] = functools.partial(draw.plot_slice, study, names, target_name=metric)
        plots["parallel"] = functools.partial(
            draw.plot_parallel_coordinate, study, names, target_name=metric
        )
    return plots


def _with_short_names(study: optuna.Study, sweep: SweepFile) -> optuna.Study:
    """Return the finished trials with names of parameters that fit beside a plot."""
    optuna = import_optuna()
    names = short_names(list(sweep.parameters))
    copy = optuna.create_study(direction=study.direction)
    for trial in study.get_trials(deepcopy=False):
        if not trial.state.is_finished():
            continue
        copy.add_trial(
            optuna.trial.create_trial(
                state=trial.state,
                value=trial.value,
                params={names[name]: value for name, value in trial.params.items()},
                distributions={names[name]: one for name, one in trial.distributions.items()},
                intermediate_values=trial.intermediate_values,
            )
        )
    return copy
