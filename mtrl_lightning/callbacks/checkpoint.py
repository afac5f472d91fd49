"""Save what a run needs to go on, and keep what is wanted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.checkpoint_files import DurableIO, load_checkpoint
from mtrl_lightning.callbacks.common import find, step_complete
from mtrl_lightning.callbacks.evaluation import EvaluationCallback
from mtrl_lightning.callbacks.replay import ReplayCallback
from mtrl_lightning.callbacks.rollout import RolloutCallback
from mtrl_lightning.callbacks.signals import Interrupted
from mtrl_lightning.errors import ConfigurationError, RestartsExhaustedError
from mtrl_lightning.replay.datamodule import manifest_of
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.schedules import Every


class CheckpointCallback(Checkpoint):
    """Write ``checkpoints/step_<env steps>.ckpt`` on a schedule, at the end, and when the run is interrupted.

    ``last.ckpt`` and ``best.ckpt`` are further names of the newest one and of the one with the
    highest evaluation success (return, where a benchmark has no success). The replay lies beside
    them in ``replay/``; its files go with the last checkpoint that needs them.

    Args:
        every: environment steps between two checkpoints.
        keep_last: checkpoints kept, newest first; -1 keeps all, 0 saves none on the schedule, only
            the end's.
        keep_best: whether the best by evaluation success is saved and kept besides.
        on_error: what follows when a checkpoint cannot be written, as on a full disk: ``continue``
            says so, keeps the former ones and tries again when the next is due; ``stop`` ends the
            run. The end's has to succeed.

    Raises:
        ConfigurationError: if a number is out of range.
    """

    def __init__(
        self,
        every: int = 100_000,
        keep_last: int = 2,
        keep_best: bool = True,
        on_error: Literal["continue", "stop"] = "continue",
    ) -> None:
        if keep_last < -1:
            raise ConfigurationError(
                f"checkpoint.keep_last is {keep_last}: give -1 (all), 0 (none) or a number"
            )
        self._every = Every(every, "checkpoint.every")
        self.keep_last, self.keep_best, self._on_error = keep_last, keep_best, on_error
        self._saved: list[str] = []
        self._best: tuple[float, str] | None = None
        self._saved_at = (-1, -1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the folder.

        Raises:
            ConfigurationError: if it cannot be written, or nothing keeps the replay.
        """
        if stage != TrainerFn.FITTING:
            return
        find(trainer, ReplayCallback)
        self.folder = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
        ensure_writable(self.folder)
        for path in self.folder.glob("*.unfinished"):  # of a run that was killed while it saved
            path.unlink(missing_ok=True)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = DurableIO()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on in the folder of the checkpoint, or begin anew beside another run's."""
        assert isinstance(pl_module, Algorithm)
        if trainer.ckpt_path:
            self._every(pl_module.counters.env_steps)
            self._saved_at = (pl_module.counters.env_steps, pl_module.counters.updates)
            if Path(trainer.ckpt_path).resolve().parent == self.folder.resolve():
                self._go_on_from(Path(trainer.ckpt_path))
            else:
                self._saved, self._best = [], None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the run began with an evaluation that the former one was kept from."""
        assert isinstance(pl_module, Algorithm)
        if find(trainer, EvaluationCallback).made_up:
            self.save(trainer, pl_module, self._new_best(trainer, pl_module))

    def _go_on_from(self, path: Path) -> None:
        """Let ``last.ckpt`` and ``best.ckpt`` name what this run knows, if it goes on from an older checkpoint.

        Later checkpoints stay; nothing of theirs is deleted, because they are not among those that
        this run saved.
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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time, at a new best, and at the end."""
        assert isinstance(pl_module, Algorithm)
        if not step_complete(trainer):
            return
        due = self._every(pl_module.counters.env_steps) and self.keep_last != 0
        best = self._new_best(trainer, pl_module)
        if due or best is not None or trainer.should_stop:
            self.save(trainer, pl_module, best)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save at the end if nothing of this step is saved yet.

        Raises:
            ConfigurationError: if the checkpoint cannot be written.
        """
        assert isinstance(pl_module, Algorithm)
        if self._saved_at != (pl_module.counters.env_steps, pl_module.counters.updates):
            try:
                self._write(trainer, pl_module, self._new_best(trainer, pl_module))
            except OSError as error:
                raise ConfigurationError(
                    f"the run's end could not be saved ({error}): {self._remedy()}"
                ) from error

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save when the run was interrupted or out of restarts, which happens where the state is whole."""
        assert isinstance(pl_module, Algorithm)
        if trainer.state.fn != TrainerFn.FITTING or not isinstance(
            exception, (Interrupted, RestartsExhaustedError)
        ):
            return
        if not find(trainer, RolloutCallback).begun:  # a checkpoint is only half restored
            return
        try:
            if self._saved_at != (pl_module.counters.env_steps, pl_module.counters.updates):
                self._write(trainer, pl_module, self._new_best(trainer, pl_module))
        except OSError as error:
            rank_zero_warn(f"the interrupted run could not be saved ({error}): {self._remedy()}")
        else:
            rank_zero_info(
                f"\nInterrupted and saved; continue with --ckpt_path {self.folder / 'last.ckpt'}"
            )

    def _new_best(self, trainer: Trainer, algorithm: Algorithm) -> float | None:
        evaluation = find(trainer, EvaluationCallback)
        score = evaluation.results.get(
            "eval/success" if algorithm.spec.has_success else "eval/return"
        )
        if (
            not self.keep_best
            or score is None
            or evaluation.env_steps != algorithm.counters.env_steps
        ):
            return None
        return score if self._best is None or score > self._best[0] else None

    def save(self, trainer: Trainer, algorithm: Algorithm, best: float | None) -> None:
        """Write a checkpoint; ``best`` is its evaluation's success (or return) if that is the highest so far.

        Raises:
            ConfigurationError: if it cannot be written and the run shall end then.
        """
        try:
            self._write(trainer, algorithm, best)
        except OSError as error:
            text = f"the checkpoint after {algorithm.counters.env_steps:,} env steps could not be written ({error})"
            if self._on_error == "stop":
                raise ConfigurationError(f"{text}: {self._remedy()}") from error
            rank_zero_warn(
                f"{text}; the former ones are kept and the run goes on: free space on the disk"
            )

    def _remedy(self) -> str:
        newest = self._saved[-1] if self._saved else None
        return (
            f"free the disk, then continue from {self.folder / newest}"
            if newest
            else "free the disk, start again"
        )

    def _write(self, trainer: Trainer, algorithm: Algorithm, best: float | None) -> None:
        former = (self._saved, self._saved_at, self._best)
        name = f"step_{algorithm.counters.env_steps:012d}.ckpt"
        unfinished, placed = self.folder / f"{name}.unfinished", False
        with algorithm.stopwatch.measure("checkpoint"):
            try:
                self._saved = [*(n for n in self._saved if n != name), name]
                self._saved_at = (algorithm.counters.env_steps, algorithm.counters.updates)
                if best is not None:
                    self._best = (best, name)
                if trainer.is_global_zero:
                    find(trainer, ReplayCallback).write(trainer)
                trainer.save_checkpoint(unfinished, weights_only=False)
                if trainer.is_global_zero:
                    unfinished.replace(self.folder / name)
                    placed = True
                    self._name("last.ckpt", name)
                    if best is not None:
                        self._name("best.ckpt", name)
            except OSError:
                self._saved, self._saved_at, self._best = former
                unfinished.unlink(missing_ok=True)
                if placed and name not in self._saved:
                    (self.folder / name).unlink(missing_ok=True)
                raise
            if trainer.is_global_zero:
                self._delete_old(trainer)

    def _name(self, alias: str, name: str) -> None:
        unfinished = self.folder / f"{alias}.unfinished"
        unfinished.unlink(missing_ok=True)
        try:
            os.link(self.folder / name, unfinished)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.folder / name, unfinished)
        unfinished.replace(self.folder / alias)
        unfinished.unlink(
            missing_ok=True
        )  # POSIX renames nothing if both names are of the same file already

    def _delete_old(self, trainer: Trainer) -> None:
        newest = self._saved if self.keep_last == -1 else self._saved[-max(self.keep_last, 1) :]
        kept = {*newest, *([self._best[1]] if self._best else [])}
        for name in [n for n in self._saved if n not in kept]:
            (self.folder / name).unlink(missing_ok=True)
        self._saved = [name for name in self._saved if name in kept]
        try:
            manifests = [
                manifest_of(load_checkpoint(path, verify=False))
                for path in self.folder.glob("*.ckpt")
            ]
        except ConfigurationError as error:
            rank_zero_warn(f"no replay file is deleted while a checkpoint cannot be read: {error}")
        else:
            find(trainer, ReplayCallback).prune(manifests)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the names of what is kept."""
        return {
            "every": self._every.state_dict(),
            "saved": self._saved,
            "best": list(self._best or []),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the names of what is kept."""
        self._every.load_state_dict(state_dict["every"])
        self._saved = list(state_dict["saved"])
        self._best = tuple(state_dict["best"]) if state_dict["best"] else None  # type: ignore[assignment]
