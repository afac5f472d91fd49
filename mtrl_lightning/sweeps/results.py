"""The results of a sweep: a table of its configurations, and Optuna's plots. No PyTorch."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mtrl_lightning.formats import UNKNOWN, markdown, number
from mtrl_lightning.runs import replacing
from mtrl_lightning.sweeps.sweep import ERROR
from mtrl_lightning.sweeps.sweep_file import SweepFile, Value, import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

TABLE = "sweep.md"
PLOTS = "plots"
"""The plots' folder in that of the sweep."""
DECIMALS = 3
"""Of results, in which trials may differ by little."""
STATES = ("COMPLETE", "PRUNED", "FAIL")
"""States of finished runs, the worst last; a pruned one ended early."""
MIN_TRIALS = 4
"""Complete trials without which the importance of a parameter is not estimated."""


class Row(NamedTuple):
    """The finished runs of one configuration."""

    trial: int
    state: str
    """The worst one of the runs."""
    values: list[float]
    """The metric's best value of each run that has not failed; of a pruned one the last."""
    params: dict[str, Value]
    errors: list[str]


def rows_of(study: Study, sweep: SweepFile) -> list[Row]:
    """Return the configurations, the best first, then those that ended early, then failed ones.

    Args:
        study: with the runs.
        sweep: content of the sweep file.
    """
    runs: dict[int, list[FrozenTrial]] = {}
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished():
            runs.setdefault(trial.number // len(sweep.seeds), []).append(trial)
    rows = [
        Row(
            index,
            max((one.state.name for one in trials), key=STATES.index),
            [one.value for one in trials if one.value is not None],
            trials[0].params,
            [one.user_attrs[ERROR] for one in trials if ERROR in one.user_attrs],
        )
        for index, trials in runs.items()
    ]
    sign = -1 if sweep.is_maximized else 1
    return sorted(
        rows,
        key=lambda row: (STATES.index(row.state), sign * statistics.fmean(row.values or [0.0])),
    )


def write_table(rows: list[Row], sweep: SweepFile, folder: Path) -> str:
    """Write all configurations as ``sweep.md``, and return them as text.

    Args:
        rows: what ``rows_of`` returns.
        sweep: content of the sweep file.
        folder: of the sweep.
    """
    lines = [["trial", "state", sweep.metric, "of each seed", *sweep.parameters]]
    for row in rows:
        mean = number(statistics.fmean(row.values), DECIMALS) if row.values else UNKNOWN
        seeds = ", ".join(number(value, DECIMALS) for value in row.values) or UNKNOWN
        params = [
            f"{one:.3g}" if isinstance(one, float) else str(one) for one in row.params.values()
        ]
        lines.append([str(row.trial), row.state.lower(), mean, seeds, *params])
    best = "largest" if sweep.is_maximized else "smallest"
    notes = [f"{sweep.metric}: the {best} value of a run, averaged over seeds"]
    notes += [f"trial {row.trial} failed: {error}" for row in rows for error in row.errors]
    text = "\n\n".join([markdown(lines), *notes])
    with replacing(folder / TABLE) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
    return text


def write_plots(study: Study, metric: str, folder: Path) -> None:
    """Draw a sweep's complete runs as PNG files.

    Args:
        study: with the runs, of which one or more are complete.
        metric: its name.
        folder: of the plots.
    """
    from matplotlib import pyplot  # takes a second to import

    optuna = import_optuna()
    draw = optuna.visualization.matplotlib
    complete = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    names = list(complete[0].params)
    varied = [name for name in names if len({str(one.params[name]) for one in complete}) > 1]
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    plots = {
        "history": lambda: draw.plot_optimization_history(study, target_name=metric),
        "curves": lambda: draw.plot_intermediate_values(study),
    }
    if varied:
        plots["slices"] = lambda: draw.plot_slice(study, varied, target_name=metric)
        plots["parallel"] = lambda: draw.plot_parallel_coordinate(study, varied, target_name=metric)
    if varied and len(complete) >= MIN_TRIALS:
        plots["importances"] = lambda: draw.plot_param_importances(
            study, evaluator=evaluator, params=varied, target_name=metric
        )
    folder.mkdir(exist_ok=True)
    for name, plot in plots.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*experimental.*")
            plot()
        pyplot.savefig(folder / f"{name}.png", dpi=85, bbox_inches="tight")
        pyplot.close()
