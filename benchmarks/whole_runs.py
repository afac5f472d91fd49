"""How fast whole training runs are, compared with Stable-Baselines3 and a plain PyTorch loop.

Ours trains through the command line, as users do. Start-up, warm-up, evaluation, checkpoints and
logging are not in the windows.

  --algorithm sac   configs/experiment/mtmhsac.yaml, Stable-Baselines3's SAC and a plain
                    loop of our algorithm (CleanRL's way), with the same sizes; a window is some
                    vector steps, each one step of every environment and one update
  --algorithm ppo   configs/experiment/mt10_cpu.yaml and Stable-Baselines3's PPO with the same
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
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import baselines
from benchmarks.baselines import Job, PPOJob, SACJob
from benchmarks.environments import tasks_option
from benchmarks.measuring import (
    NEVER,
    Pacer,
    Table,
    Variant,
    parser_of,
    rows_of,
    run,
    spread,
    take_turns,
)
from mtrl_lightning.__main__ import main as command_line
from mtrl_lightning.algorithms import Algorithm

CONFIGS = {"sac": "experiment/mtmhsac", "ppo": "experiment/mt10_cpu"}
JOBS: dict[str, type[Job]] = {"sac": SACJob, "ppo": PPOJob}
NO_INTERVALS = dict.fromkeys(
    ("evaluation.every", "metrics.every", "checkpoint.every_n_env_steps"), NEVER
)
"""Options of a run that never evaluates, logs or saves."""


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
    """Train through the command line, without an end; the function of a variant's process.

    Args:
        config: its name.
        options: of the command line, without the dashes.
        steps: updates of a window.
        settle: updates before the first window.
    """
    pace = {"steps": steps, "settle": settle}
    callback = {"class_path": "benchmarks.whole_runs.PaceCallback", "init_args": pace}
    shared = {"trainer.enable_progress_bar": "false", "data.total_steps": NEVER}
    words = [f"--{name}={value}" for name, value in {**shared, **options}.items()]
    command_line(["fit", "-c", config, *words, f"--trainer.callbacks+={json.dumps(callback)}"])


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


def speed_table(options: argparse.Namespace) -> Table:
    """Start all variants, let them take turns, and return the table."""
    job = JOBS[options.algorithm](
        tasks=options.tasks, device=options.device, threads=options.threads, **dict(options.sizes)
    )
    kinds = [kind for kind in baselines.TRAINERS if kind.endswith(options.algorithm)]
    if options.variants:
        kinds = [kind for kind in kinds if kind.split()[0] in options.variants]
    with tempfile.TemporaryDirectory(prefix="whole_runs-") as folder:
        variants = [
            ours(job, options.algorithm, precision, Path(folder))
            for precision in options.precisions
            if not options.variants or "ours" in options.variants
        ]
        for kind, environments, vector in product(
            kinds, options.baseline_environments, options.vectors
        ):
            suffix = ", our environments" if environments == "ours" else ""
            name = f"{kind.split()[0]} {vector}{suffix}"
            own = replace(job, vector=vector, environments=environments)
            variants.append(Variant(name, baselines.train, kind=kind, job=own))
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


def size(text: str) -> tuple[str, int]:
    """Return the name and the value of a size."""
    name, _, value = text.partition("=")
    return name, int(value)


def main(args: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = parser_of("whole_runs", __doc__, device=True, precisions=True)
    add = parser.add_argument
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
    run(parser, args, lambda options: [speed_table(options)])


if __name__ == "__main__":
    main()
