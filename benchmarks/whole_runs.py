"""How fast whole training runs are, beside Stable-Baselines3 and a plain PyTorch loop.

Ours trains through the command line, as users do. Start-up, warm-up, evaluation, checkpoints and
logging are not in the windows.

  --algorithm sac   configs/experiment/mtmhsac.yaml beside Stable-Baselines3's SAC and a plain
                    loop of our algorithm (CleanRL's way), with the same sizes; a window is some
                    vector steps, each one step of every environment and one update
  --algorithm ppo   configs/experiment/mt10_cpu.yaml beside Stable-Baselines3's PPO with the same
                    numbers of environments, steps, epochs and rows of a minibatch; a window is one
                    iteration: collection and all updates, none ended early by the KL divergence

Each variant is a process. The baselines' environments are stepped in their process (sync) or in
processes of their own (async). --threads is for the baselines alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import baselines
from benchmarks.baselines import Examiner, Job, PPOJob, SACJob
from benchmarks.environments import names_of, tasks_option
from benchmarks.measuring import (
    COMMAND,
    NEVER,
    SB3,
    Pacer,
    Variant,
    call_of,
    option_and_value,
    parse,
    parser_of,
    program,
    rows_of,
    spread,
    take_turns,
)
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import ConfigurationError, import_optional

CONFIGS = {"sac": "experiment/mtmhsac", "ppo": "experiment/mt10_cpu"}
NOT_SIZES = {"seed", "updates", "num_episodes"}
"""Fields of a job that differ from ours, which has those of its configuration."""
JOBS: dict[str, type[Job]] = {"sac": SACJob, "ppo": PPOJob}


class PaceCallback(Callback):
    """Let a training run make its updates in windows; one update is one step.

    Of several processes the first alone waits and writes; the others wait for it to exchange.

    Args:
        steps: updates of a window.
        settle: updates before the first window.
        num_episodes: test episodes per task after each window; 0 for none.
    """

    def __init__(self, steps: int, settle: int, num_episodes: int = 0) -> None:
        self._steps = steps
        self._settle = settle
        self._num_episodes = num_episodes
        self._pacer: Pacer | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Wait where a window is over."""
        assert isinstance(pl_module, Algorithm)
        if not trainer.is_global_zero:
            return
        if self._pacer is None:
            self._pacer = self._make_pacer(trainer, pl_module)
        if not self._pacer.tick():
            sys.exit(0)

    def _make_pacer(self, trainer: Trainer, algorithm: Algorithm) -> Pacer:
        counters = algorithm.counters
        more: dict[str, Any] = {}
        if self._num_episodes:
            benchmark = trainer.datamodule.session.benchmark  # type: ignore[attr-defined]
            examiner = Examiner(benchmark, self._num_episodes)
            more["examine"] = lambda: examiner.examine(
                algorithm, counters.env_steps, counters.updates
            )
        about = {"environments": counters.env_steps / max(1, counters.vector_steps)}
        return Pacer(self._steps, self._settle, algorithm.stopwatch.drain, about, **more)


def paced_arguments(
    configs: Sequence[str | Path],
    options: Mapping[str, Any],
    steps: int,
    settle: int,
    num_episodes: int = 0,
) -> list[str]:
    """Return the words of a user's command line whose updates are made in windows.

    Args:
        configs: YAML files.
        options: of the command line, without the dashes; besides them there is no progress bar and
            no end.
        steps: updates of a window.
        settle: updates before the first window.
        num_episodes: test episodes per task after each window; 0 for none.
    """
    pace = {"steps": steps, "settle": settle, "num_episodes": num_episodes}
    callback = {"class_path": "benchmarks.whole_runs.PaceCallback", "init_args": pace}
    shared = {"trainer.enable_progress_bar": "false", "rollout.total_steps": NEVER}
    arguments = ["fit"]
    for config in configs:
        arguments += ["-c", str(config)]
    arguments += [f"--{name}={value}" for name, value in {**shared, **options}.items()]
    return [*arguments, f"--trainer.callbacks+={json.dumps(callback)}"]


def without_intervals() -> dict[str, Any]:
    """Return options of a run that never evaluates, logs or saves."""
    return {f"{section}.every": NEVER for section in ("evaluation", "metrics", "checkpoint")}


# ---- options ----


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("whole_runs", __doc__, device=True, precisions=True, threads=True)
    add = parser.add_argument
    add("--algorithm", choices=list(JOBS), default="sac", help="(default %(default)s)")
    add("--variants", nargs="+", choices=["ours", "sb3", "plain"], help="(default all)")
    text = "MT10, MT25, MT50, or names (default %(default)s)"
    add("--tasks", nargs="+", default=["MT10"], help=text)
    add(
        "--also",
        nargs="+",
        action="append",
        default=[],
        type=option_and_value,
        metavar="OPTION=VALUE",
        help="options of the command line with which ours is measured once more, such as"
        " rollout.num_workers=0; give several",
    )
    vectors = ["sync", "async"]
    text = "of the baselines' environments, each a variant (default both)"
    add("--vectors", nargs="+", choices=vectors, default=vectors, help=text)
    text = "that the baselines step, MetaWorld's or our faster ones, each a variant"
    choices = ["metaworld", "ours"]
    add(
        "--baseline_environments",
        nargs="+",
        choices=choices,
        default=["metaworld"],
        help=f"{text} (default %(default)s)",
    )
    text = "other sizes of the work, fields of baselines.SACJob and PPOJob, such as width=32"
    add("--sizes", nargs="+", default=[], type=option_and_value, metavar="NAME=VALUE", help=text)
    return parse(parser, args, _check)


def _check(options: argparse.Namespace) -> None:
    """Set what depends on the algorithm, and check it."""
    sizes = {one.name for one in fields(JOBS[options.algorithm]) if one.type == "int"} - NOT_SIZES
    chosen = dict(pair.split("=", 1) for pair in options.sizes)
    for name, value in chosen.items():
        if name not in sizes or not value.isdecimal():
            raise ConfigurationError(
                f"--sizes {name}={value}: give one of {', '.join(sorted(sizes))}, and a number"
            )
    theirs = [name.split()[0] for name in baselines.TRAINERS if options.algorithm in name]
    known = ["ours", *theirs]
    options.variants = options.variants or known
    for name in options.variants:
        if name not in known:
            raise ConfigurationError(f"--variants {name}: give {', '.join(known)}")
    if "sb3" in options.variants:
        import_optional(*SB3, "leave it out with --variants ours")
    names_of(options.tasks)


def job_of(options: argparse.Namespace) -> Job:
    """Return the work that all variants do."""
    sizes = dict(pair.split("=", 1) for pair in options.sizes)
    given: dict[str, Any] = {name: int(value) for name, value in sizes.items()}
    for name in ("tasks", "device", "threads"):
        given[name] = getattr(options, name)
    return JOBS[options.algorithm](**given)


# ---- variants ----


def differences_of_ours(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the command line's options in which the variants of ours differ, by their names."""
    plain = [{"trainer.precision": precision} for precision in options.precisions]
    more = [dict(pair.split("=", 1) for pair in also) for also in options.also]
    chosen = [*plain, *(one | extra for extra in more for one in plain)]
    variants = {}
    for one in chosen:
        words = [f"{name.rsplit('.', 1)[-1]} {value}" for name, value in one.items()]
        variants[f"ours {', '.join(words).removeprefix('precision ')}"] = one
    return variants


def command_of_ours(job: Job, config: str, chosen: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a user's command line with the sizes of the work."""
    options: dict[str, Any] = {
        "root": folder,
        "trainer.accelerator": "gpu" if job.device == "cuda" else "cpu",
        "data.benchmark.init_args.tasks": tasks_option(job.tasks),
        "data.benchmark.init_args.horizon": job.horizon,
        "rollout.envs_per_task": job.envs_per_task,
        **without_intervals(),
    }
    for network in ("actor", "critic"):
        for name in ("width", "depth"):
            options[f"model.init_args.{network}.init_args.{name}"] = getattr(job, name)
    if isinstance(job, SACJob):
        options["data.batch_size"] = job.batch_size
        options["data.capacity"] = job.capacity
        options["rollout.warmup_steps"] = job.warmup * job.num_tasks
        steps, settle = job.steps, job.settle
    else:
        assert isinstance(job, PPOJob)
        options["model.init_args.max_kl"] = "null"
        for name in ("num_steps", "num_epochs", "num_minibatches"):
            options[f"model.init_args.{name}"] = getattr(job, name)
        steps, settle = job.updates, job.settle * job.updates
    arguments = paced_arguments([config], options | dict(chosen), steps, settle)
    return [sys.executable, *COMMAND, *arguments]


def variants_of(options: argparse.Namespace, folder: Path) -> list[Variant]:
    """Return the variants, not started yet."""
    job = job_of(options)
    variants = []
    if "ours" in options.variants:
        for name, chosen in differences_of_ours(options).items():
            command = command_of_ours(job, CONFIGS[options.algorithm], chosen, folder)
            variants.append(Variant(name, command, folder))
    for kind in (name for name in options.variants if name != "ours"):
        for environments in options.baseline_environments:
            suffix = ", our environments" if environments == "ours" else ""
            for vector in options.vectors:
                given = asdict(job) | {"vector": vector, "environments": environments}
                trainer = f"{kind} {options.algorithm}"
                command = call_of(baselines.train, {"kind": trainer, "job": given})
                variants.append(Variant(f"{kind} {vector}{suffix}", command, folder))
    return variants


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start all, let them take turns, and return the table."""
    job = job_of(options)
    with tempfile.TemporaryDirectory(prefix="whole_runs-") as folder:
        variants = variants_of(options, Path(folder))
        unit, steps = ("ms", job.steps) if isinstance(job, SACJob) else ("s", 1)
        seconds = take_turns(variants, options.rounds, steps)
    references = [name for name in seconds if not name.startswith("ours")]
    rows = rows_of(seconds, references, unit)
    for row, one in zip(rows, variants, strict=True):
        # ours may step more environments, by --also
        env_steps = job.env_steps * one.about.get("environments", job.num_envs) / job.num_envs
        row["env steps/s"] = spread([env_steps / value for value in seconds[one.name]])
        row["MiB"] = one.memory_mib
        row["s until ready"] = one.ready_seconds
        row["shares of the time"] = one.shares()
        row["command"] = one.command
    if isinstance(job, SACJob):
        window = f"ms per vector step with one update, windows of {job.steps}"
    else:
        assert isinstance(job, PPOJob)
        window = f"s per iteration of {job.env_steps:,} env steps and {job.updates} updates"
    title = f"{options.algorithm}, {' '.join(options.tasks)}, {job.depth} x {job.width}"
    title = f"{title}, on {options.device}; {window}"
    return {"tables": [{"title": title, "rows": rows}]}


main = program("whole_runs", options_of, measure)

if __name__ == "__main__":
    sys.exit(main())
