"""How long a run takes to a success of 0.8, beside Stable-Baselines3 and a plain loop.

  ours            the command line with configs/quickstart.yaml (SAC)
  ours_ppo        the command line with configs/quickstart_ppo.yaml
  ours_midway     the same with midway starts, pausing, an end after success (mt10_quickstart)
  sb3             Stable-Baselines3's SAC with its defaults, one environment per task
  sb3_quickstart  the same with the quickstart's hyper-parameters and environments
  sb3_updates     the same with as many updates per vector step as environments
  sb3_ppo         Stable-Baselines3's PPO with the sizes, rate and entropy of quickstart_ppo
  plain           the plain PyTorch loop with the quickstart's hyper-parameters

One run at a time on the same cores (taskset chooses them): seed 1 of all variants, then seed 2.
Between windows all run the same test episodes. A run has reached the threshold at the first of two
evaluations in a row whose mean over tasks is at least that; it ends there, or after --minutes.
Minutes begin with the process (imports, environments, random steps, our checkpoints); test episodes
do not count. The baselines step MetaWorld's own environments with our goals.

Results are written after each run; with the same folder, finished runs are read, and an interrupted
one starts again. The default takes eight hours and more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import baselines
from benchmarks.baselines import Hyperparameters, Job, PPOJob, SACJob
from benchmarks.environments import names_of, tasks_option
from benchmarks.measuring import (
    COMMAND,
    NEVER,
    REPOSITORY,
    SB3,
    Program,
    Variant,
    call_of,
    positive,
    provenance,
    say,
    started,
)
from benchmarks.whole_runs import paced_arguments
from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.reports.charts import MINUTES, Chart, Curve, save_png
from mtrl_lightning.reports.comparison import reaches
from mtrl_lightning.reports.record import ENV_STEPS
from mtrl_lightning.reports.statistics import Estimate
from mtrl_lightning.runs import replacing

CONFIG = REPOSITORY / "configs/quickstart.yaml"
PPO_CONFIG = REPOSITORY / "configs/quickstart_ppo.yaml"
PPO_DEFAULTS = REPOSITORY / "configs/algorithm/mtppo.yaml"
PPO_ITERATIONS = 2
"""Of PPO between test episodes; they have 12,000 env steps."""
MIDWAY = {
    "rollout.midway_starts": 0.5,
    "rollout.after_success": 30,
    "rollout.pausing": "mtrl_lightning.rollout.PauseSolved",
}
"""The exploration of ``configs/mt10_quickstart.yaml``."""
TASKS = (
    ("reach", "drawer-close", "coffee-button"),
    ("door-open", "button-press-topdown", "window-open"),
    ("push", "pick-place", "peg-insert-side"),
)
"""The quickstart's tasks; three of MT10 where the arm moves a mechanism; three with a grasp."""
VARIANTS = {
    "ours": "this package, SAC",
    "ours_ppo": "this package, PPO",
    "ours_midway": "this package, PPO with midway starts, pausing, an end after success",
    "sb3": "Stable-Baselines3 SAC, its defaults",
    "sb3_quickstart": "Stable-Baselines3 SAC, the quickstart's hyper-parameters",
    "sb3_updates": "Stable-Baselines3 SAC, likewise, one update per env step",
    "sb3_ppo": "Stable-Baselines3 PPO, the sizes of ours",
    "plain": "plain loop, the quickstart's hyper-parameters",
}
"""Their names in the table."""
OURS = {"ours": CONFIG, "ours_ppo": PPO_CONFIG, "ours_midway": PPO_CONFIG}
PPO = ("ours_ppo", "ours_midway", "sb3_ppo")
KINDS = {"plain": "plain sac", "sb3_ppo": "sb3 ppo"}
"""Trainers of baselines that are not Stable-Baselines3's SAC."""
THRESHOLD = 0.8
"""Of the mean success over tasks."""
EVERY = 9_000
"""Env steps between two evaluations."""
NUM_EPISODES = 10
"""Test episodes per task in an evaluation."""
HORIZON = 200
"""Steps of an episode."""
IN_A_ROW = 2
"""Evaluations at the threshold that count as reaching it: one may be luck."""
MEASURES = {"env_steps": "env steps", "updates": "updates", "minutes": "minutes"}


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    names = list(VARIANTS)
    add("--variants", nargs="+", choices=names, default=names, help="the rows of a table")
    text = f"a set of tasks; several sets by several of it; None: {len(TASKS)} sets"
    add("--tasks", nargs="+", action="append", help=text)
    add("--seeds", type=positive, default=2, help="runs of each variant")
    add("--minutes", type=float, default=15.0, help="of training, after which a run ends")
    add("--folder", type=Path, default=Path("runs/time_to_success"), help="of the results")


def _check(options: argparse.Namespace) -> None:
    options.tasks = options.tasks or [list(tasks) for tasks in TASKS]
    if any(name.startswith("sb3") for name in options.variants):
        import_optional(*SB3, "leave it out with --variants ours plain")
    for tasks in options.tasks:
        names_of(tasks)


# ---- the runs ----


def recipe_of(config: Path) -> dict[str, Any]:
    """Read the hyper-parameters of a configuration of SAC with MLPs, as fields of ``SACJob``.

    ``warmup`` is in env steps.
    """
    given = yaml.safe_load(config.read_text())
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
    return {
        "width": actor["width"],
        "depth": actor["depth"],
        "batch_size": given["data"]["batch_size"],
        "capacity": given["data"]["capacity"],
        "envs_per_task": given["rollout"]["envs_per_task"],
        "warmup": given["rollout"]["warmup_steps"],
        "hyperparameters": hyperparameters._asdict(),
    }


def ppo_recipe_of(config: Path) -> dict[str, Any]:
    """Read the sizes of a configuration of PPO with MLPs, as fields of ``PPOJob``."""
    given = yaml.safe_load(config.read_text())
    model = yaml.safe_load(PPO_DEFAULTS.read_text())["model"]["init_args"]
    model |= given["model"]["init_args"]
    return {
        "width": model["actor"]["init_args"]["width"],
        "depth": model["actor"]["init_args"]["depth"],
        "envs_per_task": given["rollout"]["envs_per_task"],
        "num_steps": model["num_steps"],
        "num_epochs": model["num_epochs"],
        "num_minibatches": model["num_minibatches"],
        "learning_rate": model["actor_optimizer"]["init_args"]["lr"],
        "entropy_coef": model["entropy_coef"],
    }


def job_of(name: str, tasks: list[str], seed: int, options: argparse.Namespace) -> Job:
    """Return the work of a variant: a baseline by itself, ours by the command line."""
    shared: dict[str, Any] = {
        "tasks": tasks,
        "device": options.device,
        "threads": options.threads or usable_cores(),
        "settle": 0,
        "environments": "our goals",
        "horizon": HORIZON,
        "seed": seed,
        "num_episodes": NUM_EPISODES,
    }
    if name in PPO:
        return PPOJob(**shared, **ppo_recipe_of(PPO_CONFIG), iterations=PPO_ITERATIONS)
    recipe = recipe_of(CONFIG)
    if name == "sb3":  # the other defaults of the plain loop are Stable-Baselines3's
        defaults = Hyperparameters(epsilon=1e-8)._asdict()
        recipe |= {"envs_per_task": 1, "batch_size": 256, "hyperparameters": defaults}
        recipe |= {"capacity": 1_000_000, "width": 256, "depth": 2}
    num_envs = len(names_of(tasks)) * recipe["envs_per_task"]
    recipe["warmup"] = -(-recipe["warmup"] // num_envs)
    updates = num_envs if name == "sb3_updates" else 1
    return SACJob(**shared, **recipe, steps=EVERY // num_envs, updates=updates)


def variant_of(name: str, job: Job, folder: Path) -> Variant:
    """Return a variant, not started yet; ``folder`` is that of our run."""
    if name not in OURS:
        kind = KINDS.get(name, "sb3 sac")
        return Variant(name, call_of(baselines.train, {"kind": kind, "job": asdict(job)}))
    given = {
        "root": folder,
        "seed_everything": job.seed,
        "trainer.accelerator": "gpu" if job.device == "cuda" else "cpu",
        "data.benchmark.init_args.tasks": tasks_option(job.tasks),
        "data.benchmark.init_args.horizon": job.horizon,
        "evaluation.every": NEVER,  # test episodes are run between windows instead
    }
    if name == "ours_midway":
        given |= MIDWAY
    if isinstance(job, PPOJob):
        updates = PPO_ITERATIONS * job.updates
    else:
        assert isinstance(job, SACJob)
        updates = job.steps
    arguments = paced_arguments(OURS[name], given, updates, job.settle, job.num_episodes)
    return Variant(name, [sys.executable, *COMMAND, *arguments])


def train(name: str, job: Job, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train a variant until it has reached the threshold or its time is over.

    Returns:
        Its evaluations, with env steps, updates, minutes and success of each task.
    """
    evaluations: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="time_to_success-") as folder:
        variant = variant_of(name, job, Path(folder))
        with started([variant]):
            minutes = variant.ready_seconds / 60
            while not evaluations or (
                minutes < options.minutes and reached_at(evaluations) is None
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
    made_with = {"job": asdict(job), "minutes": options.minutes}
    if name in OURS:
        made_with["config"] = yaml.safe_load(OURS[name].read_text())
    if path.exists():
        written = json.loads(path.read_text())
        if written["made_with"] != made_with:
            raise ConfigurationError(
                f"{path} is of a run with other options: give another --folder"
            )
        return written["evaluations"]
    evaluations = train(name, job, options)
    content = {**provenance(options.command), "made_with": made_with, "evaluations": evaluations}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1))
    return evaluations


# ---- statistics ----


def mean_success(evaluation: Mapping[str, Any]) -> float:
    """Return the mean over tasks."""
    return float(np.mean(list(evaluation["success"].values())))


def reached_at(evaluations: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the first of two evaluations in a row at the threshold, or None."""
    is_above = reaches([mean_success(evaluation) for evaluation in evaluations], THRESHOLD)
    for index in range(len(is_above) - IN_A_ROW + 1):
        if all(is_above[index : index + IN_A_ROW]):
            return index
    return None


def row_of(name: str, seeds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the row of a variant: what each seed took to the threshold.

    Args:
        name: of the variant.
        seeds: evaluations of each seed.

    Returns:
        ``reached`` and each of ``MEASURES``, lists with an entry for each seed; a seed that has not
        reached the threshold has its last number there, which is a lower bound.
    """
    places = [reached_at(evaluations) for evaluations in seeds]
    ends = [
        evaluations[-1 if place is None else place]
        for evaluations, place in zip(seeds, places, strict=True)
    ]
    row: dict[str, Any] = {"variant": name, "reached": [place is not None for place in places]}
    return row | {measure: [end[measure] for end in ends] for measure in MEASURES}


# ---- the result ----


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not trained yet; write and return the sets of tasks with their runs."""
    sets = []
    tables = []
    charts = []
    for tasks in options.tasks:
        folder = options.folder / "_".join(tasks)
        folder.mkdir(parents=True, exist_ok=True)
        runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in options.variants}
        for seed in range(1, options.seeds + 1):
            for name in options.variants:
                runs[name].append(train_or_read(name, tasks, seed, options, folder))
        rows = [row_of(name, seeds) for name, seeds in runs.items()]
        title = ", ".join(tasks)
        sets.append({"tasks": tasks, "rows": rows, "runs": runs})
        tables.append({"title": title, "rows": [shown(row) for row in rows]})
        charts.append(chart_of(title, runs, "env_steps", ENV_STEPS))
        charts.append(chart_of(title, runs, "minutes", MINUTES))
    options.notes.append(
        f"To a success of {THRESHOLD} in {IN_A_ROW} evaluations in a row, every {EVERY:,} env"
        f" steps (PPO 12,000), {NUM_EPISODES} test episodes per task: seed 1 / seed 2 / ... > is a"
        f" lower bound: not reached in {options.minutes:g} minutes."
    )
    figure = save_png(charts, options.folder / "time_to_success.png", columns=2)
    return {"tables": tables, "sets": sets, "figure": str(figure)}


def chart_of(
    title: str, runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], measure: str, label: str
) -> Chart:
    """Return a chart of the mean success over a measure, with a line per seed."""
    curves = [
        Curve(
            f"{VARIANTS[name]} ({len(seeds)} seeds)",
            [evaluation[measure] for evaluation in evaluations],
            Estimate([mean_success(evaluation) for evaluation in evaluations], None, None),
            list(VARIANTS).index(name),
        )
        for name, seeds in runs.items()
        for evaluations in seeds
    ]
    return Chart(title, curves, is_bounded=True, xlabel=label)


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of ``row_of`` as texts, with the seeds of a measure in one cell."""
    texts = {"variant": VARIANTS[row["variant"]]}
    for measure, name in MEASURES.items():
        decimals = 1 if measure == "minutes" else 0
        texts[name] = " / ".join(
            f"{'' if reached else '> '}{value:,.{decimals}f}"
            for reached, value in zip(row["reached"], row[measure], strict=True)
        )
    return texts


program = Program(
    "time_to_success", __doc__, add_options, measure, _check, rounds=None, device=True, threads=True
)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    sys.exit(main())
