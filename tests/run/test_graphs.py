"""Runs whose updates are recorded and replayed, with the CPU's recorder in place of CUDA graphs."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from mtrl_lightning import PPO, SAC, train
from mtrl_lightning.algorithms import algorithm as algorithms
from mtrl_lightning.callbacks import progress
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.envs import Pixels, ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning import compiling
from mtrl_lightning.learning import update as updating
from mtrl_lightning.learning.acting_graphs import ActingGraphs
from mtrl_lightning.learning.graph import UpdateGraphs
from mtrl_lightning.networks import MLP
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.replay.device import DeviceReplay
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.static_batches import StaticBatches
from mtrl_lightning.rollout import CorrelatedNoise
from mtrl_lightning.run import data as run_data
from mtrl_lightning.run.data import MultiTaskData
from tests.helpers.algorithms import make_sac
from tests.helpers.recorder import CPURecorder
from tests.helpers.runs import assert_same, signal_in_call

small = partial(MLP, width=8, depth=1)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let the CPU stand for a GPU, and the recorder for its graphs."""
    monkeypatch.setattr(updating, "decides_on_device", lambda device: True)
    monkeypatch.setattr(compiling, "CudaCapture", lambda device: CPURecorder())
    monkeypatch.setattr(compiling, "check_compile", lambda *args: None)
    monkeypatch.setattr(algorithms, "to_host", copied)


@pytest.fixture(autouse=True)
def graphs_are_kept(monkeypatch):
    """Let tests look at the graphs after a run."""
    monkeypatch.setattr(algorithms.Algorithm, "teardown", lambda self, stage: None)


def copied(tensors):
    """Return copies: what is brought from a GPU is not the memory into which graphs write."""
    return [tensor.numpy().copy() for tensor in tensors]


def run(root, algorithm, total_steps=60, **options):
    sections = {
        "rollout": {"warmup_steps": 10, **options.pop("rollout", {})},
        "data": {"batch_size": 8, "capacity": 200, **options.pop("data", {})},
    }
    model = {"compile": "graph", **options.pop("model", {})}
    trainer = {"enable_progress_bar": False, "accelerator": "cpu", **options.pop("trainer", {})}
    if algorithm is PPO:
        del sections["data"], sections["rollout"]["warmup_steps"]
    return train(
        ToyReach(2, horizon=20),
        partial(algorithm, actor=small, critic=small, **model),
        total_steps=total_steps,
        root=str(root),
        num_workers=0,
        evaluation={"num_episodes": 1, "num_workers": 0},
        trainer=trainer,
        **sections,
        **options,
    ).algorithm


@pytest.fixture
def owed(monkeypatch):
    """The updates that were owed, and where their batches came from."""
    calls = []
    make = UpdateGraphs.make

    def noting(self, source, num_updates):
        calls.append((type(source), num_updates))
        make(self, source, num_updates)

    monkeypatch.setattr(UpdateGraphs, "make", noting)
    return calls


def test_sac_makes_all_owed_updates_of_a_step_in_one_batch_which_the_device_draws(tmp_path, owed):
    sac = run(tmp_path, SAC, total_steps=30, rollout={"updates_per_step": 5})
    graphs = sac.graphs.updates
    assert graphs.reason == "" and graphs.num_graphs == 2  # of four updates, and of one
    assert sac.counters.updates == 5 * (30 - 10) // 2
    assert set(owed) == {(DeviceReplay, 5)}


def test_a_replay_in_the_hosts_memory_is_copied_batch_by_batch(tmp_path, owed):
    sac = run(tmp_path, SAC, total_steps=24, data={"on_device": False})
    assert sac.graphs.updates.num_graphs == 1
    assert set(owed) == {(StaticBatches, 1)}


def test_ppo_makes_an_epoch_in_one_batch(tmp_path, owed):
    options = {"num_steps": 20, "num_epochs": 3, "num_minibatches": 5, "max_kl": None}
    ppo = run(tmp_path, PPO, total_steps=80, model=options)
    assert ppo.graphs.updates.num_graphs == 2
    assert ppo.counters.updates == 2 * 3 * 5
    assert owed == [(StaticBatches, 5)] * 6


@pytest.mark.parametrize(
    ("algorithm", "model", "has_noise"),
    [(SAC, {}, False), (SAC, {}, True), (PPO, {"num_steps": 20, "num_minibatches": 5}, False)],
)
def test_a_run_that_acts_by_graphs_is_the_same(tmp_path, monkeypatch, algorithm, model, has_noise):
    def run_in(folder):
        rollout = {"exploration": CorrelatedNoise(0.5)} if has_noise else {}
        return run(tmp_path / folder, algorithm, 80, model=model, rollout=rollout)

    graphed = run_in("graphed")
    assert graphed.graphs.acting.num_graphs == 2  # to explore, and for evaluations
    monkeypatch.setattr(ActingGraphs, "_is_refused", lambda *args: True)
    plain = run_in("plain")
    assert plain.graphs.acting.num_graphs == 0 and plain.graphs.updates.num_graphs > 0
    assert_same(graphed.state_dict(), plain.state_dict())
    assert_same(graphed.generators.state_dict(), plain.generators.state_dict())


def test_a_long_burst_is_made_in_parts(tmp_path, owed, monkeypatch):
    monkeypatch.setattr("mtrl_lightning.run.loop.MOST_AT_ONCE", 3)
    run(tmp_path, SAC, total_steps=12, rollout={"warmup_updates": 7})
    assert [num for _, num in owed] == [3, 3, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "model"),
    [(SAC, {"actor_every": 2}), (PPO, {"num_steps": 20, "num_epochs": 2, "num_minibatches": 5})],
)
def test_a_continued_run_is_the_uninterrupted_one(tmp_path, algorithm, model):
    """In every bit; graphs are recorded again after the first updates of the second part."""
    whole = run(tmp_path / "whole", algorithm, 120, model=model, name="run")
    run(tmp_path / "parts", algorithm, 80, model=model, name="run")
    parts = run(tmp_path / "parts", algorithm, 120, model=model, name="run", ckpt_path="last")
    for one in (whole, parts):
        assert one.graphs.updates.num_graphs > 0
    ends = [last_checkpoint(tmp_path / name) for name in ("whole", "parts")]
    assert "lr" in ends[0]["optimizer_states"][0]["param_groups"][0]
    for end in ends:
        end["MultiTaskData"].pop("replay", None)  # its files are cut where checkpoints were written
    for part in ("state_dict", "optimizer_states", "mtrl_lightning", "MultiTaskData"):
        assert_same(ends[1][part], ends[0][part])


def last_checkpoint(root):
    (path,) = root.rglob("last.ckpt")
    return load_checkpoint(path)


def test_a_checkpoint_has_the_optimizer_as_it_would_be_without_graphs(tmp_path):
    run(tmp_path, SAC, total_steps=20)
    (group,) = last_checkpoint(tmp_path)["optimizer_states"][0]["param_groups"]
    assert group["lr"] == 3e-4 and type(group["lr"]) is float
    assert group["capturable"] is False
    assert group.keys() == make_sac().configure_optimizers()[0].param_groups[0].keys()


def test_stacked_frames_are_drawn_by_the_host(tmp_path):
    data = MultiTaskData(Pixels(ToyReach(2, horizon=5), size=16, frame_stack=2), 8, 40)
    replay = data.open_replay([0, 1], tmp_path, by_graphs=True)
    assert type(replay) is ReplayBuffer and isinstance(replay.storage, FrameStorage)


def test_the_bar_shows_results_at_each_hundred_updates_that_a_batch_passes(tmp_path, monkeypatch):
    shown_at = []

    def latest(session):
        shown_at.append(session.counters.updates)
        return {}

    monkeypatch.setattr(progress, "_latest", latest)
    shown = {"enable_progress_bar": True}
    run(tmp_path, SAC, 18, rollout={"updates_per_step": 30}, trainer=shown)
    assert shown_at == [120, 120]  # of 30, 60, 90 and 120 updates, and at the end


@pytest.mark.slow
def test_a_run_that_ended_within_an_epoch_makes_the_rest_of_it_by_graphs(
    tmp_path, owed, monkeypatch
):
    options = {"num_steps": 20, "num_epochs": 3, "num_minibatches": 5, "max_kl": None}
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        signal_in_call(patch, PPO, "training_step", 7, signal.SIGTERM)
        run(tmp_path, PPO, 40, model={**options, "compile": "none"}, name="run")
    ppo = run(tmp_path, PPO, 40, model=options, name="run", ckpt_path="last")
    assert owed == [(StaticBatches, 3), (StaticBatches, 5)]
    assert ppo.counters.updates == 3 * 5


def test_a_capacity_that_the_device_cannot_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_data, "free_memory", lambda device=None: 2 * 2**20)
    with pytest.raises(
        ConfigurationError,
        match=r"data\.capacity to at most 36,\d{3}, or set data\.on_device to false",
    ):
        run(tmp_path, SAC, data={"capacity": 100_000})
