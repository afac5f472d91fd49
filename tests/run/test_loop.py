"""In which order environments are stepped, batches sampled and updates made; stops in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import IterableDataset

from mtrl_lightning.algorithms import PPO, SAC, BehaviourCloning
from mtrl_lightning.api import train
from mtrl_lightning.callbacks import rollout
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.counters import Counters
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.replay import ReplayBuffer, RolloutBuffer
from mtrl_lightning.run.loop import AFTER_UPDATES, RESULT_ACTIONS, TrainingLoop
from mtrl_lightning.schedules import UpdateRatio
from tests.helpers.demonstrations import write_demonstrations

WARMUP = {"warmup_steps": 12}
OFF_POLICY = {"total_steps": 24, "data": {"capacity": 3_000, "batch_size": 6}}
ON_POLICY = {"total_steps": 12}


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

    record(TrainingLoop, "_send", None)  # by its mode
    record(TrainingLoop, "_receive", "receive")
    record(ReplayBuffer, "sample", "sample")
    record(RolloutBuffer, "next_minibatch", "sample")
    record(SAC, "update", "update")
    record(PPO, "update", "update")
    record(BehaviourCloning, "update", "update")
    record(TrainingLoop, "_finish_step", "finish")
    return recorded


def run(algorithm, folder, **options):
    """Train on three toy tasks, in this process."""
    return train(
        ToyReach(),
        algorithm,
        root=str(folder),
        num_workers=0,
        evaluation={"num_workers": 0, "num_episodes": 1},
        trainer={"enable_progress_bar": False, "accelerator": "cpu"},
        **options,
    )


RANDOM_STEP = ["random", "receive"]
STEP = ["explore", "receive"]
OVERLAPPED = ["sample", "explore", "update", "receive", "finish"]


@pytest.mark.parametrize(
    ("ratio", "burst", "expected"),
    [
        (1, 0, OVERLAPPED * 4),
        (0.5, 0, ["sample", *STEP, "explore", "update", "receive", "finish"] * 2),
        (2, 0, [*OVERLAPPED[:-1], "sample", "update", "finish"] * 4),
        (1, 7, [*["sample", "update"] * 7, "finish", *OVERLAPPED * 4]),
    ],
)
def test_an_off_policy_run_samples_and_acts_before_each_update_and_receives_after_it(
    tmp_path, events, ratio, burst, expected
):
    given = {**WARMUP, "updates_per_step": ratio, "warmup_updates": burst}
    run(SAC, tmp_path, rollout=given, **OFF_POLICY)
    assert events == RANDOM_STEP * 4 + expected


def test_an_on_policy_run_collects_an_iteration_and_then_learns_from_it_alone(tmp_path, events):
    algorithm = lambda spec, seed: PPO(  # noqa: E731
        spec, num_steps=2, num_epochs=1, num_minibatches=2, seed=seed
    )
    run(algorithm, tmp_path, **ON_POLICY)
    iteration = [*STEP, "finish", *STEP, "sample", "update", "sample", "update", "finish"]
    assert events == iteration * 2


def test_an_offline_run_samples_and_updates_without_environments(tmp_path, events, monkeypatch):
    folder = write_demonstrations(tmp_path / "demonstrations", num_episodes=1)
    monkeypatch.setattr(rollout, "VectorEnv", None)
    data = {"demonstrations": str(folder), "batch_size": 6}
    ended = run(BehaviourCloning, tmp_path, total_steps=3, data=data)
    assert events == ["sample", "update", "finish"] * 3
    checkpoint = load_checkpoint(ended.checkpoint)
    counters = checkpoint["mtrl_lightning"]["counters"]
    assert counters == Counters(env_steps=3, updates=3).state_dict()


class StopAfter(Callback):
    """Ask the trainer to stop after an update, as Lightning's ``Timer`` does."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.counters.updates == self.updates:
            trainer.should_stop = True


def test_a_stop_in_the_middle_of_a_vector_step_waits_for_its_end(tmp_path, events, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        ended = run(SAC, tmp_path, callbacks=StopAfter(2), rollout=WARMUP, **OFF_POLICY)
    assert events == RANDOM_STEP * 4 + OVERLAPPED * 2
    assert "eval/return" in ended.evaluation
    checkpoint = load_checkpoint(ended.checkpoint)
    assert checkpoint["mtrl_lightning"]["counters"]["env_steps"] == 18
    assert checkpoint["callbacks"]["rollout"]["next_call"] not in RESULT_ACTIONS
    printed = "\n".join(caplog.messages)
    assert "signaled to stop" not in printed and "ended early, after 18 of 24" in printed


def test_the_iterator_does_nothing_before_a_batch_is_asked_for():
    loop = TrainingLoop(None, 10, 1, UpdateRatio(1))  # a session would be needed to step
    assert isinstance(loop, IterableDataset)
    iter(loop)
    assert len(loop) >= 10**12


def test_lightnings_limit_of_epochs_is_restored_after_a_fit(tmp_path):
    limits = []

    class Limits(Callback):
        def on_train_end(self, trainer, pl_module):
            limits.append(trainer.fit_loop.min_epochs)
            self.trainer = trainer

    watching = Limits()
    run(SAC, tmp_path, callbacks=watching, rollout=WARMUP, **OFF_POLICY)
    assert limits == [1] and watching.trainer.fit_loop.min_epochs == Trainer().fit_loop.min_epochs


def loop_of(counters):
    session = SimpleNamespace(counters=counters, algorithm=SimpleNamespace(kind="off-policy"))
    return TrainingLoop(session, 10, 1, UpdateRatio(1))


STATE = {
    "next_call": None,
    "warmup": {"over": True},
    "ratio": {"vector_steps": 3, "updates": 7, "ratio": 1},
    "refill_steps": 0,
}


@pytest.mark.parametrize("action", [*AFTER_UPDATES, None])
def test_the_next_action_is_saved_by_name(action):
    loop = loop_of(Counters(env_steps=30, vector_steps=10, updates=7))
    loop.load_state_dict(STATE | {"next_call": action})
    assert loop.state_dict()["next_call"] == action
