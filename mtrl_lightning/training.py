"""Train and evaluate from Python in one call, like the command line."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import algorithms
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.starting import NewTasks, start_from
from mtrl_lightning.callbacks import (
    BestCheckpoint,
    EnvStepCheckpoint,
    EnvStepProgressBar,
    EvaluationCallback,
    MetricsCallback,
    MetricsFile,
    ResetCallback,
)
from mtrl_lightning.checkpoints import load_checkpoint, restoring
from mtrl_lightning.data import DATA, TaskData
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, OnlyTasks, only_split
from mtrl_lightning.envs.benchmarks.gymnasium_tasks import GymnasiumTasks
from mtrl_lightning.errors import ConfigurationError, name_hint
from mtrl_lightning.policy import LoadedPolicy, load_policy
from mtrl_lightning.rollout import ActionTransform, Evaluator
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.runs import (
    best_checkpoint,
    checkpoint_at,
    find_run,
    newest_checkpoint,
    open_run,
)
from mtrl_lightning.transitions import Policy
from mtrl_lightning.utils.quiet import quiet
from mtrl_lightning.utils.requeue import slurm_job

CALLBACKS: dict[str, type[Callback]] = {
    "resets": ResetCallback,
    "evaluation": EvaluationCallback,
    "metrics": MetricsCallback,
    "checkpoint": EnvStepCheckpoint,
    "best": BestCheckpoint,
}
"""The configurable callbacks of every run, by section."""
TRAINER: dict[str, Any] = {
    "max_epochs": -1,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "devices": 1,
    "enable_model_summary": False,
}
"""Defaults of the trainer that differ from Lightning's."""


class Run(NamedTuple):
    """A finished run."""

    folder: Path
    """Folder of its metrics, checkpoints and curves."""
    evaluation: dict[str, float]
    """Metrics of its last evaluation, such as ``eval/success``."""
    policy: LoadedPolicy
    """The trained policy with its final weights, like the result of ``load_policy``."""
    benchmark: Benchmark
    """The tasks, with the wrappers of ``data``."""
    action_transforms: Sequence[ActionTransform] = ()
    """Transforms of the policy's actions before they are sent to environments."""

    @property
    def algorithm(self) -> Algorithm:
        """The trained algorithm, with its networks and counters."""
        return self.policy.algorithm

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.folder / "checkpoints" / "last.ckpt"

    def evaluate(self, num_episodes: int = 10, **options: Any) -> dict[str, float]:
        """Run test episodes of every task; see ``evaluate``."""
        return evaluate(self, self.benchmark, num_episodes, **options)


def evaluate(
    policy: Policy | Run | str | Path,
    benchmark: Benchmark | str,
    num_episodes: int = 10,
    split: str | None = None,
    tasks: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Run test episodes of every task in all evaluated splits, with the deterministic policy.

    Args:
        policy: a policy, such as ``run.policy`` or the result of ``load_policy``; a run; or a
            checkpoint or run folder, loaded with ``load_policy``.
        benchmark: the tasks, or the ID of a Gymnasium environment as the only task. If the policy
            has task names, as all of the above do, tasks are matched by name: the benchmark may
            contain any of them, in any order.
        num_episodes: test episodes per task.
        split: split to evaluate; None for all except the first, which is used for training.
        tasks: names of the tasks to evaluate; None for all tasks of the benchmark.
        options: further arguments of ``Evaluator``, such as ``num_workers``.

    Returns:
        ``eval/success``, ``eval/success_last``, ``eval/return`` and ``eval/score``, if the
        benchmark has them, per task and averaged; ``eval_base/return`` and so on for other splits
        than ``eval``.
    """
    if isinstance(benchmark, str):
        benchmark = GymnasiumTasks(benchmark)
    if isinstance(policy, Run):
        policy = with_action_transforms(policy.policy, policy.action_transforms)
    elif isinstance(policy, (str, Path)):
        policy = load_policy(policy)
    if split is not None:
        benchmark = only_split(benchmark, split)
    if tasks is not None:
        benchmark = OnlyTasks(benchmark, tasks)
    metrics: dict[str, float] = {}
    for split in benchmark.splits[1:]:
        evaluator = Evaluator(benchmark, num_episodes=num_episodes, split=split, **options)
        try:
            metrics |= evaluator.evaluate(policy).metrics()
        finally:
            evaluator.close()
    return metrics


def train(
    benchmark: Benchmark | str,
    algorithm: Callable[..., Algorithm] | str,
    *,
    total_steps: float,
    seed: int = 1,
    name: str = "run",
    root: str = "runs",
    ckpt_path: str | Path | None = None,
    init_from: str | Path | None = None,
    init_new_tasks: NewTasks = "fresh",
    num_workers: int | None = None,
    callbacks: Sequence[Callback] | Callback = (),
    loggers: Sequence[Logger] | Logger = (),
    data: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    best: Mapping[str, Any] | None = None,
    resets: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> Run:
    """Train an algorithm on a benchmark, in a new run folder: ``Trainer(...).fit(...)``.

    Args:
        benchmark: the tasks; or the ID of a Gymnasium environment, such as ``"Pendulum-v1"``, as
            the only task.
        algorithm: a class such as ``SAC`` or ``PPO``, its name, or ``partial(SAC, actor=...)``.
        total_steps: environment steps after which training ends; updates for offline algorithms.
        seed: seed of weights, environments and all random numbers, including this process's global
            generators.
        name: name of the run; its folder is ``ROOT/NAME/version_N``.
        root: folder of all runs.
        ckpt_path: checkpoint to resume from; a run, as for ``find_run``, to resume from its newest
            checkpoint; or ``last`` or ``best`` for those of the run called ``name``.
        init_from: a trained policy, as for ``load_policy``, whose weights initialize the new run.
            Weights of single tasks are copied for tasks with the same name. See
            ``algorithms.starting.start_from``.
        init_new_tasks: initial weights of all other tasks: ``fresh``, or the ``mean`` of the
            policy's tasks.
        num_workers: worker processes that step environments, also in evaluations; None for one per
            core.
        callbacks: further Lightning callbacks. A progress bar, such as ``RichProgressBar``,
            replaces this package's.
        loggers: loggers in addition to ``metrics.jsonl``.
        data: options of the algorithm's data module, such as ``ReplayData``.
        evaluation: options of ``EvaluationCallback``.
        metrics: options of ``MetricsCallback``.
        checkpoint: options of ``EnvStepCheckpoint``.
        best: options of ``BestCheckpoint``.
        resets: options of ``ResetCallback``.
        trainer: options of Lightning's ``Trainer``; ``devices`` defaults to 1, and
            ``default_root_dir`` is the same as ``root``.

    Returns:
        The run, with its folder, its last evaluation and its policy.

    Raises:
        EnvironmentFaultError: if environments failed more often than they may be rebuilt.
    """
    seed_everything(seed, verbose=False)
    if isinstance(benchmark, str):
        benchmark = GymnasiumTasks(benchmark)
    data, evaluation = dict(data or {}), dict(evaluation or {})
    of_any_kind = inspect.signature(TaskData).parameters.keys() & data.keys()
    spec = TaskData(benchmark, **{name: data[name] for name in of_any_kind}).spec
    model = _algorithm_of(algorithm)(spec, seed=seed)
    if num_workers is not None:
        evaluation.setdefault("num_workers", num_workers)
        if model.kind != "offline":
            data.setdefault("num_workers", num_workers)
    steps = int(total_steps)
    datamodule = DATA[model.kind](benchmark, total_steps=steps, seed=seed, **data)
    given = (resets, evaluation, metrics, checkpoint, best)
    kinds = zip(CALLBACKS.values(), given, strict=True)
    sections = [callback(**(options or {})) for callback, options in kinds]
    options = dict(trainer or {})
    root = str(options.pop("default_root_dir", root))
    version = restart_version([*sys.argv, name, str(seed)])
    start = checkpoint_to_continue(root, name, version, ckpt_path)
    with quiet(), open_run(root, name, version, start) as folder:
        given_loggers = (*listed(loggers), *listed(options.pop("logger", None)))
        given_callbacks = (*listed(callbacks), *listed(options.pop("callbacks", None)))
        own = {
            "default_root_dir": folder,
            "logger": [MetricsFile(folder), *given_loggers],
            "callbacks": with_progress_bar(
                [*sections, *given_callbacks], options.get("enable_progress_bar")
            ),
        }
        if start is None and init_from is not None:
            copy_policy(model, init_from, init_new_tasks)
        made = Trainer(**{**TRAINER, **options, **own})
        made.fit(model, datamodule=datamodule, ckpt_path=start, weights_only=True)
    return Run(
        folder,
        dict(sections[1].results),  # type: ignore[attr-defined]
        LoadedPolicy(model.cpu()),
        datamodule.benchmark,
        datamodule.action_transforms,
    )


def restart_version(command: Sequence[str]) -> str | None:
    """Return a run folder name that stays the same when a scheduler restarts the run.

    Args:
        command: the command line, which distinguishes the runs of one job.

    Returns:
        The name, derived from the W&B sweep run, the SLURM or ``torchrun`` job, or the Ray Train
        experiment; None without a scheduler.
    """
    if "WANDB_SWEEP_ID" in os.environ and "WANDB_RUN_ID" in os.environ:
        return f"version_wandb-{os.environ['WANDB_RUN_ID']}"
    job = slurm_job()
    if job is None and "TORCHELASTIC_RUN_ID" in os.environ:
        job = os.environ["TORCHELASTIC_RUN_ID"]
        if job == "none":  # torchrun's value without --rdzv-id
            if os.environ["GROUP_WORLD_SIZE"] != "1":
                raise ConfigurationError("pass the same --rdzv-id to torchrun on all machines")
            job = str(os.getppid())
    ray_train = sys.modules.get("ray.train")
    if job is None and ray_train is not None:
        # RuntimeError outside of its workers; DeprecationWarning in Ray Tune
        with contextlib.suppress(RuntimeError, DeprecationWarning):
            job = ray_train.get_context().get_experiment_name()
            # the worker's own arguments differ between restarts
            command = [word for word in command if word not in sys.argv]
    if job is None:
        return None
    return f"version_job-{job}-{hashlib.sha256(repr(command).encode()).hexdigest()[:6]}"


def checkpoint_to_continue(
    root: str, name: str, version: str | None, ckpt_path: str | Path | None
) -> Path | None:
    """Return the checkpoint from which a run resumes; None for a new run.

    Args:
        root: folder of all runs.
        name: name of the run.
        version: name of its folder if started by a scheduler; see ``restart_version``.
        ckpt_path: as for ``train``.
    """
    if version is not None and any(Path(root, name, version, "checkpoints").glob("*.ckpt")):
        path = newest_checkpoint(Path(root, name, version))
        rank_zero_info(f"The run was started before and resumes from {path}")
        return path
    if ckpt_path is None:
        return None
    if str(ckpt_path) in ("last", "best"):
        folder = find_run(Path(root, name))
        return newest_checkpoint(folder) if ckpt_path == "last" else best_checkpoint(folder)
    return checkpoint_at(ckpt_path)


def copy_policy(algorithm: Algorithm, policy: str | Path, new_tasks: NewTasks) -> None:
    """Initialize the algorithm with the weights of a trained policy; see ``start_from``."""
    path = best_checkpoint(policy)
    with restoring(path):
        table = start_from(algorithm, load_checkpoint(path), new_tasks)
    rank_zero_info(f"The run starts from {path}\n{table}")


def _algorithm_of(algorithm: Callable[..., Algorithm] | str) -> Callable[..., Algorithm]:
    """Return the algorithm's factory."""
    if callable(algorithm) and not isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        name = type(algorithm).__name__
        raise ConfigurationError(
            f"the algorithm is an instance of {name}: pass the class, or partial(SAC,"
            " discount=0.97) to set options"
        )
    known = {
        name: kind
        for name, kind in vars(algorithms).items()
        if inspect.isclass(kind) and issubclass(kind, Algorithm) and kind is not Algorithm
    }
    if algorithm not in known:
        hint = name_hint(algorithm, known)
        raise ConfigurationError(f"unknown algorithm {algorithm!r}: {hint}")
    return known[algorithm]


def with_progress_bar(callbacks: list[Callback], is_enabled: bool | None) -> list[Callback]:
    """Return the callbacks, with a progress bar over environment steps if they have none."""
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    return callbacks if has_bar or is_enabled is False else [*callbacks, EnvStepProgressBar()]


def listed(given: Any) -> list[Any]:
    """Return callbacks or loggers as a list; a single one or none is accepted, too."""
    if given is None or isinstance(given, bool):
        return []
    return list(given) if isinstance(given, Sequence) else [given]
