import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import Namespace

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.callbacks.options import OptionsCallback, plain
from mtrl_lightning.launch.sections import LEARNING_OPTIONS

OPTIONS = {
    "seed_everything": 3,
    "name": "a",
    "data": {"batch_size": 96, "capacity": 900},
    "rollout": {"total_steps": 900, "envs_per_task": 2},
    "trainer": {"precision": "32-true", "enable_progress_bar": True},
    "model": {"class_path": "SAC", "init_args": {"discount": 0.99}},
}


class Logger:
    def __init__(self):
        self.received = {}

    def log_hyperparams(self, params):
        self.received.update(params)


@pytest.fixture
def start(tmp_path):
    """Start a run with options, continued from one with others; return what a logger receives."""

    def call(options, former=None):
        callback = OptionsCallback(options, LEARNING_OPTIONS)
        loop = SimpleNamespace(is_complete=lambda: False, unused_options=tuple)
        callback.session = SimpleNamespace(folder=tmp_path, loop=loop)
        if former is not None:
            callback.load_state_dict(OptionsCallback(former, LEARNING_OPTIONS).state_dict())
        logger = Logger()
        trainer = SimpleNamespace(loggers=[logger], ckpt_path=former and "last.ckpt")
        callback.on_fit_start(trainer, None)
        assert bool(logger.received) is (former is None), "a continued run may still be refused"
        callback.on_train_start(trainer, None)
        return logger.received

    return call


def test_a_logger_receives_every_option(start):
    assert start(OPTIONS) == start(OPTIONS, OPTIONS) == OPTIONS


def test_a_continued_run_says_which_options_differ(start):
    other = {
        **OPTIONS,
        "data": {"batch_size": 48, "capacity": 900},
        "model": {"class_path": "SAC", "init_args": {"discount": 0.9}},
        "trainer": {"precision": "bf16-mixed", "enable_progress_bar": True},
    }
    expected = (
        "data.batch_size 96 there and 48 here, model.init_args.discount 0.99 there and 0.9 here,"
        " trainer.precision 32-true there and bf16-mixed here;"
    )
    with pytest.warns(UserWarning, match=expected):
        start(other, OPTIONS)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_part_that_is_added_or_left_out_is_said(start, tmp_path, is_recorded):
    part = {"class_path": "CorrelatedNoise", "init_args": {"correlation": 0.9}}
    explored, white = (
        {**OPTIONS, "rollout": {**OPTIONS["rollout"], "exploration": value}}
        for value in (part, None)
    )
    if is_recorded:  # in the folder, by another continuation; the checkpoint's go first
        (tmp_path / "hparams.yaml").write_text(yaml.safe_dump(explored))
    with pytest.warns(UserWarning, match="CorrelatedNoise"):
        start(explored, white)
    with pytest.warns(UserWarning, match="CorrelatedNoise"):
        start(white, explored)


def test_what_changes_nothing_that_is_learned_is_not_said(start):
    other = {
        **OPTIONS,
        "name": "b",
        "rollout": {"total_steps": 1200, "envs_per_task": 2},
        "trainer": {"precision": "32-true", "enable_progress_bar": False},
        "new": {"option": 3},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(other, OPTIONS)
        start(OPTIONS)


def test_options_become_plain_values():
    given = Namespace(a=Namespace(b=(1, SAC)), c=[Namespace(d=None)], e=partial(SAC))
    assert plain(given) == {
        "a": {"b": [1, "mtrl_lightning.algorithms.sac.SAC"]},
        "c": [{"d": None}],
        "e": "functools.partial",
    }
