"""The data: what a user can get wrong, and what a checkpoint holds."""

from __future__ import annotations

import gc
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import IterableDataset

from mtrl_lightning.devices import CPU
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.manifest import EMPTY_MANIFEST
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.run.data import MultiTaskData, manifest_of
from mtrl_lightning.spec import EnvSpec, Field
from tests.helpers.replay import ids_of, make_fields, make_spec, make_transitions


class Numbers(Benchmark):
    """A benchmark whose environments nobody makes."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        raise NotImplementedError


def make_data(num_tasks=3, batch_size=6, capacity=30, **options):
    return MultiTaskData(Numbers(make_spec(num_tasks)), batch_size, capacity, **options)


class Batches(IterableDataset):
    """Stand for the loop of a run, which samples in this way."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        while True:
            yield self.data.buffer.sample(self.data.batch_size)


def trainer_on(device="cpu"):
    """What the data ask a trainer for."""
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))


def opened(data, folder=Path("unused"), device=CPU):
    """Take the memory, as a run does."""
    data.trainer = trainer_on(device)
    tasks = data.spec.train_tasks
    data.open_replay(tasks, folder, device)
    data.session = SimpleNamespace(loop=Batches(data))
    return data


def fill(data, rows=5, folder=Path("unused")):
    opened(data, folder)
    for row in range(rows):
        for env, task in enumerate(data.spec.train_tasks):
            data.buffer.add(make_transitions([1000 * task + row], [task], [env]))
    return data


@pytest.mark.parametrize(("batch_size", "num_tasks"), [(6, 3), (3, 3), (1280, 10), (1, 1)])
def test_a_batch_that_can_be_shared_out_is_taken(batch_size, num_tasks):
    assert make_data(num_tasks, batch_size, 10_000).batch_size == batch_size


def test_the_shares_are_those_of_the_trained_tasks():
    assert make_data(3, 8, 30, exclude_from_training=["task-1"]).batch_size == 8


@pytest.mark.parametrize(
    ("excluded", "trained"),
    [(None, (0, 1, 2)), ([], (0, 1, 2)), (["task-1"], (0, 2)), (["task-2", "task-0"], (1,))],
)
def test_the_spec_says_which_tasks_are_trained_and_keeps_all_names(excluded, trained):
    spec = make_data(exclude_from_training=excluded).spec
    assert spec.train_tasks == trained
    assert spec.task_names == ("task-0", "task-1", "task-2")


@pytest.mark.parametrize("stage", [TrainerFn.FITTING, TrainerFn.VALIDATING, TrainerFn.TESTING])
def test_no_memory_is_taken_before_the_driver_opens_the_replay(stage):
    data = make_data()
    data.setup(stage)
    assert data.buffer is None
    assert data.state_dict() == {}
    data.load_state_dict({"replay": {}, "buffer": {}})
    assert data.manifest is None
    opened(data)
    assert data.buffer is not None


@pytest.mark.parametrize(("envs_per_task", "rows"), [(1, 10), (2, 5), (3, 3)])
def test_the_replay_has_a_ring_for_each_environment(envs_per_task, rows):
    data = make_data()
    tasks = np.repeat(data.spec.train_tasks, envs_per_task).tolist()
    buffer = data.open_replay(tasks, Path("unused"))
    assert buffer is data.buffer
    assert (buffer.storage.num_envs, buffer.storage.capacity) == (3 * envs_per_task, rows)


def test_what_the_replay_needs_is_printed_with_the_policys_fields(caplog):
    data = make_data(capacity=100_000)
    fields = (Field("log_prob"), Field("hidden", (100,)))
    with caplog.at_level("INFO"):
        buffer = data.open_replay([0, 1, 2], Path("unused"), CPU, fields)
    # 99,999 transitions of 37 + 4 + 400 bytes
    assert "Replay of 99,999 transitions: 42 MiB of memory of cpu when full" in caplog.text
    assert [field.name for field in buffer.storage.fields[-2:]] == ["log_prob", "hidden"]


def test_training_batches_are_of_the_size_asked_for_and_do_not_end():
    data = fill(make_data(exclude_from_training=["task-1"]))
    batches = list(islice(data.train_dataloader(), 50))
    assert all(batch.task_Rn.tolist() == [[0] * 3, [2] * 3] for batch in batches)
    assert {len(ids_of(batch)) for batch in batches} == {6}


def test_the_seed_decides_the_batches():
    def drawn(seed):
        return [
            ids_of(batch).tolist()
            for batch in islice(fill(make_data(seed=seed)).train_dataloader(), 5)
        ]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_there_is_one_validation_batch_unless_fitting():
    data = make_data()
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    assert data.val_dataloader() == []
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    assert len(list(data.val_dataloader())) == 1


@pytest.mark.parametrize("memory_map", [False, True])
def test_a_restored_replay_gives_the_batches_that_would_have_been(tmp_path, memory_map):
    data, snapshots = fill(make_data()), ReplaySnapshots(tmp_path / "replay")
    list(islice(data.train_dataloader(), 3))
    data.manifest = snapshots.save(data.buffer.storage)
    torch.save(data.state_dict(), tmp_path / "state")
    wanted = [ids_of(batch).tolist() for batch in islice(data.train_dataloader(), 5)]

    resumed = opened(make_data(seed=99, memory_map=memory_map), tmp_path)
    state = torch.load(tmp_path / "state", weights_only=True)
    manifest = manifest_of({MultiTaskData.__qualname__: state})
    assert manifest["added"] == [5, 5, 5] and [c["file"] for c in manifest["chunks"]] == os.listdir(
        tmp_path / "replay"
    )
    resumed.load_state_dict(state)
    assert resumed.manifest == manifest
    ReplaySnapshots(tmp_path / "replay").load(resumed.manifest, resumed.buffer.storage)
    assert len(resumed.buffer) == 15
    assert [ids_of(batch).tolist() for batch in islice(resumed.train_dataloader(), 5)] == wanted


def test_a_replay_that_was_never_saved_has_no_manifest():
    data, resumed = fill(make_data()), fill(make_data())
    assert data.state_dict()["replay"] is None
    resumed.manifest = EMPTY_MANIFEST
    resumed.load_state_dict(data.state_dict())
    assert resumed.manifest is None


@pytest.mark.parametrize(
    ("device", "options", "free", "kept_on"),
    [
        ("cpu", {}, 10_000, "cpu"),
        ("cuda", {}, 6_000, "cuda"),
        ("cuda", {}, 5_999, "cpu"),
        ("cuda", {"on_device": False}, 10_000, "cpu"),
        ("cuda", {"memory_map": True}, 10_000, "cpu"),
    ],
)
def test_the_replay_lies_on_the_device_that_trains_if_it_takes_at_most_half_of_what_is_free(
    tmp_path, monkeypatch, device, options, free, kept_on
):
    data = make_data(capacity=3_000, **options)
    available = {"cuda": bytes_needed(make_fields(), free), "cpu": 10**12}
    monkeypatch.setattr("mtrl_lightning.run.data.free_memory", lambda asked: available[asked.type])
    made = []
    monkeypatch.setattr(
        "mtrl_lightning.run.data.ReplayBuffer", lambda *_, **given: made.append(given)
    )
    data.open_replay(data.spec.train_tasks, tmp_path, torch.device(device))
    assert made[0]["device"] == torch.device(kept_on)
    assert made[0]["folder"] == (tmp_path if options.get("memory_map") else None)


def test_batches_on_their_way_to_a_gpu_are_not_pinned():
    data = fill(make_data())
    data.trainer = trainer_on("cuda")
    assert not data.train_dataloader().pin_memory


def maps_of(folder):
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="this system does not list mapped files"
)
@pytest.mark.parametrize("memory_map", [False, True])
def test_the_replay_is_mapped_from_a_file_in_the_runs_folder_if_that_is_asked_for(
    tmp_path, memory_map
):
    data = fill(make_data(memory_map=memory_map), folder=tmp_path)
    assert bool(maps_of(tmp_path)) == memory_map
    assert os.listdir(tmp_path) == [], "it vanishes with the process, also a killed one"
    assert {len(ids_of(batch)) for batch in islice(data.train_dataloader(), 5)} == {6}
    del data
    gc.collect()
    assert not maps_of(tmp_path)


@pytest.mark.parametrize(
    "checkpoint",
    [
        {},
        {"MultiTaskData": {}},
        {"MultiTaskData": {"replay": None}},
        {"MultiTaskData": {"replay": {}}},
    ],
)
def test_a_checkpoint_without_a_replay_lists_no_files(checkpoint):
    assert manifest_of(checkpoint) == EMPTY_MANIFEST
