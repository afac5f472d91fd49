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
    ("option", "value"),
    [
        ("fast_dev_run", True),
        ("fast_dev_run", 3),
        ("overfit_batches", 0.5),
        ("max_steps", 10),
        ("max_epochs", 2),
        ("min_steps", 10),
        ("min_epochs", 2),
        ("limit_train_batches", 1),
        ("limit_train_batches", 0.5),
        ("limit_val_batches", 0),
        ("val_check_interval", 100),
        ("check_val_every_n_epoch", 5),
        ("num_sanity_val_steps", 5),
        ("reload_dataloaders_every_n_epochs", 1),
        ("accumulate_grad_batches", 4),
        ("gradient_clip_val", 1.0),
    ],
)
def test_what_a_run_does_not_follow_is_refused(option, value):
    with pytest.raises(ConfigurationError, match=option):
        check_trainer(trainer(**{option: value}))
    with pytest.raises(ConfigurationError, match=option):
        check_trainer_options({option: value})


def test_the_trainers_defaults_are_accepted():
    check_trainer(trainer())
    check_trainer(trainer(max_epochs=-1, max_time="00:01:00:00", fast_dev_run=False))
    defaults = inspect.signature(Trainer).parameters
    check_trainer_options({name: defaults[name].default for name in REFUSED})


@pytest.mark.parametrize(
    "callback", [ModelCheckpoint(every_n_train_steps=5), OnExceptionCheckpoint(".")]
)
def test_lightnings_own_checkpoints_are_refused(callback):
    with pytest.raises(ConfigurationError, match=type(callback).__name__):
        check_checkpoint_callbacks(trainer(callbacks=[callback]))
    check_checkpoint_callbacks(trainer(callbacks=[CheckpointCallback()]))
