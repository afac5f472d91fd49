"""Save checkpoints, and keep the latest and the best."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.drift import check_equal
from mtrl_lightning.checkpoints import load_checkpoint, restoring
from mtrl_lightning.checkpoints.parts import manifests_of
from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.evaluator import main_metric, metric_names
from mtrl_lightning.run.checkpoint_file import DurableIO
from mtrl_lightning.run.registered import StepAction
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.schedules import Every


class _Moment(NamedTuple):
    """The moment of a checkpoint: two checkpoints of the same moment are equal."""

    env_steps: int
    updates: int
    network_resets: int
    evaluated_at: int


# a Checkpoint of Lightning's: without one among the callbacks, its trainer adds a ModelCheckpoint
class CheckpointCallback(SessionCallback, Checkpoint):
    """Write ``checkpoints/step_<env steps>.ckpt`` on a schedule, at the end, and at interruptions.

    ``last.ckpt`` and ``best.ckpt`` are further names of the newest one and of the best one. The
    replay of an off-policy algorithm is kept beside them in ``replay/``; its files are deleted with
    the last checkpoint that needs them. The iteration of an on-policy one is in the checkpoint.

    Of several processes the first writes the checkpoint, with the states of all. If one of them
    cannot write its part, there is no checkpoint, and all continue, or all end.

    Args:
        every: environment steps between two checkpoints.
        keep_last: checkpoints kept, newest first; -1 keeps all, 0 saves none on the schedule, only
            at the end.
        keep_best: whether the best checkpoint is saved and kept besides.
        best_metric: which metric of an evaluation decides which checkpoint is best, such as
            ``eval/return`` or ``eval/success/reach-v3``; null for the success of the first
            evaluated split, or its score where the benchmark has no success, or its return where it
            has no score either.
        best_mode: whether the largest (``max``) or the smallest (``min``) value is best.
        at_start: whether one is written before the first environment step, too.
        on_error: reaction when a checkpoint cannot be written, as on a full disk: ``continue``
            warns, keeps the previous ones and retries when the next is due; ``stop`` ends the
            run. The last one of a run has to succeed.
    """

    key = "checkpoint"

    def __init__(
        self,
        every: int = 100_000,
        keep_last: int = 2,
        keep_best: bool = True,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        on_error: Literal["continue", "stop"] = "continue",
        at_start: bool = False,
    ) -> None:
        at_least(-1, prefix="checkpoint.", hint=" (-1 for all, 0 for none)", keep_last=keep_last)
        one_of(("max", "min"), prefix="checkpoint.", best_mode=best_mode)
        self._every = Every(every, "checkpoint.every")
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.best_metric = best_metric
        self._best_mode = best_mode
        self._on_error = on_error
        self._at_start = at_start
        self._saved: list[str] = []
        self._best: tuple[float, str] | None = None
        self._saved_at: _Moment | None = None
        self._failed_at: _Moment | None = None
        self._trainer: Trainer | None = None
        self._manifests_of_files: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the folder, and register with the session.

        Raises:
            ConfigurationError: if it cannot be written, or no evaluation has ``best_metric``.
        """
        super().setup(trainer, pl_module, stage)
        if stage != TrainerFn.FITTING:
            return
        self._trainer = trainer
        self._check_best_metric()
        self.folder = self.session.folder / "checkpoints"
        with distributed.raise_on_all_ranks(ConfigurationError):
            if trainer.is_global_zero:
                ensure_writable(self.folder)
                for path in self.folder.glob("*.unfinished"):  # of a run killed while it saved
                    path.unlink(missing_ok=True)
        if type(trainer.strategy.checkpoint_io) in (TorchCheckpointIO, DurableIO):
            trainer.strategy.checkpoint_io = DurableIO(self.session)
        self.session.checkpoints = self
        self.session.after_updates["save_best"] = StepAction(self.save_if_best)
        self.session.after_updates["save_last"] = StepAction(self.save_if_due, self.save_at_start)

    def _check_best_metric(self) -> None:
        known = metric_names(self.session.benchmark)
        if self.best_metric is None and not known:
            self.keep_best = False  # nothing is evaluated
            return
        if self.best_metric is None:
            metric = main_metric(self.session.spec)
            self.best_metric = next(name for name in known if name.endswith(f"/{metric}"))
        if self.keep_best and self.best_metric not in known:
            choices = ", ".join(known[:3]) or "none, as the benchmark has no evaluated split"
            raise ConfigurationError(
                f"checkpoint.best_metric is {self.best_metric!r}: give a metric of an evaluation,"
                f" such as {choices} (or set checkpoint.keep_best to false)"
            )

    def _moment(self) -> _Moment:
        counters = self.session.counters
        return _Moment(
            counters.env_steps,
            counters.updates,
            counters.network_resets,
            self.session.evaluated_at,
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue in the folder of the checkpoint, or start afresh beside another run's."""
        if self.session.replay_files is None:
            self.session.data.manifest = None  # the checkpoints of this run have no replay
        if trainer.ckpt_path:
            self._saved_at = self._moment()
            if Path(trainer.ckpt_path).resolve().parent == self.folder.resolve():
                if trainer.is_global_zero:
                    self._continue_from(Path(trainer.ckpt_path))
                self._saved, self._best = distributed.broadcast((self._saved, self._best))
            else:
                self._saved = []
                self._best = None

    def _continue_from(self, path: Path) -> None:
        """Let ``last.ckpt`` and ``best.ckpt`` name checkpoints that this run knows.

        A run that continues from an older checkpoint knows of no later ones. They stay: they are
        not among those that this run saved.
        """
        self._saved = [name for name in self._saved if (self.folder / name).exists()]
        if self._best and not (self.folder / self._best[1]).exists():
            self._best = None
        last = self.folder / "last.ckpt"
        if self._saved and not (last.exists() and path.samefile(last)):
            self._name("last.ckpt", self._saved[-1])
            if self._best:
                self._name("best.ckpt", self._best[1])
            else:
                (self.folder / "best.ckpt").unlink(missing_ok=True)

    def save_at_start(self) -> None:
        """Save before the first environment step if that is configured; not twice the same."""
        if self._at_start and self._moment() not in (self._saved_at, self._failed_at):
            self.save(self._new_best())

    def save_if_best(self, env_steps: int, at_end: bool) -> None:
        """Save if the evaluation at this step is the best so far."""
        best = self._new_best()
        if best is not None:
            self.save(best)

    def save_if_due(self, env_steps: int, at_end: bool) -> None:
        """Save when it is due, and at the end; not twice the same."""
        is_due = self._every(env_steps) and self.keep_last != 0
        if (is_due or at_end) and self._moment() not in (self._saved_at, self._failed_at):
            self.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save at the end if nothing of this step is saved yet.

        Raises:
            ConfigurationError: if the checkpoint cannot be written.
        """
        if self._saved_at != self._moment():
            try:
                self._write(self._new_best())
            except OSError as error:
                raise ConfigurationError(
                    f"the run's end could not be saved ({error}): {self._fix()}"
                ) from error

    def save_interrupted(self) -> None:
        """Save a run that was interrupted or is out of restarts, where its state is whole."""
        try:
            if self._saved_at != self._moment():
                self._write(self._new_best())
        except OSError as error:
            rank_zero_warn(f"the interrupted run could not be saved ({error}): {self._fix()}")
        else:
            rank_zero_info(
                "\nInterrupted and saved; continue with mtrl-lightning fit --resume"
                f" {self.folder.parent} (Python: ckpt_path={str(self.folder / 'last.ckpt')!r})"
            )

    def _new_best(self) -> float | None:
        session = self.session
        score = session.results.get(self.best_metric or "")
        if (
            not self.keep_best
            or score is None
            or session.evaluated_at != session.counters.env_steps
        ):
            return None
        if self._best is None:
            return score
        best = self._best[0]
        is_better = score > best if self._best_mode == "max" else score < best
        return score if is_better else None

    def save(self, best: float | None = None) -> None:
        """Write a checkpoint.

        Args:
            best: its evaluation's ``best_metric`` if that is the best so far.

        Raises:
            ConfigurationError: if it cannot be written and ``on_error`` is ``stop``.
        """
        try:
            self._write(best)
        except OSError as error:
            self._failed_at = self._moment()
            env_steps = self.session.counters.env_steps
            after = f"{env_steps:,} {self.session.algorithm.step_unit}"
            text = f"the checkpoint after {after} could not be written ({error})"
            if self._on_error == "stop":
                raise ConfigurationError(f"{text}: {self._fix()}") from error
            rank_zero_warn(
                f"{text}; the previous ones are kept and the run continues: free the disk"
            )

    def _fix(self) -> str:
        if not self._saved:
            return "free the disk, then start a new run"
        return f"free the disk, then continue from {self.folder / self._saved[-1]}"

    def _file_name(self) -> str:
        name = f"step_{self.session.counters.env_steps:012d}"
        is_best = self._best is not None and self._best[1] == f"{name}.ckpt"
        resets = self.session.counters.network_resets
        is_reset_since = self._saved_at is not None and self._saved_at.network_resets != resets
        if is_best and is_reset_since:
            return f"{name}_after_reset.ckpt"  # the best one is of the networks before
        return f"{name}.ckpt"

    def _write(self, best: float | None) -> None:
        assert self._trainer is not None
        check_equal(self.session.algorithm)  # else every checkpoint may be one of a run that drifts
        previous = (self._saved, self._saved_at, self._best)
        name = self._file_name()
        unfinished = self.folder / f"{name}.unfinished"
        is_placed = False
        with self.session.stopwatch.measure("checkpoint"):
            try:
                self._saved = [*(other for other in self._saved if other != name), name]
                self._saved_at = self._moment()
                if best is not None:
                    self._best = (best, name)
                self._trainer.save_checkpoint(unfinished, weights_only=False)
                with distributed.raise_on_all_ranks(OSError):
                    if self._trainer.is_global_zero:
                        unfinished.replace(self.folder / name)
                        is_placed = True
                        self._name("last.ckpt", name)
                        if best is not None:
                            self._name("best.ckpt", name)
            except OSError:
                self._saved, self._saved_at, self._best = previous
                if self._trainer.is_global_zero:
                    unfinished.unlink(missing_ok=True)
                    if is_placed and name not in self._saved:
                        (self.folder / name).unlink(missing_ok=True)
                raise
            self._delete_old()

    def _name(self, alias: str, name: str) -> None:
        unfinished = self.folder / f"{alias}.unfinished"
        unfinished.unlink(missing_ok=True)
        try:
            os.link(self.folder / name, unfinished)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.folder / name, unfinished)
        unfinished.replace(self.folder / alias)
        # POSIX renames nothing if both names are of the same file already
        unfinished.unlink(missing_ok=True)

    def _delete_old(self) -> None:
        newest = self._saved if self.keep_last == -1 else self._saved[-max(self.keep_last, 1) :]
        kept = {*newest, *([self._best[1]] if self._best else [])}
        assert self._trainer is not None
        is_first = self._trainer.is_global_zero
        with distributed.raise_on_all_ranks(OSError):
            for name in self._saved:
                if is_first and name not in kept:
                    (self.folder / name).unlink(missing_ok=True)
        self._saved = [name for name in self._saved if name in kept]
        if self.session.replay_files is None:
            return
        manifests = distributed.broadcast(self._needed_manifests() if is_first else None)
        if manifests is not None:
            with distributed.raise_on_all_ranks(OSError):
                self.session.replay_files.prune(manifests)

    def _needed_manifests(self) -> list[dict[str, Any]] | None:
        """Return the manifests of all checkpoints in the folder; None if one cannot be read.

        A file is read once, however many names it has and however many are written after it.
        """
        known = self._manifests_of_files
        self._manifests_of_files = {}
        try:
            for path in self.folder.glob("*.ckpt"):
                status = path.stat()
                file = (status.st_ino, status.st_mtime_ns, status.st_size)
                if file not in known:
                    with restoring(path):
                        known[file] = manifests_of(load_checkpoint(path, verify=False))
                self._manifests_of_files[file] = known[file]
        except (ConfigurationError, OSError) as error:
            rank_zero_warn(f"no replay file is deleted while a checkpoint cannot be read: {error}")
            return None
        return [one for manifests in self._manifests_of_files.values() for one in manifests]

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the names of the kept checkpoints."""
        return {
            "every": self._every.state_dict(),
            "saved": self._saved,
            "best": list(self._best or []),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the names of the kept checkpoints."""
        self._every.load_state_dict(state_dict["every"])
        self._saved = list(state_dict["saved"])
        best = state_dict["best"]
        self._best = (best[0], best[1]) if best else None
