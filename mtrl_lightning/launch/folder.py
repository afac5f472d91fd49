"""Where a run is: its folder, its lock, and the checkpoint that it continues from."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.algorithms.state import check_tasks
from mtrl_lightning.callbacks import MetricsCSV
from mtrl_lightning.callbacks.loggers.wandb_logger import note_name, sweep_run_id
from mtrl_lightning.callbacks.signals import slurm_job
from mtrl_lightning.checkpoints import env_steps_of, load_checkpoint, restoring
from mtrl_lightning.checkpoints.parts import manifests_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.launch.quiet import quiet
from mtrl_lightning.ranks import distributed
from mtrl_lightning.run.checkpoint_file import load_newest_whole
from mtrl_lightning.runs import (
    best_checkpoint,
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
from mtrl_lightning.spec import EnvSpec

WANDB_RUN = "wandb_run"
"""Key of the restart id of a run in a W&B sweep: the run's id there."""
LOCATION_VARIABLE = "MTRL_LIGHTNING_RUN"
"""Environment variable that passes the run's location to the processes that Lightning starts."""
FOLDER_TIMEOUT = 60.0
"""Seconds that a shared file system may take to show the run's folder on another machine."""


def find_restart_id(command: str) -> dict[str, str] | None:
    """Return the id that a run keeps when a scheduler restarts it; None without a scheduler.

    It is the run of a W&B sweep, or else the job of SLURM or ``torchrun`` and its command.
    """
    run_id = sweep_run_id()
    if run_id is not None:
        return {WANDB_RUN: run_id}
    job = slurm_job()
    if job is None and "TORCHELASTIC_RUN_ID" in os.environ:
        job = os.environ["TORCHELASTIC_RUN_ID"]
        if job == "none":  # torchrun's value without --rdzv-id
            job = f"torchrun {os.getppid()} on {socket.gethostname()}"
    return None if job is None else {"job": job, "command": command}


def _is_restarted(restart_id: Mapping[str, str]) -> bool:
    """Return whether a scheduler may have started this run before."""
    if WANDB_RUN in restart_id or slurm_job() is not None:
        return True
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or distributed.is_restart()


@dataclass
class RunLocation:
    """Where a run's files are, and the checkpoint that it continues from; see ``locate_run``."""

    folder: Path
    """The run's folder."""
    checkpoint: Path | None = None
    """The checkpoint; None for a new run."""
    content: dict[str, Any] = field(default_factory=dict)
    """The loaded checkpoint; empty for a new run."""
    overwrite_metrics: bool = False
    """Whether later rows of ``metrics.csv`` than the checkpoint may be deleted."""
    num_processes: int = 1
    """Processes of the run."""
    policy: Path | None = None
    """The checkpoint of the policy with which a new run starts, once it is found; see
    ``set_policy``."""
    is_first: bool = True
    """Whether this process found the folder; it holds the lock."""
    new_folders: Sequence[Path] = ()
    """Folders that a new run makes beside its own, inner ones first."""

    @property
    def env_steps(self) -> int:
        """Environment steps that the checkpoint's run had made; 0 for a new run."""
        with restoring(self.checkpoint):
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
                with distributed.raise_on_all_ranks(ConfigurationError):
                    if self.is_first:
                        ensure_writable(self.folder)
                        held.enter_context(run_lock(self.folder))
                        self._check_metrics()
                held.enter_context(self._passed_to_children())
                yield
        except BaseException:
            if self.is_first and self.checkpoint is None:
                discard_unstarted(self.folder)
                with contextlib.suppress(OSError):  # the first that is not empty
                    for folder in self.new_folders:
                        folder.rmdir()
            raise

    @contextlib.contextmanager
    def _passed_to_children(self) -> Iterator[None]:
        """Pass the location to the processes that Lightning starts."""
        is_parent = self.is_first and distributed.world_size() == 1
        if self.num_processes == 1 or not is_parent:
            yield
            return
        os.environ[LOCATION_VARIABLE] = json.dumps(self.paths())
        try:
            yield
        finally:
            os.environ.pop(LOCATION_VARIABLE, None)

    def set_policy(self, init_from: str | Path | None) -> None:
        """Find the policy with which the run starts, the same file in all processes.

        It is the file behind a link such as ``best.ckpt``, which a run in training moves. A run
        that continues, as one that a scheduler has restarted, starts from no policy.

        Args:
            init_from: the policy, as ``best_checkpoint`` takes it; None for none.

        Raises:
            ConfigurationError: if there is no such policy.
        """
        if init_from is None or self.checkpoint is not None:
            return
        if self.policy is not None:
            return  # the process that has started this one has found it
        policy = None
        with distributed.raise_on_all_ranks(ConfigurationError):
            if distributed.rank() == 0:
                policy = best_checkpoint(init_from).resolve()
        self.policy = distributed.broadcast(policy)
        if LOCATION_VARIABLE in os.environ:  # processes that Lightning starts receive it
            os.environ[LOCATION_VARIABLE] = json.dumps(self.paths())

    def paths(self) -> dict[str, str | None]:
        """Return the paths of folder, checkpoint and policy for another process."""
        paths = {"folder": self.folder, "checkpoint": self.checkpoint, "policy": self.policy}
        return {name: str(path.absolute()) if path else None for name, path in paths.items()}

    def _check_metrics(self) -> None:
        """Check that no rows of ``metrics.csv`` are lost because the run has a later checkpoint."""
        if self.checkpoint is None or self.overwrite_metrics:
            return
        last = self.checkpoint.with_name("last.ckpt")
        try:
            with restoring(last):
                last_env_steps = env_steps_of(load_checkpoint(last, verify=False))
        except ConfigurationError:
            return  # it is missing or damaged: only older ones can be continued
        if last_env_steps <= self.env_steps:
            return
        later = [
            row for row in MetricsCSV(str(self.folder)).rows() if row["env_steps"] > self.env_steps
        ]
        if later:
            raise ConfigurationError(
                f"{self.checkpoint} was saved after {self.env_steps:,} steps, and the run's"
                f" last checkpoint after {last_env_steps:,}: continuing from it deletes the"
                f" {len(later)} later rows of {self.folder / 'metrics.csv'}. Give"
                " --overwrite_metrics (Python: overwrite_metrics=True) to delete them,"
                " --ckpt_path last to continue from the end, or continue from a copy of the run's"
                " folder"
            )

    def saved_capacity(self) -> int | None:
        """Return the capacity of the checkpoint's replay; None without one."""
        with restoring(self.checkpoint):
            manifests = manifests_of(self.content)
            sizes = [manifest["capacity"] * len(manifest["added"]) for manifest in manifests]
        return sum(sizes) or None

    def check(self, spec: EnvSpec, must_match: bool) -> None:
        """Check that the checkpoint is of these tasks and of this protocol; forget its content.

        Args:
            spec: the tasks of this run.
            must_match: whether another protocol is an error, as for training, or a warning.
        """
        if not self.content:
            return
        with restoring(self.checkpoint):
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


def locate_run(
    root: str,
    name: str,
    ckpt_path: str | None = None,
    restore_replay: bool = True,
    restart_id: dict[str, str] | None = None,
    overwrite_metrics: bool = False,
    num_processes: int = 1,
) -> RunLocation:
    """Find the checkpoint and its run's folder, or make a folder for a new run.

    The first process does it; the others receive the location.

    Args:
        root: folder of all runs.
        name: name of the run: its folder is ``ROOT/NAME/version_N``.
        ckpt_path: a checkpoint; the folder of a run, for its last one; ``last`` or ``best`` of the
            newest run of that name; None for a new run.
        restore_replay: whether the checkpoint's replay is needed: ``last`` and a folder go back to
            the newest checkpoint whose files are whole.
        restart_id: identifies a job of SLURM or ``torchrun``, or a run of a W&B sweep; a restarted
            one continues from the newest checkpoint with the same id.
        overwrite_metrics: whether a run may continue from an older checkpoint than its last one,
            which drops the later rows of ``metrics.csv``.
        num_processes: processes of the run.

    Raises:
        ConfigurationError: if the name leads out of the root folder, there is no such checkpoint,
            none is whole, or another process does not see the folder.
    """
    check_name(name)
    received = _location_from_parent()
    location: RunLocation | None = None
    # with several machines, only the launcher of the lost process knows of the restart
    if not distributed.is_any(restart_id is not None and _is_restarted(restart_id)):
        restart_id = None
    is_first = received is None and distributed.rank() == 0
    # the first process may read a large replay, to find out whether it is whole
    with distributed.extended_timeout(), distributed.raise_on_all_ranks(ConfigurationError):
        if is_first:
            location = _find(root, name, ckpt_path, restore_replay, restart_id)
            location.overwrite_metrics |= overwrite_metrics
    with contextlib.ExitStack() as marked:
        if distributed.world_size() > 1 and received is None:
            sent = None if location is None else marked.enter_context(_marked(location))
            received = distributed.broadcast(sent)
        # another machine waits for the folder for up to a minute
        with distributed.extended_timeout(), distributed.raise_on_all_ranks(ConfigurationError):
            if location is None:
                assert received is not None, "only the first process finds the location itself"
                location = _received(received)
                location.overwrite_metrics = overwrite_metrics
    location.num_processes = num_processes
    return location


def _find(
    root: str,
    name: str,
    ckpt_path: str | None,
    restore_replay: bool,
    restart_id: dict[str, str] | None,
) -> RunLocation:
    """Find the checkpoint and its run's folder, or make a folder for a new run."""
    requeued = _requeued(root, name, ckpt_path, restart_id)
    if requeued is None and ckpt_path is None:
        new_folders = missing_folders(Path(root) / name)
        return RunLocation(new_run_folder(root, name), new_folders=new_folders)
    path = requeued or find_checkpoint(str(ckpt_path), root, name)
    if requeued or ckpt_path == "last" or Path(str(ckpt_path)).is_dir():
        # later checkpoints than the newest whole one cannot be continued
        path, content = load_newest_whole(path, restore_replay)
        return RunLocation(run_folder_of(path), path, content, overwrite_metrics=True)
    return RunLocation(run_folder_of(path), path, load_checkpoint(path))


@contextlib.contextmanager
def _marked(location: RunLocation) -> Iterator[dict[str, str | None]]:
    """Return the paths of a location, with a file by which other machines recognize the folder."""
    file = location.folder / f".seen_{uuid.uuid4().hex}"
    is_made = False
    with contextlib.suppress(OSError):  # a read-only folder, as for ``validate``
        file.touch(exist_ok=False)
        is_made = True
    try:
        yield location.paths() | {"file": str(file.absolute()) if is_made else None}
    finally:
        if is_made:
            file.unlink(missing_ok=True)


def _received(paths: dict[str, str | None]) -> RunLocation:
    """Return the location that the first process has sent."""
    folder = Path(str(paths["folder"]))
    deadline = time.monotonic() + FOLDER_TIMEOUT
    # another machine may have a folder of the same name on its own disk
    expected = Path(paths.get("file") or folder)
    while not expected.exists():
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"{socket.gethostname()} does not see the run's folder {folder}, which another"
                " machine has made: give a --root on a file system that all machines share"
            )
        time.sleep(0.1)
    if paths["checkpoint"] is None:
        policy = paths.get("policy")
        policy_path = None if policy is None else Path(policy)
        return RunLocation(folder, policy=policy_path, is_first=False)
    checkpoint = Path(paths["checkpoint"])
    return RunLocation(
        folder, checkpoint, load_checkpoint(checkpoint, verify=False), is_first=False
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


def _location_from_parent() -> dict[str, str | None] | None:
    """Return the paths that the parent process passed on; None if this is no child of a run."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return None
    passed = os.environ.pop(LOCATION_VARIABLE, None)
    return None if passed is None else json.loads(passed)


def _requeued(
    root: str, name: str, ckpt_path: str | None, restart_id: dict[str, str] | None
) -> Path | None:
    """Return the last checkpoint that this run wrote before a scheduler restarted it."""
    if restart_id is None:
        return None
    run_id = restart_id.get(WANDB_RUN)
    named = []
    if ckpt_path:
        path = Path(ckpt_path).resolve()
        named = [path if path.is_dir() else path.parent.parent]
    for folder in [*reversed(versions(root, name)), *named]:
        if run_id is not None and not (folder / note_name(run_id)).is_file():
            continue  # of another run: a sweep may have hundreds, and reading checkpoints is slow
        path = folder / "checkpoints" / "last.ckpt"
        with contextlib.suppress(ConfigurationError), warnings.catch_warnings():
            # other runs' damaged checkpoints do not matter; this one's are named when it is read
            warnings.simplefilter("ignore")
            if load_newest_whole(path, False)[1].get("origin") == restart_id:
                started = (
                    f"{'torchrun' if slurm_job() is None else 'SLURM'} started job"
                    f" {restart_id['job']} again"
                    if run_id is None
                    else f"W&B started run {run_id} of the sweep again"
                )
                rank_zero_info(f"{started}: the run continues from {path}")
                return path
    return None
