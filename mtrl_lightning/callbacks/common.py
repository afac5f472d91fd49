"""What several callbacks need."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, Trainer

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.precision import check_precision
from mtrl_lightning.replay.datamodule import MultiTaskData

C = TypeVar("C", bound=Callback)


def find(trainer: Trainer, kind: type[C]) -> C:
    """Return the trainer's callback of a kind.

    Raises:
        ConfigurationError: if there is none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kind):
            return callback
    raise ConfigurationError(f"the trainer has no {kind.__name__}: add one to its callbacks")


def data_of(trainer: Trainer) -> MultiTaskData:
    """Return the trainer's data.

    Raises:
        ConfigurationError: if it is not a ``MultiTaskData``.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, MultiTaskData):
        raise ConfigurationError("pass trainer.fit(model, datamodule=MultiTaskData(...))")
    return data


def begin_learning(trainer: Trainer, algorithm: Algorithm) -> None:
    """Tell the algorithm the trained tasks' mean rewards in the replay."""
    buffer = data_of(trainer).buffer
    assert buffer is not None
    algorithm.begin_learning(buffer.mean_rewards())


def step_complete(trainer: Trainer) -> bool:
    """Return whether all updates owed for the last vector step are made, which is when schedules fire."""
    return all(getattr(callback, "step_complete", True) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def check_trainer(trainer: Trainer) -> None:
    """Check that the trainer's options are among those that the algorithms work with.

    It warns where ``bf16-mixed`` is slower than ``32-true``.

    Raises:
        ConfigurationError: naming the option to change.
    """
    if trainer.world_size > 1:
        raise ConfigurationError(
            "training on several devices is not supported yet: set trainer.devices and num_nodes to"
            " 1"
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigurationError(
            f"trainer.precision is {trainer.precision}: 32-true and bf16-mixed are supported"
        )
    check_precision(trainer.precision, trainer.strategy.root_device)


def log(trainer: Trainer, metrics: dict[str, float], env_steps: int) -> None:
    """Hand a row to every logger, with ``env_steps`` in it and as its step."""
    for logger in trainer.loggers:
        logger.log_metrics({"env_steps": env_steps, **metrics}, step=env_steps)
