"""Options of Lightning's trainer that a run honours, and replacements of the others.

A run has one epoch without an end, its schedules are in environment steps, and its algorithms make
their own optimizer steps. An option that counts epochs, batches or optimizer steps is therefore
refused, and the error names the option to use in its place. ``max_time`` is honoured:
when the time is over, the run makes its last evaluation, saves a checkpoint and ends. Options that
concern the process or its output, such as ``deterministic``, ``profiler`` or ``log_every_n_steps``
(of Lightning's own monitors), are Lightning's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint

from mtrl_lightning.errors import ConfigurationError, closest
from mtrl_lightning.ranks.strategy import RanksStrategy

DEFAULT_MAX_EPOCHS = 1000
"""Lightning's default of ``max_epochs``; an epoch has no end, so it limits nothing."""


class _Refused(NamedTuple):
    """An option that has no effect on a run, or breaks it."""

    accepted: tuple[Any, ...]
    """Lightning's default, and other values that change nothing; null is accepted, too."""
    hint: str


_TOTAL = "set rollout.total_steps, the environment steps after which a run ends"
_EVERY_EPOCH = "a run has one epoch without an end: leave it out"
REFUSED: dict[str, _Refused] = {
    "fast_dev_run": _Refused(
        (False, 0),
        "for a short trial set rollout.warmup_steps 100, rollout.total_steps 200 and"
        " evaluation.num_episodes 1, and another --name",
    ),
    "overfit_batches": _Refused((0, 0.0), "set data.capacity to learn from few transitions"),
    "max_steps": _Refused((-1,), _TOTAL),
    "max_epochs": _Refused((-1, DEFAULT_MAX_EPOCHS), _TOTAL),
    "min_steps": _Refused((), _TOTAL),
    "min_epochs": _Refused((0,), _TOTAL),
    "limit_train_batches": _Refused(
        (1.0,), "set rollout.total_steps, and rollout.updates_per_step for the number of updates"
    ),
    "limit_val_batches": _Refused(
        (1.0,), "set evaluation.num_episodes, the test episodes per task of an evaluation"
    ),
    "limit_test_batches": _Refused((1.0,), "set evaluation.num_episodes and use validate"),
    "limit_predict_batches": _Refused((1.0,), "use load_policy and its act"),
    "val_check_interval": _Refused(
        (1.0,), "set evaluation.every, the environment steps between two evaluations"
    ),
    "check_val_every_n_epoch": _Refused(
        (1,), "set evaluation.every, the environment steps between two evaluations"
    ),
    "num_sanity_val_steps": _Refused(
        (0, 2), "set evaluation.every, the environment steps between two evaluations"
    ),
    "reload_dataloaders_every_n_epochs": _Refused((0,), _EVERY_EPOCH),
    "accumulate_grad_batches": _Refused((1,), "set data.batch_size, the transitions of a batch"),
    "gradient_clip_val": _Refused(
        (), "set model.init_args.actor_max_grad_norm and critic_max_grad_norm"
    ),
    "gradient_clip_algorithm": _Refused(
        (), "set model.init_args.actor_max_grad_norm and critic_max_grad_norm"
    ),
    "enable_checkpointing": _Refused(
        (True,), "set checkpoint.keep_last 0 and checkpoint.keep_best false to save at the end only"
    ),
    "barebones": _Refused(
        (False,), "set metrics.every and checkpoint.every to large numbers for less overhead"
    ),
}
"""By name; options that change others come first."""


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Check options of Lightning's trainer, as they are given or as a trainer has them."""
    for name, refused in REFUSED.items():
        value = options.get(name)
        # an integer is a number of batches and a float a share of them: 1 is not 1.0
        accepted = [(type(other), other) for other in refused.accepted]
        if value is None or (type(value), value) in accepted:
            continue
        raise ConfigurationError(
            f"trainer.{name} is {value}, which a run does not follow: {refused.hint}"
        )


def check_trainer(trainer: Trainer) -> None:
    """Check that the algorithms work with the trainer's options."""
    if trainer.world_size > 1 and not isinstance(trainer.strategy, RanksStrategy):
        raise ConfigurationError(
            f"trainer.strategy is {type(trainer.strategy).__name__}, which does not average the"
            " gradients of manual optimization over the processes: leave it out, or in Python pass"
            " strategy=mtrl_lightning.ranks.strategy.RanksStrategy()"
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigurationError(
            f"trainer.precision is {trainer.precision}: 32-true and bf16-mixed are supported"
        )
    check_trainer_options({name: getattr(trainer, name, None) for name in REFUSED})


def check_early_stopping(trainer: Trainer, known: Sequence[str]) -> None:
    """Check that ``EarlyStopping`` monitors a metric of an evaluation.

    One that is not ``strict`` may wait for a metric that is never logged.

    Args:
        trainer: whose callbacks are checked.
        known: names of the metrics of an evaluation, averages first.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, EarlyStopping) or not callback.strict:
            continue
        if callback.monitor not in known:
            near = closest(str(callback.monitor), known, num=3)
            named = near or known[:6] or ["none, as nothing is evaluated"]
            raise ConfigurationError(
                f"EarlyStopping monitors {callback.monitor!r}, which no evaluation has: give a"
                f" metric such as {', '.join(named)}"
            )


def check_checkpoint_callbacks(trainer: Trainer) -> None:
    """Check that none of Lightning's callbacks saves the run, at moments that are not its own."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint)):
            continue
        name = type(callback).__name__
        metric = getattr(callback, "monitor", None)
        if metric is None:
            hint = "set checkpoint.every, and checkpoint.keep_last to -1 to keep all"
        else:
            mode = getattr(callback, "mode", "max")
            hint = f"set checkpoint.best_metric {metric} and checkpoint.best_mode {mode}"
        raise ConfigurationError(
            f"the callback {name} cannot save a run: it goes by Lightning's count of optimizer"
            " steps, which a run does not use, or saves while environments are stepped. Leave it"
            f" out and {hint} (CheckpointCallback's arguments in Python); a run that is"
            " interrupted saves itself"
        )
