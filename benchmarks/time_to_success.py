"""How long a run takes to a success of 0.8, beside Stable-Baselines3's SAC and a plain loop.

  ours            the command line with configs/quickstart.yaml (SAC)
  ours_ppo        the command line with configs/quickstart_ppo.yaml
  sb3             Stable-Baselines3's SAC with its defaults, one environment per task
  sb3_quickstart  the same with the quickstart's hyper-parameters and environments
  sb3_updates     the same with as many updates per vector step as environments
  plain           the plain PyTorch loop (plain_sac.py) with the quickstart's hyper-parameters

One run at a time on the same cores (taskset chooses them): seed 1 of all variants, then seed 2.
Between windows all run the same test episodes. A run has reached the threshold at the first of two
evaluations in a row whose mean over tasks is at least that; it ends there, or after --minutes.
Minutes begin with the process (imports, environments, random steps, our checkpoints); test episodes
do not count. The baselines step MetaWorld's own environments with our goals.

Results are written after each run; with the same folder, finished runs are read, and an interrupted
one starts again. The default takes five hours and more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks import baselines
from benchmarks.baselines import SACJob
from benchmarks.environments import names_of, tasks_option
from benchmarks.measuring import (
    COMMAND,
    NEVER,
    Variant,
    call_of,
    check_files,
    machine,
    parse,
    parser_of,
    positive,
    program,
    require,
    say,
    started,
)
from benchmarks.plain_sac import Hyperparameters
from benchmarks.whole_runs import paced_arguments
from mtrl_lightning.envs.vector.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import UNKNOWN, markdown
from mtrl_lightning.reports.charts import draw_band, format_steps, line_style
from mtrl_lightning.reports.comparison import reaches
from mtrl_lightning.reports.statistics import Estimate
from mtrl_lightning.runs import replacing

CONFIG = Path("configs/quickstart.yaml")
PPO_CONFIG = Path("configs/quickstart_ppo.yaml")
PPO_UPDATES = 256
"""Of PPO between test episodes: two iterations of it, which have 12,000 env steps."""
TASKS = (
    ("reach", "drawer-close", "coffee-button"),
    ("door-open", "button-press-topdown", "window-open"),
)
"""The quickstart's tasks, and three harder ones of MT10, where the arm moves a mechanism."""
VARIANTS = {
    "ours": "this package, SAC",
    "ours_ppo": "this package, PPO",
    "sb3": "Stable-Baselines3 SAC, its defaults",
    "sb3_quickstart": "Stable-Baselines3 SAC, the quickstart's hyper-parameters",
    "sb3_updates": "Stable-Baselines3 SAC, likewise, one update per env step",
    "plain": "plain loop, the quickstart's hyper-parameters",
}
"""Their names in the table."""
OURS = {"ours": CONFIG, "ours_ppo": PPO_CONFIG}
IN_A_ROW = 2
"""Evaluations at the threshold that count as reaching it: one may be luck."""
MEASURES = {"env_steps": "env steps", "updates": "updates", "minutes": "minutes"}
MARKED_POINTS = 40
"""A curve with more test episodes has no markers."""
WINDOW_TIMEOUT = 3_600.0
"""Seconds after which a variant counts as hung; many updates take long on a slow machine."""


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("time_to_success", __doc__, rounds=None, threads=True)
    add = parser.add_argument
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    text = "a set of tasks; several sets by several of it (default two sets of three)"
    add("--tasks", nargs="+", action="append", help=text)
    text = "SAC with MLPs, whose hyper-parameters the baselines have (default %(default)s)"
    add("--config", type=Path, default=CONFIG, help=text)
    add("--seeds", type=positive, default=2, help="runs of each variant (default %(default)s)")
    text = "of the mean over tasks (default %(default)s)"
    add("--threshold", type=float, default=0.8, help=text)
    text = "of training, after which a run ends (default %(default)s)"
    add("--minutes", type=float, default=15.0, help=text)
    text = "env steps between two evaluations (default %(default)s; PPO 12000)"
    add("--every", type=positive, default=9_000, help=text)
    text = "test episodes per task in an evaluation (default %(default)s)"
    add("--num_episodes", type=positive, default=10, help=text)
    add("--horizon", type=positive, default=200, help="of an episode (default %(default)s)")
    text = "that the baselines step: MetaWorld's code or our faster one (default %(default)s)"
    choices = ["metaworld", "ours"]
    add("--baseline_environments", choices=choices, default="metaworld", help=text)
    text = "of the results (default %(default)s)"
    add("--folder", type=Path, default=Path("runs/time_to_success"), help=text)
    return parse(parser, args, _check)


def _check(options: argparse.Namespace) -> None:
    options.tasks = options.tasks or [list(tasks) for tasks in TASKS]
    check_files([options.config])
    if any(name.startswith("sb3") for name in options.variants):
        require("stable_baselines3", "leave it out with --variants ours plain")
    for tasks in options.tasks:
        names_of(tasks)
    recipe_of(options.config)


# ---- the runs ----


def recipe_of(config: Path) -> dict[str, Any]:
    """Read the hyper-parameters of a configuration of SAC with MLPs, as fields of ``SACJob``.

    ``warmup`` is in env steps.

    Raises:
        ConfigurationError: if one is missing, or if there is not one update per vector step.
    """
    given = yaml.safe_load(config.read_text())
    try:
        model = given["model"]["init_args"]
        actor = model["actor"]["init_args"]
        adam = model["actor_optimizer"]["init_args"]
        hyperparameters = Hyperparameters(
            learning_rate=adam["lr"],
            epsilon=adam.get("eps", 1e-8),
            discount=model["discount"],
            tau=model["tau"],
            temperature=model["temperature"]["init_args"]["initial"],
        )
        recipe = {
            "width": actor["width"],
            "depth": actor["depth"],
            "batch_size": given["data"]["batch_size"],
            "capacity": given["data"]["capacity"],
            "envs_per_task": given["rollout"]["envs_per_task"],
            "warmup": given["rollout"]["warmup_steps"],
            "hyperparameters": hyperparameters._asdict(),
        }
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{config} does not set {error}, which the baselines need:"
            f" give all hyper-parameters that {CONFIG} has"
        ) from error
    updates_per_step = given["rollout"].get("updates_per_step", 1)
    if updates_per_step != 1:
        raise ConfigurationError(
            f"{config} has rollout.updates_per_step {updates_per_step}: give a file with 1, which"
            " the baselines make"
        )
    return recipe


def job_of(name: str, tasks: list[str], seed: int, options: argparse.Namespace) -> SACJob:
    """Return the work of a variant: a baseline by itself, ours by the command line.

    Raises:
        ConfigurationError: if there are more environments than env steps between evaluations.
    """
    recipe = recipe_of(options.config)
    if name == "sb3":  # the other defaults of the plain loop are Stable-Baselines3's
        defaults = Hyperparameters(epsilon=1e-8)._asdict()
        recipe |= {"envs_per_task": 1, "batch_size": 256, "hyperparameters": defaults}
        recipe |= {"capacity": 1_000_000, "width": 256, "depth": 2}
    num_envs = len(names_of(tasks)) * recipe["envs_per_task"]
    if options.every < num_envs:
        raise ConfigurationError(
            f"--every {options.every}: give at least {num_envs}, one step of each environment"
        )
    recipe["warmup"] = -(-recipe["warmup"] // num_envs)
    return SACJob(
        tasks=tasks,
        device="cpu",
        threads=options.threads or usable_cores(),
        settle=0,
        environments="ours" if options.baseline_environments == "ours" else "our goals",
        horizon=options.horizon,
        seed=seed,
        steps=options.every // num_envs,
        updates=num_envs if name == "sb3_updates" else 1,
        num_episodes=options.num_episodes,
        **recipe,
    )


def variant_of(name: str, job: SACJob, options: argparse.Namespace, folder: Path) -> Variant:
    """Return a variant, not started yet; ``folder`` is that of its output and of our run."""
    if name not in OURS:
        kind = "plain" if name == "plain" else "sb3_sac"
        command = call_of(baselines.train, {"kind": kind, "job": asdict(job)})
        return Variant(name, command, folder, WINDOW_TIMEOUT)
    given = {
        "root": folder,
        "seed_everything": job.seed,
        "trainer.accelerator": job.device,
        "data.benchmark.init_args.tasks": tasks_option(job.tasks),
        "data.benchmark.init_args.horizon": job.horizon,
        "evaluation.every": NEVER,  # test episodes are run between windows instead
    }
    updates = PPO_UPDATES if name == "ours_ppo" else job.steps
    config = config_of(name, options)
    arguments = paced_arguments([config], given, updates, job.settle, job.num_episodes)
    return Variant(name, [sys.executable, *COMMAND, *arguments], folder, WINDOW_TIMEOUT)


def config_of(name: str, options: argparse.Namespace) -> Path:
    """Return the configuration of one of ours."""
    return PPO_CONFIG if name == "ours_ppo" else options.config


def train(name: str, job: SACJob, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train a variant until it has reached the threshold or its time is over.

    Returns:
        Its evaluations, with env steps, updates, minutes and success of each task.
    """
    evaluations: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="time_to_success-") as folder:
        variant = variant_of(name, job, options, Path(folder))
        with started([variant]):
            minutes = variant.ready_seconds / 60
            while not evaluations or (
                minutes < options.minutes and reached_at(evaluations, options.threshold) is None
            ):
                answer = variant.ask("go")
                minutes += answer["seconds"] / 60
                found = {key: answer[key] for key in ("env_steps", "updates", "success")}
                evaluations.append({**found, "minutes": minutes})
                say(
                    f"{name}, seed {job.seed}: success {mean_success(found):.2f} after"
                    f" {found['env_steps']:,} env steps, {found['updates']:,} updates and"
                    f" {minutes:.1f} minutes"
                )
    return evaluations


def train_or_read(
    name: str, tasks: list[str], seed: int, options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Return the evaluations of a run, from its file if it is finished.

    Raises:
        ConfigurationError: if the file is of a run with other options.
    """
    path = folder / f"{name}_{seed}.json"
    job = job_of(name, tasks, seed, options)
    settings = {key: getattr(options, key) for key in ("threshold", "minutes", "every")}
    made_with = {"job": asdict(job), **settings}
    if name in OURS:
        made_with["config"] = yaml.safe_load(config_of(name, options).read_text())
    if path.exists():
        written = json.loads(path.read_text())
        if written["made_with"] != made_with:
            raise ConfigurationError(
                f"{path} is of a run with other options: give another --folder"
            )
        return written["evaluations"]
    evaluations = train(name, job, options)
    content = {"made_with": made_with, "machine": machine(), "evaluations": evaluations}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1))
    return evaluations


# ---- statistics ----


def mean_success(evaluation: Mapping[str, Any]) -> float:
    """Return the mean over tasks."""
    return float(np.mean(list(evaluation["success"].values())))


def reached_at(evaluations: Sequence[Mapping[str, Any]], threshold: float) -> int | None:
    """Return the index of the first of two evaluations in a row at the threshold, or None."""
    is_above = reaches([mean_success(evaluation) for evaluation in evaluations], threshold)
    for index in range(len(is_above) - IN_A_ROW + 1):
        if all(is_above[index : index + IN_A_ROW]):
            return index
    return None


class Bound(NamedTuple):
    """A measured number, or a lower bound of it where the threshold was not reached."""

    value: float
    is_lower: bool

    def text(self, decimals: int) -> str:
        """Return it as text, a lower bound after ``>``."""
        return f"{'> ' if self.is_lower else ''}{self.value:,.{decimals}f}"


def median(bounds: Sequence[Bound]) -> Bound:
    """Return the median, given in ascending order; runs that did not reach it come last."""
    middle = bounds[(len(bounds) - 1) // 2 : len(bounds) // 2 + 1]
    value = statistics.mean(bound.value for bound in middle)
    return Bound(value, any(bound.is_lower for bound in middle))


def summarize(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], threshold: float
) -> list[dict[str, Any]]:
    """Return a row for each variant: what it took to the threshold, and times ours.

    Args:
        runs: evaluations of each seed, by the variant's name.
        threshold: of the mean over tasks.

    Returns:
        Rows with ``Bound``s, which are ``[value, is_lower]`` in JSON.
    """
    rows: list[dict[str, Any]] = []
    for name, seeds in runs.items():
        places = [reached_at(evaluations, threshold) for evaluations in seeds]
        reached = sum(place is not None for place in places)
        row: dict[str, Any] = {"variant": name, "seeds": len(seeds), "reached": reached}
        for measure in MEASURES:
            bounds = [
                Bound(evaluations[-1 if place is None else place][measure], place is None)
                for evaluations, place in zip(seeds, places, strict=True)
            ]
            bounds.sort(key=lambda bound: (bound.is_lower, bound.value))
            row[measure] = {"median": median(bounds), "min": bounds[0], "max": bounds[-1]}
        rows.append(row)
    ours = next((row for row in rows if row["variant"] == "ours"), None)
    for row in rows:
        row["times_ours"] = {measure: _ratio(row, ours, measure) for measure in MEASURES}
    return rows


def _ratio(row: Mapping[str, Any], ours: Mapping[str, Any] | None, measure: str) -> Bound | None:
    if ours is None or ours[measure]["median"].is_lower:
        return None
    theirs = row[measure]["median"]
    return Bound(theirs.value / ours[measure]["median"].value, theirs.is_lower)


# ---- the result ----


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not trained yet; write and return the sets of tasks with their runs."""
    sets = []
    for tasks in options.tasks:
        folder = options.folder / "_".join(tasks)
        folder.mkdir(parents=True, exist_ok=True)
        runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in options.variants}
        for seed in range(1, options.seeds + 1):
            for name in options.variants:
                runs[name].append(train_or_read(name, tasks, seed, options, folder))
        sets.append({"tasks": tasks, "rows": summarize(runs, options.threshold), "runs": runs})
    figure = plot(sets, options.threshold, options.folder / "time_to_success.png")
    return {"sets": sets, "figure": str(figure)}


def plot(sets: Sequence[Mapping[str, Any]], threshold: float, path: Path) -> Path:
    """Plot success over env steps and over minutes, a row for each set of tasks.

    A line is the mean over seeds, its band their range. A seed that has ended keeps its last value.

    Args:
        sets: tasks and runs of each set.
        threshold: is drawn as a line.
        path: of the PNG.

    Returns:
        The file's path.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(13, 0.6 + 4 * len(sets)), layout="constrained")
    all_axes = figure.subplots(len(sets), 2, squeeze=False, sharey=True)
    for one, (by_steps, by_minutes) in zip(sets, all_axes, strict=True):
        for axes, measure in ((by_steps, "env_steps"), (by_minutes, "minutes")):
            for name, seeds in one["runs"].items():
                x_N, band = band_of(seeds, measure)
                style = line_style(list(VARIANTS).index(name))
                style["marker"] = "." if len(x_N) <= MARKED_POINTS else ""
                draw_band(axes, x_N, band, style, f"{VARIANTS[name]} ({len(seeds)} seeds)")
            axes.axhline(threshold, color="gray", linestyle=":", linewidth=1)
            axes.grid(alpha=0.3)
            axes.set_ylim(-0.03, 1.03)
        title = ", ".join(one["tasks"])
        by_steps.set(title=title, xlabel="environment steps, all tasks", ylabel="success, mean")
        by_minutes.set(title=title, xlabel="minutes without test episodes")
        format_steps(by_steps)
    handles = all_axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", ncols=2)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110)
    return path


def band_of(
    seeds: Sequence[Sequence[Mapping[str, Any]]], measure: str
) -> tuple[npt.NDArray[np.float64], Estimate]:
    """Return all seeds' values of a measure, and there the mean and the range of success."""
    x = [np.array([one[measure] for one in evaluations], float) for evaluations in seeds]
    y = [np.array([mean_success(one) for one in evaluations]) for evaluations in seeds]
    x_N = np.unique(np.concatenate(x))
    y_SN = np.stack([np.interp(x_N, *pair) for pair in zip(x, y, strict=True)])
    return x_N, Estimate(y_SN.mean(0), y_SN.min(0), y_SN.max(0))


def text_of(content: Mapping[str, Any]) -> str:
    """Return the tables."""
    settings = content["settings"]
    parts = [
        f"To a success of {settings['threshold']} in {IN_A_ROW} evaluations in a row, every"
        f" {settings['every']:,} env steps, {settings['num_episodes']} test episodes per task:"
        f" median [smallest, largest] of the seeds. > is a lower bound: not reached in"
        f" {settings['minutes']:g} minutes."
    ]
    for one in content["sets"]:
        lines = [["", "reached", *MEASURES.values(), "times our env steps", "times our minutes"]]
        lines += [_cells(row) for row in one["rows"]]
        parts += [", ".join(one["tasks"]), markdown(lines)]
    return "\n\n".join([*parts, content["figure"]])


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [VARIANTS[row["variant"]], f"{row['reached']} of {row['seeds']}"]
    for measure in MEASURES:
        decimals = 1 if measure == "minutes" else 0
        middle, low, high = (row[measure][key].text(decimals) for key in ("median", "min", "max"))
        cells.append(f"{middle} [{low}, {high}]")
    for measure in ("env_steps", "minutes"):
        ratio = row["times_ours"][measure]
        cells.append(UNKNOWN if ratio is None else ratio.text(1))
    return cells


main = program("time_to_success", options_of, measure, text_of)

if __name__ == "__main__":
    sys.exit(main())
