"""The results of a sweep: a table of its runs, and Optuna's plots. No PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mtrl_lightning.formats import markdown, number
from mtrl_lightning.runs import replacing
from mtrl_lightning.sweeps.sweep_file import SweepFile, optuna

if TYPE_CHECKING:
    from optuna import Study

TABLE = "sweep.md"
PLOTS = "plots"
"""The plots' folder in that of the sweep."""
DECIMALS = 3
"""Of results, in which runs may differ by little."""
STATES = ("COMPLETE", "PRUNED", "FAIL")
"""States of finished runs, the worst last; a pruned one ended early."""


def write_table(study: Study, sweep: SweepFile, folder: Path) -> str:
    """Write all finished runs as ``sweep.md``, the best first, and return them as text."""
    sign = -1 if sweep.goal == "maximize" else 1
    trials = [one for one in study.get_trials(deepcopy=False) if one.state.is_finished()]
    trials.sort(key=lambda one: (STATES.index(one.state.name), sign * (one.value or 0.0)))
    names = [name.replace("init_args.", "").removeprefix("model.") for name in sweep.parameters]
    lines = [["trial", "state", sweep.metric, *names]]
    for one in trials:
        values = [one.params[name] for name in sweep.parameters]
        params = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        result = number(one.value, decimals=DECIMALS)
        lines.append([str(one.number), one.state.name.lower(), result, *params])
    text = f"{markdown(lines)}\n\n{sweep.metric}: the best value of a run"
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
    import matplotlib  # takes a second to import

    matplotlib.use("agg")  # no window, whatever MPLBACKEND says
    from matplotlib import pyplot

    draw = optuna.visualization.matplotlib
    plots = {
        "history": lambda: draw.plot_optimization_history(study, target_name=metric),
        "curves": lambda: draw.plot_intermediate_values(study),
        "slices": lambda: draw.plot_slice(study, target_name=metric),
        "parallel": lambda: draw.plot_parallel_coordinate(study, target_name=metric),
    }
    folder.mkdir(exist_ok=True)
    for name, plot in plots.items():
        # Optuna sets a style for all later plots of the process
        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            plot()
            pyplot.savefig(folder / f"{name}.png", dpi=85, bbox_inches="tight")
        pyplot.close()
