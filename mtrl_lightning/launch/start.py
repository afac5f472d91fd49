"""Start a run, for the command line and for ``train``, and report its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar, Timer
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.starting import NewTasks, start_from
from mtrl_lightning.callbacks import (
    CurvesCallback,
    EnvStepProgressBar,
    EnvStepWandbLogger,
    ImagesCallback,
    InterruptionCallback,
    MetricsCSV,
    OptionsCallback,
    RolloutCallback,
)
from mtrl_lightning.callbacks.rollout import check_envs_per_task
from mtrl_lightning.callbacks.signals import requeue
from mtrl_lightning.callbacks.trainer_options import check_trainer, check_trainer_options
from mtrl_lightning.checkpoints import load_checkpoint, restoring
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError, Interrupted, RankLostError
from mtrl_lightning.launch.folder import RunLocation, locate_run
from mtrl_lightning.launch.quiet import quiet
from mtrl_lightning.launch.sections import LEARNING_OPTIONS
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.strategy import Processes, processes_for
from mtrl_lightning.run.data import MultiTaskData

FIXED_TRAINER_OPTIONS: dict[str, Any] = {
    "max_epochs": -1,
    "max_steps": -1,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}
"""Options of Lightning's trainer for a run that its own loop ends."""


@dataclass(frozen=True)
class RunStart:
    """A run whose folder is found, and whose parts are built next; see ``prepare``.

    ``train`` and the command line differ in how the parts are named and built, and go the same way:
    ``prepare``; within ``hold``, the parts, ``make_trainer`` and ``fit``.
    """

    location: RunLocation
    """Its folder, and the checkpoint that it continues from."""
    processes: Processes
    """How many there are, and the trainer's strategy."""
    is_fitting: bool
    """Whether it trains."""
    restart_id: dict[str, str] | None
    """Identifies its checkpoints if a scheduler restarts it."""
    init_from: str | Path | None
    """The policy with whose weights a new run starts."""
    init_new_tasks: NewTasks
    """Initial weights of tasks that the policy was not trained on."""

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes from training in the folder, and find the policy to start from.

        Raises:
            ConfigurationError: if another process trains in it, it cannot be written, rows of
                ``metrics.csv`` would be lost, or there is no such policy.
        """
        with self.location.hold():
            self.location.set_policy(self.init_from)
            yield

    def make_trainer(
        self,
        options: Mapping[str, Any],
        callbacks_before: Sequence[Callback],
        described: Mapping[str, Any],
        callbacks_after: Sequence[Callback] = (),
    ) -> Trainer:
        """Return Lightning's trainer with what every run has.

        It has ``metrics.csv``, and the callbacks without a section of options. A progress bar among
        the given callbacks replaces ours.

        Args:
            options: of the trainer; its callbacks are given by the other arguments.
            callbacks_before: callbacks before those of every run, the sections' among them.
            described: all options of the run, as ``config.yaml`` holds them.
            callbacks_after: callbacks after those of every run.

        Raises:
            ConfigurationError: if an option cannot work.
        """
        folder = str(self.location.folder)
        loggers: Any = False
        callbacks = [*callbacks_before]
        if self.is_fitting:
            loggers = [MetricsCSV(folder), *as_list(options["logger"])]
            callbacks += [CurvesCallback(), InterruptionCallback(self.restart_id)]
            callbacks += [OptionsCallback(described, LEARNING_OPTIONS), ImagesCallback()]
        given = (*callbacks_before, *callbacks_after)
        has_own_bar = any(isinstance(callback, ProgressBar) for callback in given)
        if options["enable_progress_bar"] is not False and not has_own_bar:
            callbacks.append(EnvStepProgressBar())
        own: dict[str, Any] = {
            **FIXED_TRAINER_OPTIONS,
            "default_root_dir": folder,
            "logger": loggers,
            "callbacks": [*callbacks, *callbacks_after],
            "strategy": options["strategy"] or "auto",
        }
        if self.processes.number > 1:
            own["strategy"] = self.processes.strategy
        trainer = Trainer(**{**options, **own})
        check_trainer(trainer)
        return trainer

    def fit(self, trainer: Trainer, algorithm: Algorithm, data: MultiTaskData) -> None:
        """Check the checkpoint to continue, or start from the policy, and train.

        Raises:
            ConfigurationError: if checkpoint or policy do not fit the run.
            Interrupted: if a signal ended the run, which is saved by then.
        """
        self.location.check(algorithm.spec, must_match=True)
        policy = self.location.policy
        if policy is not None:
            with restoring(policy):
                table = start_from(algorithm, load_checkpoint(policy), self.init_new_tasks)
            rank_zero_info(f"The run starts from {policy}\n{table}")
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        rollout = next(one for one in callbacks if isinstance(one, RolloutCallback))
        if rollout.learner_threads is not None:
            torch.set_num_threads(rollout.learner_threads)
        rank_zero_info(f"The run's folder is {trainer.default_root_dir}")
        checkpoint = self.location.checkpoint
        with quiet(), restoring(checkpoint, lambda: rollout.is_restoring):
            try:
                trainer.fit(
                    algorithm,
                    datamodule=data,
                    ckpt_path=None if checkpoint is None else str(checkpoint),
                    weights_only=True,  # nothing in the checkpoint is executed
                )
            except Interrupted as interrupted:
                for logger in trainer.loggers if trainer.is_global_zero else ():
                    if isinstance(logger, EnvStepWandbLogger):
                        interrupted.code = logger.end_interrupted(interrupted.code)
                requeue(trainer, interrupted)
                # a launcher may end the others as soon as one has ended
                with contextlib.suppress(RankLostError), distributed.extended_timeout():
                    distributed.total(0)
                raise
        session = rollout.session
        counted_steps = session.loop.counted_steps
        unit = session.algorithm.step_unit
        rank_zero_info(_end_message(trainer, counted_steps, rollout.total_steps, unit))


def prepare(
    options: Mapping[str, Mapping[str, Any]],
    *,
    root: str,
    name: str,
    ckpt_path: str | None,
    init_from: str | Path | None,
    init_new_tasks: NewTasks,
    restart_id: dict[str, str] | None,
    overwrite_metrics: bool,
    is_fitting: bool = True,
) -> RunStart:
    """Check the options that concern all processes of a run, connect them, and find its folder.

    Args:
        options: all options of the run by section.
        root: folder of all runs.
        name: name of the run.
        ckpt_path: the checkpoint or run to continue, as ``locate_run`` takes it.
        init_from: a trained policy to start from, as ``best_checkpoint`` takes it.
        init_new_tasks: initial weights of tasks that the policy was not trained on.
        restart_id: identifies the checkpoints of a run that a scheduler restarts.
        overwrite_metrics: whether later rows of ``metrics.csv`` may be deleted.
        is_fitting: whether it trains.

    Raises:
        ConfigurationError: if an option cannot work, or there is no such checkpoint.
    """
    check_trainer_options(options["trainer"])
    processes = processes_for(options["trainer"], options["rollout"]["rank_timeout"])
    if is_fitting:
        # before Lightning starts the other processes
        with distributed.raise_on_all_ranks(ConfigurationError):
            if options["data"]["demonstrations"] is None:  # else no environments are stepped
                check_envs_per_task(options["rollout"]["envs_per_task"], processes.number)
    location = locate_run(
        root,
        name,
        ckpt_path,
        restore_replay=is_fitting and options["replay"]["restore"],
        restart_id=restart_id if is_fitting else None,
        overwrite_metrics=overwrite_metrics,
        num_processes=processes.number,
    )
    return RunStart(location, processes, is_fitting, restart_id, init_from, init_new_tasks)


def check_start(
    init_from: str | Path | None, new_tasks: NewTasks, ckpt_path: str | None = None
) -> None:
    """Check that the options of a run that starts from a trained policy do not contradict others.

    Args:
        init_from: the policy; None for a run without one.
        new_tasks: initial weights of tasks that the policy was not trained on.
        ckpt_path: the checkpoint of a run that continues; None for a new run.
    """
    one_of(get_args(NewTasks), init_new_tasks=new_tasks)
    if ckpt_path is not None and (init_from is not None or new_tasks != "fresh"):
        option = "init_new_tasks" if init_from is None else "init_from"
        raise ConfigurationError(
            f"{option} is {init_from or new_tasks}, and the run continues from {ckpt_path}: give"
            " one of them. init_from and init_new_tasks start a new run with a policy's weights;"
            " --resume and ckpt_path continue a run"
        )
    if init_from is None and new_tasks != "fresh":
        raise ConfigurationError(
            f"init_new_tasks is {new_tasks}, and the run starts from no policy: give init_from, or"
            " leave it out"
        )


def as_list(given: Any) -> list[Any]:
    """Return loggers, callbacks or listeners as a list, also if a single one or none is given."""
    if given is None or isinstance(given, bool):
        return []
    is_several = isinstance(given, Sequence) and not isinstance(given, str)
    return list(given) if is_several else [given]


def _end_message(trainer: Trainer, env_steps: int, total_steps: int, unit: str) -> str:
    """Return the lines that a run ends with.

    Args:
        trainer: the trainer of the run.
        env_steps: environment steps made, without the steps that filled a lost replay.
        total_steps: environment steps that were asked for.
        unit: their name.
    """
    folder = Path(trainer.default_root_dir)
    lines = [f"The run ended after {env_steps:,} {unit}. Its folder is {folder}"]
    if env_steps < total_steps:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        reasons = filter(None, map(_stop_reason, callbacks))
        lines[0] = (
            f"The run ended early, after {env_steps:,} of {total_steps:,} {unit}:"
            f" {'; '.join(reasons) or 'a callback asked for it'}. Its folder is {folder}"
        )
    lines.append(f"  its curves and tables: mtrl-lightning compare {folder}")
    if (folder / "config.yaml").is_file():  # which a run from Python does not have
        lines.append(f"  watch the policy:      mtrl-lightning play {folder}")
        lines.append(f"  evaluate it:           mtrl-lightning validate {folder}")
    return "\n".join(lines)


def _stop_reason(callback: Callback) -> str:
    """Return why a callback ended the run before all steps were made, if it did."""
    if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
        text = callback.stopping_reason_message.split(" Signaling")[0].rstrip(". ")
        return f"EarlyStopping: {text}"
    if isinstance(callback, Timer):
        left = callback.time_remaining()
        if left is not None and left <= 0:
            return "Timer: its time is over"
    return ""
