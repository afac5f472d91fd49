"""Start or continue a run: its folder and lock, the checkpoint, the checks, what every run has.

The command line and ``train`` share this.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning import distributed
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.algorithm import check_tasks
from mtrl_lightning.callbacks import (
    CurvesCallback,
    EnvStepProgressBar,
    EnvStepWandbLogger,
    InterruptionCallback,
    MetricsCSV,
    OptionsCallback,
    PicturesCallback,
    ReportCallback,
    RolloutCallback,
)
from mtrl_lightning.callbacks.checkpoint_files import load_newest_whole
from mtrl_lightning.callbacks.ending import end_message
from mtrl_lightning.callbacks.rollout import check_copies
from mtrl_lightning.callbacks.signals import requeue, slurm_job
from mtrl_lightning.callbacks.trainer_options import check_trainer_options
from mtrl_lightning.callbacks.wandb_logger import note_name, sweep_run_id
from mtrl_lightning.checkpoints import env_steps_of, load_checkpoint
from mtrl_lightning.errors import ConfigurationError, Interrupted, RankLostError
from mtrl_lightning.quiet import quiet
from mtrl_lightning.rank_states import manifests_of
from mtrl_lightning.replay import MultiTaskData
from mtrl_lightning.replay.snapshot import check_manifest
from mtrl_lightning.run.sections import LEARNING_OPTIONS
from mtrl_lightning.runs import (
    check_name,
    discard_unstarted,
    ensure_writable,
    find_checkpoint,
    missing_folders,
    new_run_folder,
    run_folder_of,
    run_lock,
    versions,
)
from mtrl_lightning.saved import restoring
from mtrl_lightning.strategy import Processes, processes_for
from mtrl_lightning.types import EnvSpec

WANDB_RUN = "wandb_run"
"""Key of the mark of a checkpoint that a run in a W&B sweep wrote: the run's id."""
FIXED_TRAINER_OPTIONS: dict[str, Any] = {
    "max_epochs": -1,
    "max_steps": -1,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}
"""Options of Lightning's trainer for a run that its own loop ends."""
PLACE_VARIABLE = "MTRL_LIGHTNING_RUN"
"""Environment variable by which processes that Lightning starts learn where the run's files are."""
FOLDER_TIMEOUT = 60.0
"""Seconds that a shared file system may take to show the run's folder on another machine."""


def restart_origin(command: str) -> dict[str, str] | None:
    """Return what marks the checkpoints of a run that a scheduler starts again; else None.

    It is the run of a W&B sweep, or else the job of SLURM or ``torchrun`` and its command.

    Args:
        command: the command line.
    """
    run_id = sweep_run_id()
    if run_id is not None:
        return {WANDB_RUN: run_id}
    job = slurm_job()
    if job is None and "TORCHELASTIC_RUN_ID" in os.environ:
        job = os.environ["TORCHELASTIC_RUN_ID"]
        if job == "none":  # what it is called without --rdzv-id
            job = f"torchrun {os.getppid()} on {socket.gethostname()}"
    return None if job is None else {"job": job, "command": command}


def _is_started_again(origin: Mapping[str, str]) -> bool:
    """Return whether a scheduler may have started this run before."""
    if WANDB_RUN in origin or slurm_job() is not None:
        return True
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or distributed.is_restart()


class Launch:
    """Where a run's files are, and what it continues from.

    Args:
        root: folder of all runs.
        name: name of the run: its folder is ``ROOT/NAME/version_N``.
        ckpt_path: a checkpoint; the folder of a run, for its last one; ``last`` or ``best`` of the
            newest run of that name; None for a new run.
        restore_replay: whether the checkpoint's replay is needed: ``last`` and a folder go back to
            the newest checkpoint whose files are whole.
        origin: marks the checkpoints of a job of SLURM or ``torchrun``, or of a run in a W&B sweep;
            the newest checkpoint with the same mark is continued.
        overwrite_metrics: whether a run may continue from an older checkpoint than its last one,
            which drops the later rows of ``metrics.csv``.
        num_processes: processes of the run. The first finds or makes the folder; the others receive
            its path.

    Raises:
        ConfigurationError: if the name leads out of the root folder, there is no such checkpoint,
            none is whole, or another process does not see the folder.
    """

    def __init__(
        self,
        root: str,
        name: str,
        ckpt_path: str | None = None,
        restore_replay: bool = True,
        origin: dict[str, str] | None = None,
        overwrite_metrics: bool = False,
        num_processes: int = 1,
    ) -> None:
        check_name(name)
        self._num_processes = num_processes
        self._overwrite_metrics = overwrite_metrics
        self._missing = missing_folders(Path(root) / name)
        """Folders that a new run makes beside its own, inner ones first."""
        self.checkpoint: Path | None = None
        self.content: dict[str, Any] = {}
        """What the checkpoint holds; empty for a new run."""
        place = _place_from_parent()
        self._is_first = place is None and distributed.rank() == 0
        """Whether this process finds the folder, and locks it."""
        # the launcher may know it only where a process was lost
        if not distributed.is_any(origin is not None and _is_started_again(origin)):
            origin = None
        # the first process may read a large replay, to find out whether it is whole
        with distributed.long_wait(), distributed.together(ConfigurationError):
            if self._is_first:
                self._find(root, name, ckpt_path, restore_replay, origin)
        with contextlib.ExitStack() as shown:
            if distributed.world_size() > 1 and place is None:
                own = shown.enter_context(self._shown()) if self._is_first else None
                place = distributed.broadcast(own)
            # another machine waits for the folder for up to a minute
            with distributed.long_wait(), distributed.together(ConfigurationError):
                if not self._is_first and place is not None:
                    self._follow(place)

    def _place(self) -> dict[str, str | None]:
        checkpoint = None if self.checkpoint is None else str(self.checkpoint.absolute())
        return {"folder": str(self.folder.absolute()), "checkpoint": checkpoint}

    @contextlib.contextmanager
    def _shown(self) -> Iterator[dict[str, str | None]]:
        """Return the place, with a file by which other machines recognize the folder."""
        file = self.folder / f".seen_{uuid.uuid4().hex}"
        is_made = False
        with contextlib.suppress(OSError):  # a folder that can only be read, as for ``validate``
            file.touch(exist_ok=False)
            is_made = True
        try:
            yield self._place() | {"file": str(file.absolute()) if is_made else None}
        finally:
            if is_made:
                file.unlink(missing_ok=True)

    def _follow(self, place: dict[str, str | None]) -> None:
        """Use the folder and the checkpoint that the first process has found."""
        self.folder = Path(str(place["folder"]))
        give_up_at = time.monotonic() + FOLDER_TIMEOUT
        # another machine may have a folder of the same name on its own disk
        wanted = Path(place.get("file") or self.folder)
        while not wanted.exists():
            if time.monotonic() > give_up_at:
                raise ConfigurationError(
                    f"{socket.gethostname()} does not see the run's folder {self.folder}, which"
                    " another machine has made: give a --root on a file system that all machines"
                    " share"
                )
            time.sleep(0.1)
        if place["checkpoint"] is not None:
            self.checkpoint = Path(place["checkpoint"])
            self.content = load_checkpoint(self.checkpoint, verify=False)

    def _find(
        self,
        root: str,
        name: str,
        ckpt_path: str | None,
        restore_replay: bool,
        origin: dict[str, str] | None,
    ) -> None:
        """Find the checkpoint and its run's folder, or make a folder for a new run."""
        requeued = _requeued(root, name, ckpt_path, origin)
        if requeued is None and ckpt_path is None:
            self.folder = new_run_folder(root, name)
            return
        path = requeued or find_checkpoint(str(ckpt_path), root, name)
        if requeued or ckpt_path == "last" or Path(str(ckpt_path)).is_dir():
            # the newest that is whole: what is later than it cannot be continued
            self._overwrite_metrics = True
            path, self.content = load_newest_whole(path, restore_replay)
        else:
            self.content = load_checkpoint(path)
        self.checkpoint = path
        self.folder = run_folder_of(path)

    @property
    def env_steps(self) -> int:
        """Environment steps that the checkpoint's run had made; 0 for a new run."""
        return env_steps_of(self.content) if self.content else 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes from training in the run's folder.

        The folder of a new run that cannot start is deleted.

        Raises:
            ConfigurationError: if another process trains in it, it cannot be written, or rows of
                ``metrics.csv`` would be lost.
        """
        try:
            with contextlib.ExitStack() as held:
                held.enter_context(quiet())
                with distributed.together(ConfigurationError):
                    if self._is_first:
                        ensure_writable(self.folder)
                        held.enter_context(run_lock(self.folder))
                        self._check_metrics()
                held.enter_context(self._known_to_children())
                yield
        except BaseException:
            if self._is_first and self.checkpoint is None:
                self._discard()
            raise

    @contextlib.contextmanager
    def _known_to_children(self) -> Iterator[None]:
        """Let processes that Lightning starts know where the run's files are."""
        is_parent = self._is_first and distributed.world_size() == 1
        if self._num_processes == 1 or not is_parent:
            yield
            return
        os.environ[PLACE_VARIABLE] = json.dumps(self._place())
        try:
            yield
        finally:
            os.environ.pop(PLACE_VARIABLE, None)

    def _discard(self) -> None:
        discard_unstarted(self.folder)
        with contextlib.suppress(OSError):  # the first that is not empty
            for folder in self._missing:
                folder.rmdir()

    def _check_metrics(self) -> None:
        """Check that no rows of ``metrics.csv`` are lost because the run has a later checkpoint."""
        if self.checkpoint is None or self._overwrite_metrics:
            return
        last = self.checkpoint.with_name("last.ckpt")
        try:
            last_env_steps = env_steps_of(load_checkpoint(last, verify=False))
        except ConfigurationError:
            return  # it is missing or damaged: an older one is what there is to continue from
        if last_env_steps <= self.env_steps:
            return
        later = [
            row for row in MetricsCSV(str(self.folder)).rows() if row["env_steps"] > self.env_steps
        ]
        if later:
            raise ConfigurationError(
                f"{self.checkpoint} was saved after {self.env_steps:,} env steps, and the run's"
                f" last checkpoint after {last_env_steps:,}: continuing from it deletes the"
                f" {len(later)} later rows of {self.folder / 'metrics.csv'}. Give"
                " --overwrite_metrics (Python: overwrite_metrics=True) to delete them,"
                " --ckpt_path last to continue from the end, or continue from a copy of the run's"
                " folder"
            )

    def saved_capacity(self) -> int | None:
        """Return the capacity of the checkpoint's replay; None without one."""
        with restoring("list of replay files"):
            manifests = manifests_of(self.content)
            for manifest in manifests:
                check_manifest(manifest)
        return sum(manifest["capacity"] * len(manifest["added"]) for manifest in manifests) or None

    def check(self, spec: EnvSpec, must_match: bool) -> None:
        """Check that the checkpoint is of these tasks and of this protocol; forget its content.

        Args:
            spec: the tasks of this run.
            must_match: whether another protocol is an error, as for training, or a warning.

        Raises:
            ConfigurationError: naming what differs.
        """
        if not self.content:
            return
        with restoring("tasks"):
            check_tasks(self.content, spec)
            differences = _differences(self.content["mtrl_lightning"]["spec"], spec)
        self.content = {}
        if differences and must_match:
            raise ConfigurationError(
                f"the checkpoint is of another protocol: {', '.join(differences)};"
                " use the config.yaml in its run's folder"
            )
        if differences:
            rank_zero_warn(
                f"the checkpoint was trained with another protocol: {', '.join(differences)}"
            )


def _differences(saved: dict[str, Any], spec: EnvSpec) -> list[str]:
    keys = dict.fromkeys([*saved["protocol"], *spec.protocol])
    differences = [
        f"{key} {saved['protocol'].get(key)} there and {spec.protocol.get(key)} here"
        for key in keys
        if saved["protocol"].get(key) != spec.protocol.get(key)
    ]
    if saved["train_tasks"] != list(spec.train_tasks):
        differences.append(
            f"tasks trained on {saved['train_tasks']} there and {list(spec.train_tasks)} here"
        )
    return differences


def _place_from_parent() -> dict[str, str | None] | None:
    """Return what the process that started this one says of the run's files; None if it is none."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return None
    given = os.environ.pop(PLACE_VARIABLE, None)
    return None if given is None else json.loads(given)


def _requeued(
    root: str, name: str, ckpt_path: str | None, origin: dict[str, str] | None
) -> Path | None:
    """Return the last checkpoint that this run wrote before a scheduler started it again."""
    if origin is None:
        return None
    run_id = origin.get(WANDB_RUN)
    given = []
    if ckpt_path:
        path = Path(ckpt_path).resolve()
        given = [path if path.is_dir() else path.parent.parent]
    for folder in [*reversed(versions(root, name)), *given]:
        if run_id is not None and not (folder / note_name(run_id)).is_file():
            continue  # of another run: a sweep may have hundreds, and reading checkpoints is slow
        path = folder / "checkpoints" / "last.ckpt"
        with contextlib.suppress(ConfigurationError), warnings.catch_warnings():
            # other runs' damaged checkpoints do not matter; this one's are named when it is read
            warnings.simplefilter("ignore")
            if load_newest_whole(path, False)[1].get("origin") == origin:
                started = (
                    f"{'torchrun' if slurm_job() is None else 'SLURM'} started job"
                    f" {origin['job']} again"
                    if run_id is None
                    else f"W&B started run {run_id} of the sweep again"
                )
                rank_zero_info(f"{started}: the run continues from {path}")
                return path
    return None


def prepare(
    options: Mapping[str, Mapping[str, Any]],
    root: str,
    name: str,
    ckpt_path: str | None,
    origin: dict[str, str] | None,
    overwrite_metrics: bool,
    fitting: bool = True,
) -> tuple[Launch, Processes]:
    """Check the options that concern all processes of a run, connect them, and find its folder.

    Args:
        options: all options of the run by section.
        root: folder of all runs.
        name: name of the run.
        ckpt_path: the checkpoint or run to continue, as ``Launch`` takes it.
        origin: marks the checkpoints of a run that a scheduler starts again.
        overwrite_metrics: whether later rows of ``metrics.csv`` may be deleted.
        fitting: whether it trains.

    Raises:
        ConfigurationError: if an option cannot work, or there is no such checkpoint.
    """
    check_trainer_options(options["trainer"])
    processes = processes_for(options["trainer"], options["rollout"]["rank_timeout"])
    if fitting:
        # before Lightning starts the other processes
        with distributed.together(ConfigurationError):
            check_copies(options["rollout"]["envs_per_task"], processes.number)
    launch = Launch(
        root,
        name,
        ckpt_path,
        restore_replay=fitting and options["replay"]["restore"],
        origin=origin if fitting else None,
        overwrite_metrics=overwrite_metrics,
        num_processes=processes.number,
    )
    return launch, processes


def standard_callbacks(
    fitting: bool,
    progress_bar: bool,
    origin: dict[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    given: Sequence[Callback] = (),
) -> list[Callback]:
    """Return the callbacks that every run has and that have no options.

    Args:
        fitting: whether it trains.
        progress_bar: whether a progress bar is shown.
        given: the user's callbacks: a progress bar among them takes the place of ours.
        origin: marks the checkpoints of a run that a scheduler starts again.
        options: all options of the run, as ``config.yaml`` holds them.
    """
    callbacks: list[Callback] = []
    if fitting:
        callbacks += [CurvesCallback(), ReportCallback(), InterruptionCallback(origin)]
        callbacks += [OptionsCallback(options or {}, LEARNING_OPTIONS), PicturesCallback()]
    if progress_bar and not any(isinstance(callback, ProgressBar) for callback in given):
        callbacks.append(EnvStepProgressBar())
    return callbacks


def fit(
    trainer: Trainer, algorithm: Algorithm, data: MultiTaskData, checkpoint: Path | None = None
) -> None:
    """Train; a checkpoint is read without executing anything in it.

    Raises:
        Interrupted: if a signal ended the run, which is saved by then.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    rollout = next(one for one in callbacks if isinstance(one, RolloutCallback))
    if rollout.learner_threads is not None:
        torch.set_num_threads(rollout.learner_threads)
    rank_zero_info(f"The run's folder is {trainer.default_root_dir}")
    with quiet():
        try:
            trainer.fit(
                algorithm,
                datamodule=data,
                ckpt_path=None if checkpoint is None else str(checkpoint),
                weights_only=True,
            )
        except Interrupted as interrupted:
            for logger in trainer.loggers if trainer.is_global_zero else ():
                if isinstance(logger, EnvStepWandbLogger):
                    interrupted.code = logger.end_interrupted(interrupted.code)
            requeue(trainer, interrupted)
            # a launcher may end the others as soon as one has ended
            with contextlib.suppress(RankLostError), distributed.long_wait():
                distributed.total(0)
            raise
    rank_zero_info(end_message(trainer, rollout.session.loop.counted_steps, rollout.total_steps))
