r"""How long a run takes to a success of 0.8, beside Stable-Baselines3's SAC and a plain loop.

``python -m benchmarks.time_to_success`` trains each contestant with each seed on each set of tasks,
one run at a time: seed 1 of all contestants, then seed 2, and so on. All runs have the same cores.

- ``ours``: the command line with ``configs/quickstart.yaml``.
- ``ours_ppo``: the command line with ``configs/quickstart_ppo.yaml``, which shows what the choice
  of the algorithm makes; no peer has its hyper-parameters.
- ``sb3``: Stable-Baselines3's SAC with its defaults, one environment per task, the task's one-hot
  in the observation, and our number of random steps before it learns.
- ``sb3_quickstart``: the same with the quickstart's hyper-parameters: batch, networks, learning
  rate, discount, tau, first temperature, replay, copies of each environment.
- ``sb3_updates``: as ``sb3_quickstart``, with as many updates per vector step as environments.
- ``plain``: the plain PyTorch loop (``plain_sac.py``) with the quickstart's hyper-parameters.

After every 9,000 env steps (``--every``; 12,000 of PPO) the same test episodes are run for all of
them, by this package's evaluation: best actions, success in any step, the goals of training. A run
has reached the threshold at the first of two evaluations in a row whose mean over tasks is at least
that; it ends there, or at the first evaluation after ``--minutes``. Minutes are counted from the
start of the process: imports, building environments, random steps, and our checkpoints are in them,
test episodes are not. The peers step MetaWorld's own environments with our goals.

The two sets are the quickstart's tasks and three harder ones of MT10, which need the arm to find
and move a mechanism: door-open, button-press-topdown, window-open. ``--tasks`` gives others.

Results are written to the folder after each run. Called with the same folder again, finished runs
are read, and an interrupted one starts from its beginning, since its minutes must be of one piece.
By default these are 24 runs of at most 15 minutes each, besides test episodes: five hours and more.

    python -m benchmarks.time_to_success --cores 0 1 --contestants ours sb3_quickstart \
        --tasks reach drawer-close coffee-button --tasks door-open button-press-topdown window-open
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks.contestants import Job
from benchmarks.entrants import Entrant, of_command_line, of_module, started
from benchmarks.measuring import (
    NEVER,
    end_on_sigterm,
    heading,
    machine,
    parser_of,
    positive,
    program,
    refusing,
    require,
    say,
)
from benchmarks.plain_sac import Hyperparameters
from benchmarks.upstream import names_of, tasks_option
from mtrl_lightning.envs.vector.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import UNKNOWN, markdown
from mtrl_lightning.reports.comparison import Band, reaches
from mtrl_lightning.reports.comparison_plot import draw_band, format_steps, line_style
from mtrl_lightning.runs import replacing

CONFIG = Path("configs/quickstart.yaml")
TASKS = (
    ("reach", "drawer-close", "coffee-button"),
    ("door-open", "button-press-topdown", "window-open"),
)
PPO_CONFIG = Path("configs/quickstart_ppo.yaml")
PPO_UPDATES = 256
"""Of PPO between test episodes: two iterations of it, which have 12,000 env steps."""
CONTESTANTS = {
    "ours": "this package, SAC",
    "ours_ppo": "this package, PPO",
    "sb3": "Stable-Baselines3 SAC, its defaults",
    "sb3_quickstart": "Stable-Baselines3 SAC, the quickstart's hyper-parameters",
    "sb3_updates": "Stable-Baselines3 SAC, likewise, one update per env step",
    "plain": "plain loop, the quickstart's hyper-parameters",
}
"""Their names in the table."""
OURS = ("ours", "ours_ppo")
SB3 = ("sb3", "sb3_quickstart", "sb3_updates")
IN_A_ROW = 2
"""Evaluations at the threshold that count as reaching it: one may be luck."""
MEASURES = {"env_steps": "env steps", "updates": "updates", "minutes": "minutes"}
WINDOW_SECONDS = 3_600.0
"""After which a contestant counts as hung; many updates take long on a slow machine."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("time_to_success", __doc__)
    add = parser.add_argument
    add(
        "--contestants",
        nargs="+",
        choices=list(CONTESTANTS),
        default=list(CONTESTANTS),
        help="(default all)",
    )
    add(
        "--tasks",
        nargs="+",
        action="append",
        help="a set of tasks; several sets by several of it (default the two sets above)",
    )
    add(
        "--config",
        type=Path,
        default=CONFIG,
        help="SAC with MLPs; the peers have its hyper-parameters (default %(default)s)",
    )
    add("--seeds", type=positive, default=2, help="runs of each contestant (default %(default)s)")
    add("--threshold", type=float, default=0.8, help="of the mean over tasks (default %(default)s)")
    add(
        "--minutes",
        type=float,
        default=15.0,
        help="of training, after which a run ends (default %(default)s)",
    )
    add(
        "--every",
        type=positive,
        default=9_000,
        help="env steps between two evaluations (default %(default)s)",
    )
    add(
        "--num_episodes",
        type=positive,
        default=10,
        help="test episodes per task in an evaluation (default %(default)s)",
    )
    add("--horizon", type=positive, default=200, help="of an episode (default %(default)s)")
    add(
        "--cores",
        nargs="+",
        type=int,
        help="numbers of the cores that every run is bound to (default all)",
    )
    add(
        "--peer_threads",
        type=positive,
        help="PyTorch's threads for the peers (default one per core)",
    )
    add(
        "--peer_environments",
        choices=["metaworld", "ours"],
        default="metaworld",
        help="what the peers step: MetaWorld's own code or our faster code (default %(default)s)",
    )
    add(
        "--sb3_vector",
        choices=["dummy", "subproc"],
        default="dummy",
        help="Stable-Baselines3's vector environment (default %(default)s)",
    )
    add(
        "--folder",
        type=Path,
        default=Path("runs/time_to_success"),
        help="of the results (default %(default)s)",
    )
    options = parser.parse_args(args)
    options.tasks = options.tasks or [list(tasks) for tasks in TASKS]
    if not options.config.is_file():
        parser.error(
            f"{options.config} is not there: start in the repository's folder, or give --config"
        )
    with refusing(parser):
        if not {*SB3}.isdisjoint(options.contestants):
            require("stable_baselines3", "leave it out with --contestants ours plain")
        for tasks in options.tasks:
            names_of(tasks)
        recipe_of(options.config)
        _check_cores(options.cores)
    return options


def _check_cores(cores: Sequence[int] | None) -> None:
    if cores is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError("--cores needs Linux: leave it out to use all cores")
    usable = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in usable]
    if missing:
        raise ConfigurationError(
            f"--cores {missing[0]}: this process may use {', '.join(map(str, sorted(usable)))}"
        )


class Recipe(NamedTuple):
    """The hyper-parameters of a configuration, as far as the peers have them."""

    copies: int
    """Of each task's environment."""
    batch_size: int
    capacity: int
    warmup_steps: int
    """Env steps with random actions."""
    width: int
    depth: int
    hyperparameters: Hyperparameters


def recipe_of(config: Path) -> Recipe:
    """Read the hyper-parameters of a configuration of SAC with MLPs.

    Raises:
        ConfigurationError: if one is missing.
    """
    given = yaml.safe_load(config.read_text())
    try:
        model = given["model"]["init_args"]
        actor = model["actor"]["init_args"]
        hyperparameters = Hyperparameters(
            learning_rate=model["actor_optimizer"]["init_args"]["lr"],
            epsilon=model["actor_optimizer"]["init_args"].get("eps", 1e-8),
            discount=model["discount"],
            tau=model["tau"],
            temperature=model["temperature"]["init_args"]["initial"],
        )
        updates_per_step = given["rollout"].get("updates_per_step", 1)
        if updates_per_step != 1:
            raise ConfigurationError(
                f"{config} has rollout.updates_per_step {updates_per_step}: give a file with 1,"
                " which the peers make"
            )
        return Recipe(
            copies=given["rollout"]["envs_per_task"],
            batch_size=given["data"]["batch_size"],
            capacity=given["data"]["capacity"],
            warmup_steps=given["rollout"]["warmup_steps"],
            width=actor["width"],
            depth=actor["depth"],
            hyperparameters=hyperparameters,
        )
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{config} does not set {error}, which the peers need:"
            f" give all hyper-parameters that {CONFIG} has"
        ) from error


def job_of(name: str, tasks: list[str], seed: int, options: argparse.Namespace) -> Job:
    """Return what a contestant trains: a peer by itself, ours by the command line.

    Args:
        name: of the contestant.
        tasks: the set.
        seed: of the run.
        options: of this program.

    Raises:
        ConfigurationError: if there are more environments than env steps between evaluations.
    """
    recipe = recipe_of(options.config)
    copies = recipe.copies
    hyperparameters = recipe.hyperparameters
    sizes = {"width": recipe.width, "depth": recipe.depth, "batch_size": recipe.batch_size}
    capacity = recipe.capacity
    if name == "sb3":
        copies = 1
        hyperparameters = Hyperparameters(epsilon=1e-8)  # the others' defaults are SB3's
        sizes = {"width": 256, "depth": 2, "batch_size": 256}
        capacity = 1_000_000
    num_envs = len(names_of(tasks)) * copies
    if options.every < num_envs:
        raise ConfigurationError(
            f"--every {options.every}: give at least {num_envs}, one step of each environment"
        )
    return Job(
        tasks=tasks,
        **sizes,
        capacity=capacity,
        warmup=-(-recipe.warmup_steps // num_envs),
        steps=options.every // num_envs,
        settle=0,
        device="cpu",
        threads=options.peer_threads or usable_cores(),
        seed=seed,
        updates=num_envs if name == "sb3_updates" else 1,
        hyperparameters=hyperparameters._asdict(),
        num_episodes=options.num_episodes,
        copies=copies,
        horizon=options.horizon,
        fast=options.peer_environments == "ours",
    )


def entrant_of(name: str, job: Job, options: argparse.Namespace, folder: Path) -> Entrant:
    """Return a contestant, not started yet.

    Args:
        name: of the contestant.
        job: what it trains.
        options: of this program.
        folder: of what it prints, and of our run.
    """
    if name in OURS:
        given = {
            "root": folder,
            "seed_everything": job.seed,
            "trainer.accelerator": job.device,
            "trainer.enable_progress_bar": "false",
            "data.benchmark.init_args.tasks": tasks_option(job.tasks),
            "data.benchmark.init_args.horizon": job.horizon,
            "rollout.total_steps": NEVER,
            "evaluation.every": NEVER,  # test episodes are run between windows instead
        }
        config = config_of(name, options)
        updates = PPO_UPDATES if name == "ours_ppo" else job.steps
        command = of_command_line([config], given, updates, job.settle, job.num_episodes)
        return Entrant(name, "ours", command, folder, WINDOW_SECONDS)
    kind = name.partition("_")[0]
    more: dict[str, Any] = {"kind": kind, "vector": options.sb3_vector}
    if kind == "plain":
        more |= {"vector": "sync", "bf16": False}
    command = of_module("contestants", asdict(job) | more)
    return Entrant(name, kind, command, folder, WINDOW_SECONDS)


def config_of(name: str, options: argparse.Namespace) -> Path:
    """Return the configuration that one of ours trains."""
    return PPO_CONFIG if name == "ours_ppo" else options.config


def train(name: str, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Train a contestant until it has reached the threshold or its time is over.

    Args:
        name: of the contestant.
        job: what it trains.
        options: of this program.

    Returns:
        Its evaluations, with env steps, updates, minutes and success of each task, and the minutes
        of start-up and random steps.
    """
    evaluations: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="time_to_success-") as folder:
        entrant = entrant_of(name, job, options, Path(folder))
        with started([entrant]):
            ready_minutes = entrant.ready_seconds / 60
            minutes = ready_minutes
            while not evaluations or (
                minutes < options.minutes and reached_at(evaluations, options.threshold) is None
            ):
                answer = entrant.ask("go")
                minutes += answer["seconds"] / 60
                evaluations.append(
                    {
                        "env_steps": answer["env_steps"],
                        "updates": answer["updates"],
                        "minutes": minutes,
                        "success": answer["success"],
                    }
                )
                say(
                    f"{name}, seed {job.seed}: success {mean_success(evaluations[-1]):.2f} after"
                    f" {answer['env_steps']:,} env steps, {answer['updates']:,} updates and"
                    f" {minutes:.1f} minutes"
                )
    return {"ready_minutes": ready_minutes, "evaluations": evaluations}


def mean_success(evaluation: Mapping[str, Any]) -> float:
    """Return the mean over tasks."""
    return float(np.mean(list(evaluation["success"].values())))


def reached_at(evaluations: Sequence[Mapping[str, Any]], threshold: float) -> int | None:
    """Return the place of the first of two evaluations in a row at the threshold, or None."""
    is_above = reaches([mean_success(evaluation) for evaluation in evaluations], threshold)
    for place in range(len(is_above) - IN_A_ROW + 1):
        if all(is_above[place : place + IN_A_ROW]):
            return place
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
    value = sum(bound.value for bound in middle) / len(middle)
    return Bound(value, any(bound.is_lower for bound in middle))


def summarize(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], threshold: float
) -> list[dict[str, Any]]:
    """Return a row for each contestant: what it took to the threshold, and times ours.

    Args:
        runs: evaluations of each seed, by the contestant's name.
        threshold: of the mean over tasks.

    Returns:
        Rows with ``Bound``s, which are ``[value, is_lower]`` in JSON.
    """
    rows: list[dict[str, Any]] = []
    for name, seeds in runs.items():
        places = [reached_at(evaluations, threshold) for evaluations in seeds]
        row: dict[str, Any] = {
            "contestant": name,
            "seeds": len(seeds),
            "reached": sum(place is not None for place in places),
        }
        for measure in MEASURES:
            bounds = sorted(
                (
                    Bound(evaluations[-1 if place is None else place][measure], place is None)
                    for evaluations, place in zip(seeds, places, strict=True)
                ),
                key=lambda bound: (bound.is_lower, bound.value),
            )
            row[measure] = {"median": median(bounds), "min": bounds[0], "max": bounds[-1]}
        rows.append(row)
    ours = next((row for row in rows if row["contestant"] == "ours"), None)
    for row in rows:
        row["times_ours"] = {measure: _ratio(row, ours, measure) for measure in MEASURES}
    return rows


def _ratio(row: Mapping[str, Any], ours: Mapping[str, Any] | None, measure: str) -> Bound | None:
    if ours is None or ours[measure]["median"].is_lower:
        return None
    theirs = row[measure]["median"]
    return Bound(theirs.value / ours[measure]["median"].value, theirs.is_lower)


def best_sb3(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the setting of Stable-Baselines3 with the fewest minutes; None if none reached it."""
    minutes = {
        row["contestant"]: row["minutes"]["median"].value
        for row in rows
        if row["contestant"] in SB3 and not row["minutes"]["median"].is_lower
    }
    return min(minutes, key=minutes.__getitem__, default=None)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not trained yet, and return the JSON's content."""
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)  # the runs inherit it
    sets = []
    for tasks in options.tasks:
        folder = options.folder / "_".join(tasks)
        folder.mkdir(parents=True, exist_ok=True)
        runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in options.contestants}
        for seed in range(1, options.seeds + 1):
            for name in options.contestants:
                runs[name].append(_train_or_read(name, tasks, seed, options, folder))
        rows = summarize(runs, options.threshold)
        sets.append({"tasks": tasks, "rows": rows, "best_sb3": best_sb3(rows), "runs": runs})
    figure = plot(sets, options.threshold, options.folder / "time_to_success.png")
    content = {**heading("time_to_success", options), "sets": sets, "figure": str(figure)}
    with replacing(options.folder / "time_to_success.json") as unfinished:
        unfinished.write_text(json.dumps(content, indent=1))
    with replacing(options.folder / "time_to_success.md") as unfinished:
        unfinished.write_text(f"{text_of(content)}\n")
    return content


def _train_or_read(
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
    elif name in SB3:
        made_with["vector"] = options.sb3_vector
    if path.exists():
        written = json.loads(path.read_text())
        if written["made_with"] != made_with:
            raise ConfigurationError(
                f"{path} is of a run with other options: give another --folder"
            )
        return written["evaluations"]
    content = {"made_with": made_with, "machine": machine(), **train(name, job, options)}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1))
    return content["evaluations"]


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
                x_N, band = _band(seeds, measure)
                style = line_style(list(CONTESTANTS).index(name), len(x_N))
                draw_band(axes, x_N, band, style, f"{CONTESTANTS[name]} ({len(seeds)} seeds)")
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


def _band(
    seeds: Sequence[Sequence[Mapping[str, Any]]], measure: str
) -> tuple[npt.NDArray[np.float64], Band]:
    """Return all seeds' values of a measure, and there the mean and the range of success."""
    x = [np.array([one[measure] for one in evaluations], float) for evaluations in seeds]
    y = [np.array([mean_success(one) for one in evaluations]) for evaluations in seeds]
    x_N = np.unique(np.concatenate(x))
    y_SN = np.stack([np.interp(x_N, *pair) for pair in zip(x, y, strict=True)])
    return x_N, Band(y_SN.mean(0), np.stack([y_SN.min(0), y_SN.max(0)], axis=1))


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
        lines += [_cells(row, one["best_sb3"]) for row in one["rows"]]
        parts += [", ".join(one["tasks"]), markdown(lines)]
    return "\n\n".join([*parts, content["figure"]])


def _cells(row: Mapping[str, Any], best: str | None) -> list[str]:
    name = row["contestant"]
    label = CONTESTANTS[name] + (" (its best)" if name == best else "")
    cells = [label, f"{row['reached']} of {row['seeds']}"]
    for measure in MEASURES:
        decimals = 1 if measure == "minutes" else 0
        middle, low, high = (row[measure][key].text(decimals) for key in ("median", "min", "max"))
        cells.append(f"{middle} [{low}, {high}]")
    for measure in ("env_steps", "minutes"):
        ratio = row["times_ours"][measure]
        cells.append(UNKNOWN if ratio is None else ratio.text(1))
    return cells


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
