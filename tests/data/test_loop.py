"""In which order environments are stepped, batches sampled and updates made; stops in between."""

import lightning
import pytest
import torch
from lightning.pytorch import callbacks

from mtrl_lightning.algorithms import PPO, SAC
from mtrl_lightning.callbacks import EvaluationCallback, MetricsCallback
from mtrl_lightning.data import EnvData, ReplayData, RolloutData
from mtrl_lightning.data.run_checks import check_callbacks
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplayBuffer
from tests.helpers.fitting import QUIET, SMALL

BENCHMARK = ToyReach()


@pytest.fixture
def events(monkeypatch):
    """Return a list to which the events of runs are appended."""
    recorded = []

    def record(owner, method, name):
        original = getattr(owner, method)

        def wrapper(self, *args, **options):
            recorded.append(name or args[0])
            return original(self, *args, **options)

        monkeypatch.setattr(owner, method, wrapper)

    record(EnvData, "send", None)  # by its mode
    record(EnvData, "receive", "receive")
    record(ReplayBuffer, "sample", "sample")
    record(SAC, "update", "update")
    record(EvaluationCallback, "on_validation_epoch_end", "evaluate")
    return recorded


def fit(model, data, folder, *others, every=1000, **options):
    """Train on three toy tasks, in this process; return the trainer."""
    if every is not None:
        others = (*others, EvaluationCallback(every, num_episodes=1, num_workers=0))
    trainer = lightning.Trainer(
        **{**QUIET, "default_root_dir": folder, **options},
        callbacks=[*others, MetricsCallback(1000)],
    )
    trainer.fit(model, data)
    return trainer


def replay_data(total_steps=24, **options):
    given = {"warmup_steps": 12, "batch_size": 6, "num_workers": 0}
    return ReplayData(BENCHMARK, total_steps, **{**given, **options})


def sac():
    return SAC(BENCHMARK.spec, **SMALL)


RANDOM_STEP = ["random", "receive"]
OVERLAPPED = ["sample", "explore", "update", "receive"]


@pytest.mark.parametrize(
    ("ratio", "burst", "expected"),
    [
        (1, 0, OVERLAPPED * 4),
        (0.5, 0, ["sample", "explore", "receive", "explore", "update", "receive"] * 2),
        (2, 0, [*OVERLAPPED, "sample", "update"] * 4),
        (1, 7, [*["sample", "update"] * 7, *OVERLAPPED * 4]),
    ],
)
def test_off_policy_run_steps_while_it_updates(tmp_path, events, ratio, burst, expected):
    fit(sac(), replay_data(updates_per_step=ratio, warmup_updates=burst), tmp_path)
    assert events == [*RANDOM_STEP * 4, *expected, "evaluate"]


def test_stop_evaluates_and_ends_after_the_update(tmp_path, events):
    """As Lightning's ``Timer`` asks for."""
    stop = callbacks.Callback()

    def on_train_batch_end(trainer, pl_module, *_):
        trainer.should_stop |= pl_module.counters.updates == 2

    stop.on_train_batch_end = on_train_batch_end
    trainer = fit(sac(), replay_data(), tmp_path, stop)
    assert events == [*RANDOM_STEP * 4, *OVERLAPPED * 2, "evaluate"]
    assert trainer.global_step == 2 and "eval/return" in trainer.callback_metrics


@pytest.mark.parametrize(
    ("options", "updates", "evaluations"),
    [
        ({"limit_train_batches": 2, "max_epochs": 2}, 4, 1),
        ({"limit_val_batches": 0}, 6, 0),
        ({"val_check_interval": 2, "max_steps": 3}, 3, 2),
        ({"fast_dev_run": True}, 1, 1),
        ({"num_sanity_val_steps": 1}, 6, 2),
    ],
)
def test_limits_of_the_trainer_count_updates(tmp_path, events, options, updates, evaluations):
    every = None if "val_check_interval" in options else 1000
    data = replay_data(total_steps=30)
    trainer = fit(sac(), data, tmp_path, every=every, **options)
    assert (trainer.global_step, events.count("update")) == (updates, updates)
    assert events.count("evaluate") == evaluations


def test_steps_of_all_environments_count_and_threads_are_set(tmp_path):
    before = torch.get_num_threads()
    threads = 2 if before == 1 else 1
    data = replay_data(240, warmup_steps=84, envs_per_task=4, learner_threads=threads)
    fit(sac(), data, tmp_path)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    counted = {name: value for name, value in data.counters.state_dict().items() if value}
    assert counted == {"env_steps": 240, "vector_steps": 20, "updates": 13, "episodes": 12}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"check_val_every_n_epoch": 2}, "check_val"),
        ({"val_check_interval": 2}, "evaluation.every"),
        ({"val_check_interval": 0.5}, "evaluation.every"),
        ({"precision": "64-true"}, "precision"),
        ({"overfit_batches": 2}, "overfit"),
        ({"model": PPO(BENCHMARK.spec, **SMALL)}, "RolloutData"),
        ({"model": SAC(ToyReach(4).spec, **SMALL)}, "other tasks"),
        ({"data": [0]}, "ReplayData"),
        ({"data": RolloutData(BENCHMARK, 12, num_workers=0)}, "ReplayData"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, options, word):
    with pytest.raises(ConfigurationError, match=word):
        fit(**{"model": sac(), "data": replay_data(), "folder": tmp_path, **options})


def test_callbacks_with_a_wrong_result_are_refused():
    for callback in (
        callbacks.BatchSizeFinder(),
        callbacks.EarlyStopping("eval/success/reach", mode="min"),
        callbacks.GradientAccumulationScheduler({0: 2}),
        callbacks.LearningRateFinder(),
        callbacks.ModelCheckpoint(monitor="eval_base/return", mode="min"),
        callbacks.StochasticWeightAveraging(0.1),
    ):
        with pytest.raises(ConfigurationError, match=type(callback).__name__):
            check_callbacks([callback])
    check_callbacks([callbacks.EarlyStopping("eval/success", mode="max")])
    for metric in ("train/critic_loss", "eval/length", None):
        check_callbacks([callbacks.ModelCheckpoint(monitor=metric, mode="min")])
