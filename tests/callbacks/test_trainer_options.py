"""Options and callbacks of Lightning's trainer: followed, or refused with what replaces them."""

import inspect

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from mtrl_lightning.callbacks import CheckpointCallback
from mtrl_lightning.callbacks.trainer_options import (
    REFUSED,
    check_checkpoint_callbacks,
    check_trainer,
    check_trainer_options,
)
from mtrl_lightning.errors import ConfigurationError


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", **{**quiet, **options})


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("fast_dev_run", True, "rollout.total_steps 200"),
        ("fast_dev_run", 3, "rollout.total_steps 200"),
        ("overfit_batches", 0.5, "data.capacity"),
        ("max_steps", 10, "rollout.total_steps"),
        ("max_epochs", 2, "rollout.total_steps"),
        ("min_steps", 10, "rollout.total_steps"),
        ("min_epochs", 2, "rollout.total_steps"),
        ("limit_train_batches", 1, "rollout.updates_per_step"),
        ("limit_train_batches", 0.5, "rollout.updates_per_step"),
        ("limit_val_batches", 0, "evaluation.num_episodes"),
        ("val_check_interval", 100, "evaluation.every"),
        ("check_val_every_n_epoch", 5, "evaluation.every"),
        ("num_sanity_val_steps", 5, "evaluation.every"),
        ("reload_dataloaders_every_n_epochs", 1, "leave it out"),
        ("accumulate_grad_batches", 4, "data.batch_size"),
        ("gradient_clip_val", 1.0, "actor_max_grad_norm"),
    ],
)
def test_what_a_run_does_not_follow_is_refused_by_name_with_the_remedy(option, value, remedy):
    with pytest.raises(ConfigurationError, match=rf"trainer.{option} is {value}.*{remedy}"):
        check_trainer(trainer(**{option: value}))
    with pytest.raises(ConfigurationError, match=rf"trainer.{option} is {value}.*{remedy}"):
        check_trainer_options({option: value})


def test_the_trainers_defaults_are_accepted():
    check_trainer(trainer())
    check_trainer(trainer(max_epochs=-1, max_time="00:01:00:00", fast_dev_run=False))
    defaults = inspect.signature(Trainer).parameters
    check_trainer_options({name: defaults[name].default for name in REFUSED})


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (
            ModelCheckpoint(monitor="eval/success", mode="max"),
            "checkpoint.best_metric eval/success and checkpoint.best_mode max",
        ),
        (ModelCheckpoint(every_n_train_steps=5), "checkpoint.every"),
        (OnExceptionCheckpoint("."), "a run that is interrupted saves itself"),
    ],
)
def test_lightnings_own_checkpoints_are_refused_by_name(callback, remedy):
    with pytest.raises(ConfigurationError, match=rf"callback {type(callback).__name__}.*{remedy}"):
        check_checkpoint_callbacks(trainer(callbacks=[callback]))
    check_checkpoint_callbacks(trainer(callbacks=[CheckpointCallback()]))
