"""Lightning's ``ModelCheckpoint`` on a schedule of environment steps, and for evaluations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.errors import ConfigurationError, Interrupted, RestartsExhaustedError
from mtrl_lightning.rollout.evaluator import main_metric, metric_names
from mtrl_lightning.schedules import Every


class EnvStepCheckpoint(ModelCheckpoint):
    """Save a checkpoint every N environment steps, at the end, and when a signal ends the run.

    ``last.ckpt`` is a link to the newest checkpoint. The replay of an off-policy algorithm is saved
    in ``replay/`` in the run folder; its files are deleted when no checkpoint needs them.

    Args:
        every_n_env_steps: environment steps between two checkpoints.
        save_top_k: number of newest checkpoints to keep; -1 keeps all.
        dirpath: folder of the checkpoints; None for ``checkpoints/`` in the run folder.
        save_last: whether to also save the newest checkpoint as ``last.ckpt``.
        options: arguments of ``ModelCheckpoint`` that do not determine when to save.
    """

    def __init__(
        self,
        every_n_env_steps: int = 100_000,
        save_top_k: int = 2,
        dirpath: str | None = None,
        save_last: bool | Literal["link"] = "link",
        **options: Any,
    ) -> None:
        self._schedule = Every(every_n_env_steps, "checkpoint.every_n_env_steps")
        super().__init__(
            dirpath,
            filename="{env_steps}",
            # the newest checkpoints have the largest number of updates
            monitor="step",
            mode="max",
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=1,
            enable_version_counter=False,
            **options,
        )
        self._env_steps = 0

    @property
    def state_key(self) -> str:
        """Name of its state in a checkpoint."""
        return "checkpoint"

    def format_checkpoint_name(self, metrics: dict[str, Any], *args: Any, **options: Any) -> str:
        """Return the file name, with the run's environment steps as ``env_steps``."""
        name = super().format_checkpoint_name(metrics, *args, **options)
        return name.replace("env_steps=0", f"env_steps={self._env_steps:012d}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a checkpoint is due; the last one is saved at the end of training."""
        data = data_of(trainer)
        is_due = data.is_step_finished and self._schedule(data.counters.env_steps)
        if is_due and not trainer.should_stop:
            with _warning_of_the_disk():
                self.save(trainer, pl_module)

    def save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a checkpoint unless there already is one of this update.

        Raises:
            OSError: on all processes, if the checkpoint cannot be written.
        """
        self._env_steps = data_of(trainer).counters.env_steps
        super().on_train_batch_end(trainer, pl_module, None, None, 0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave evaluations to ``BestCheckpoint``."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final checkpoint."""
        try:
            self.save(trainer, pl_module)
        except OSError as error:
            raise ConfigurationError(
                f"the final checkpoint could not be saved ({error}): free disk space, then resume"
                f" from {self.last_model_path or 'the start'}"
            ) from error

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save a run that was interrupted by a signal or has no restarts left."""
        data = data_of(trainer)
        if not isinstance(exception, (Interrupted, RestartsExhaustedError)):
            super().on_exception(trainer, pl_module, exception)
            return
        if data.is_training and not data.is_busy and trainer.state.fn == "fit":
            with _warning_of_the_disk():
                self.save(trainer, pl_module)
                if not trainer.global_step:  # Lightning saves nothing before the first update
                    self.last_model_path = os.path.join(self.dirpath, "last.ckpt")  # type: ignore[arg-type]
                    trainer.save_checkpoint(self.last_model_path)
        if self.last_model_path:
            rank_zero_info(
                "\nInterrupted and saved; resume with mtrl-lightning fit --resume"
                f" {data.folder} (Python: ckpt_path={self.last_model_path!r})"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state and the schedule."""
        return {**super().state_dict(), "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore Lightning's state and the schedule."""
        self._schedule.load_state_dict(state_dict["schedule"])
        super().load_state_dict(_in_folder(state_dict, self.dirpath))


class BestCheckpoint(ModelCheckpoint):
    """Keep the checkpoint of the best evaluation as ``best.ckpt``.

    Args:
        monitor: evaluation metric, such as ``eval/return`` or ``eval/success/reach-v3``; None for
            the success of the first evaluated split, or its score if the benchmark has no success,
            or its return if it has neither.
        mode: whether the largest (``max``) or the smallest (``min``) value is best.
        save_top_k: number of best checkpoints to keep; 0 for none.
        filename: file name of the checkpoints.
        dirpath: folder of the checkpoints; None for ``checkpoints/`` in the run folder.
        options: further arguments of ``ModelCheckpoint``.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        save_top_k: int = 1,
        filename: str = "best",
        dirpath: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            dirpath,
            filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            enable_version_counter=save_top_k > 1,
            **options,
        )

    @property
    def state_key(self) -> str:
        """Name of its state in a checkpoint."""
        return "best"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the metric."""
        data = data_of(trainer)
        known = metric_names(data.benchmark)
        if self.monitor is None and known:
            metric = main_metric(data.spec)
            self.monitor = next(name for name in known if name.endswith(f"/{metric}"))
        if not known:
            self.save_top_k = 0  # the benchmark has no evaluated splits
        elif self.save_top_k != 0 and self.monitor not in known:
            raise ConfigurationError(
                f"best.monitor is {self.monitor!r}: give an evaluation metric, such as"
                f" {', '.join(known[:3])}"
            )
        super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and the names of the files."""
        super().load_state_dict(_in_folder(state_dict, self.dirpath))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the evaluation is the best so far."""
        with _warning_of_the_disk():
            super().on_validation_end(trainer, pl_module)


def _in_folder(state: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Replace the folder in the paths of a ``ModelCheckpoint``'s state: the run may have moved."""

    def moved(path: str) -> str:
        return os.path.join(folder, os.path.basename(path)) if path else path

    paths = ("best_model_path", "kth_best_model_path", "last_model_path")
    best = {moved(path): value for path, value in state["best_k_models"].items()}
    found = {name: moved(state[name]) for name in paths}
    return {**state, **found, "dirpath": folder, "best_k_models": best}


@contextlib.contextmanager
def _warning_of_the_disk() -> Iterator[None]:
    """Warn and continue training if a checkpoint cannot be written."""
    try:
        yield
    except OSError as error:
        rank_zero_warn(
            f"the checkpoint could not be written ({error}): free disk space; training continues"
            " and keeps the previous checkpoints"
        )
