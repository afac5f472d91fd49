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

  --memory_of fit -c FILE ...   measures instead the peak of a run's memory, of all its processes:
                    the proportional set size (pages that processes share are counted once), every
                    half second until the run ends
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import baselines
from benchmarks.baselines import Job, PPOJob, SACJob
from benchmarks.environments import names_of, tasks_option
from benchmarks.measuring import (
    NEVER,
    SB3,
    Pacer,
    Program,
    Table,
    Variant,
    proportional_set_size,
    rows_of,
    spread,
    take_turns,
)
from mtrl_lightning.__main__ import main as command_line
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import ConfigurationError, import_optional

CONFIGS = {"sac": "experiment/mtmhsac", "ppo": "experiment/mt10_cpu"}
JOBS: dict[str, type[Job]] = {"sac": SACJob, "ppo": PPOJob}
NO_INTERVALS = dict.fromkeys(
    ("evaluation.every", "metrics.every", "checkpoint.every_n_env_steps"), NEVER
)
"""Options of a run that never evaluates, logs or saves."""
INTERVAL = 0.5
"""Seconds between two measurements of a run's memory."""


class PaceCallback(Callback):
    """Let a training run make its updates in windows; one update is one step.

    Of several processes only the first waits; the others wait for it to exchange.

    Args:
        steps: updates of a window.
        settle: updates before the first window.
    """

    def __init__(self, steps: int, settle: int) -> None:
        self._steps = steps
        self._settle = settle
        self._pacer: Pacer | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Wait where a window is over."""
        assert isinstance(pl_module, Algorithm)
        if not trainer.is_global_zero:
            return
        if self._pacer is None:
            counters = pl_module.counters
            about = {"environments": counters.env_steps / max(1, counters.vector_steps)}
            self._pacer = Pacer(self._steps, self._settle, pl_module.stopwatch.drain, about)
        if not self._pacer.tick():
            sys.exit(0)


def train_ours(config: str, options: Mapping[str, Any], steps: int, settle: int) -> None:
    """Train through the command line; the function of a variant's process."""
    command_line(paced_arguments(config, options, steps, settle))


def paced_arguments(config: str, options: Mapping[str, Any], steps: int, settle: int) -> list[str]:
    """Return the words of a user's command line whose updates are made in windows.

    Args:
        config: its name.
        options: of the command line, without the dashes; besides them there is no progress bar and
            no end.
        steps: updates of a window.
        settle: updates before the first window.
    """
    pace = {"steps": steps, "settle": settle}
    callback = {"class_path": "benchmarks.whole_runs.PaceCallback", "init_args": pace}
    shared = {"trainer.enable_progress_bar": "false", "data.total_steps": NEVER}
    words = [f"--{name}={value}" for name, value in {**shared, **options}.items()]
    return ["fit", "-c", config, *words, f"--trainer.callbacks+={json.dumps(callback)}"]


# ---- options ----


def size(text: str) -> tuple[str, int]:
    """Return the name and the value of a size."""
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: takes NAME=NUMBER, as width=32")
    return name, int(value)


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    both = ["sync", "async"]
    add("--algorithm", choices=list(JOBS), default="sac", help="of all variants")
    add("--variants", nargs="+", choices=["ours", "sb3", "plain"], help="None: all")
    add("--tasks", nargs="+", default=["MT10"], help="MT10, MT25, MT50, or names")
    text = "of the baselines' environments, each a variant"
    add("--vectors", nargs="+", choices=both, default=both, help=text)
    text = "that the baselines step, MetaWorld's or our faster ones, each a variant"
    choices = ["metaworld", "ours"]
    add("--baseline_environments", nargs="+", choices=choices, default=choices[:1], help=text)
    text = "other sizes of the work, fields of baselines.SACJob and PPOJob, such as width=32"
    add("--sizes", nargs="+", type=size, default=[], metavar="NAME=NUMBER", help=text)
    text = "arguments of mtrl-lightning, whose peak of memory is measured; the last option"
    add("--memory_of", nargs=argparse.REMAINDER, metavar="ARGUMENT", help=text)


def _check(options: argparse.Namespace) -> None:
    """Set what depends on the algorithm, and check it."""
    if options.memory_of is not None:
        options.precisions = []  # those of the run
        return
    known = {one.name for one in fields(JOBS[options.algorithm]) if one.type == "int"} - {"seed"}
    for name, _ in options.sizes:
        if name not in known:
            raise ConfigurationError(f"--sizes {name}: give one of {', '.join(sorted(known))}")
    theirs = [name.split()[0] for name in baselines.TRAINERS if options.algorithm in name]
    options.variants = options.variants or ["ours", *theirs]
    for name in options.variants:
        if name not in ("ours", *theirs):
            raise ConfigurationError(f"--variants {name}: give {', '.join(['ours', *theirs])}")
    if "sb3" in options.variants:
        import_optional(*SB3, "leave it out with --variants ours")
    names_of(options.tasks)


def job_of(options: argparse.Namespace) -> Job:
    """Return the work that all variants do."""
    return JOBS[options.algorithm](
        tasks=options.tasks, device=options.device, threads=options.threads, **dict(options.sizes)
    )


# ---- variants ----


def ours(job: Job, algorithm: str, precision: str, folder: Path) -> Variant:
    """Return the variant of a user's command line with the sizes of the work."""
    options: dict[str, Any] = {
        "root": str(folder),
        "trainer.accelerator": "gpu" if job.device == "cuda" else "cpu",
        "data.benchmark.init_args.tasks": tasks_option(job.tasks),
        "data.benchmark.init_args.horizon": job.horizon,
        "data.envs_per_task": job.envs_per_task,
        "trainer.precision": precision,
        **NO_INTERVALS,
    }
    for network in ("actor", "critic"):
        for name in ("width", "depth"):
            options[f"model.init_args.{network}.init_args.{name}"] = getattr(job, name)
    if isinstance(job, SACJob):
        options["data.batch_size"] = job.batch_size
        options["data.capacity"] = job.capacity
        options["data.warmup_steps"] = job.warmup * job.num_tasks
        steps, settle = job.steps, job.settle
    else:
        assert isinstance(job, PPOJob)
        options["model.init_args.max_kl"] = "null"
        for name in ("num_steps", "num_epochs", "num_minibatches"):
            options[f"model.init_args.{name}"] = getattr(job, name)
        steps, settle = job.updates, job.settle * job.updates
    return Variant(
        f"ours {precision}",
        train_ours,
        config=CONFIGS[algorithm],
        options=options,
        steps=steps,
        settle=settle,
    )


def variants_of(options: argparse.Namespace, folder: Path) -> list[Variant]:
    """Return the variants, not started yet; ``folder`` is that of our runs."""
    job = job_of(options)
    variants = []
    if "ours" in options.variants:
        variants += [ours(job, options.algorithm, one, folder) for one in options.precisions]
    kinds = [name for name in options.variants if name != "ours"]
    for kind, environments, vector in product(
        kinds, options.baseline_environments, options.vectors
    ):
        suffix = ", our environments" if environments == "ours" else ""
        variants.append(
            Variant(
                f"{kind} {vector}{suffix}",
                baselines.train,
                kind=f"{kind} {options.algorithm}",
                job=replace(job, vector=vector, environments=environments),
            )
        )
    return variants


def speed_table(options: argparse.Namespace) -> Table:
    """Start all, let them take turns, and return the table."""
    job = job_of(options)
    with tempfile.TemporaryDirectory(prefix="whole_runs-") as folder:
        variants = variants_of(options, Path(folder))
        unit, steps = ("ms", job.steps) if isinstance(job, SACJob) else ("s", 1)
        seconds = take_turns(variants, options.rounds, steps)
    references = [name for name in seconds if not name.startswith("ours")]
    rows = rows_of(seconds, references, unit)
    for row, one in zip(rows, variants, strict=True):
        row["env steps/s"] = spread([job.env_steps / value for value in seconds[one.name]])
        row["MiB"] = one.memory_mib
        row["shares of the time"] = one.shares()
    if isinstance(job, SACJob):
        window = f"ms per vector step with one update, windows of {job.steps}"
    else:
        assert isinstance(job, PPOJob)
        window = f"s per iteration of {job.env_steps:,} env steps and {job.updates} updates"
    title = f"{options.algorithm}, {' '.join(options.tasks)}, {job.depth} x {job.width}"
    return Table(f"{title}, on {options.device}; {window}", rows)


def memory_table(arguments: Sequence[str]) -> Table:
    """Return the table with the largest memory of all processes of a run together.

    Raises:
        subprocess.CalledProcessError: if the run fails.
    """
    command = [sys.executable, "-m", "mtrl_lightning", *arguments]
    peak = 0.0
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        while process.poll() is None:
            peak = max(peak, proportional_set_size(process.pid))
            # more often at the start: a short run would have ended before its second look
            time.sleep(min(INTERVAL, 0.1 * (time.perf_counter() - start)))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    seconds = time.perf_counter() - start
    row = {"run": " ".join(arguments), "peak MiB": peak, "s": seconds}
    return Table("memory of a run", [row])


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the table."""
    is_memory = options.memory_of is not None
    return [memory_table(options.memory_of) if is_memory else speed_table(options)]


program = Program(
    "whole_runs", __doc__, add_options, measure, _check, device=True, precisions=True, threads=True
)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    main()
