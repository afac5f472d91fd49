"""Demonstrations as a replay: matched by name, sampled equally over the tasks, recognized."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.demonstrations import collection, read_collection, write_collection
from mtrl_lightning.devices import CPU
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import trained_spec
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.run.demonstrations import load_demonstrations
from tests.helpers.algorithms import make_spec, pixel_spec
from tests.helpers.demonstrations import write_demonstrations

MIB = 2**20
NAMES = ("far", "near", "between")
LENGTHS = [3, 9, 1, 2]
TASKS = [1, 0, 1, 2]
"""Of the episodes."""


def columns_of(spec):
    """Return episodes whose numbers tell their task and row; the second's action is too large."""
    rng = np.random.default_rng(0)
    task_N = np.repeat(TASKS, LENGTHS)
    is_last_N = np.zeros(sum(LENGTHS), np.bool_)
    is_last_N[np.cumsum(LENGTHS) - 1] = True
    observation_ND = rng.normal(size=(len(task_N), *spec.observation_space.shape))
    observation_ND[:, 0] = 10 * task_N
    observation_ND *= spec.observation_mask_TD[task_N]
    action_NA = rng.uniform(-1, 1, (len(task_N), *spec.action_space.shape))
    action_NA *= spec.action_mask_TA[task_N]
    action_NA[1, 0] = 3.0
    return {
        "observation": observation_ND,
        "action": action_NA,
        "reward": task_N + 0.5,
        "next_observation": -observation_ND,
        "terminated": is_last_N,
        "truncated": np.zeros_like(is_last_N),
        "success": is_last_N,
        "task": task_N,
        "episode": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }


SPEC = make_spec(3, 4, 2)._replace(
    task_names=NAMES, observation_sizes=(4, 3, 2), action_sizes=(2, 1, 2)
)


@pytest.fixture
def written(tmp_path):
    write_collection(tmp_path / "demonstrations", SPEC, columns_of(SPEC), {})
    return str(tmp_path / "demonstrations")


def held(replay, ring):
    """Return the columns of a ring, in their order."""
    size = int(replay.storage.size_E[ring])
    return replay.storage.take(*replay.storage.numbers(ring, 0, size))


def test_tasks_are_matched_by_name_and_padded_as_they_are_here(written):
    # fewer tasks, in another order, whose largest is smaller: less padding
    spec = make_spec(2, 3, 2)._replace(
        task_names=("between", "near"), observation_sizes=(2, 3), action_sizes=(2, 1)
    )
    replay, identity = load_demonstrations(written, spec, 0, CPU)
    columns = columns_of(SPEC)
    assert identity["transitions"] == {"between": 2, "near": 4}
    for ring, task in enumerate([2, 1]):
        rows_N = np.flatnonzero(columns["task"] == task)
        found = held(replay, ring)
        for name, size in (("observation", 3), ("next_observation", 3), ("action", 2)):
            expected = torch.from_numpy(columns[name][rows_N, :size]).float()
            if name == "action":
                expected = expected.clamp(-1, 1)
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
        assert found["reward"].tolist() == [task + 0.5] * len(rows_N)
        assert found["terminated"].tolist() == columns["terminated"][rows_N].tolist()
    assert held(replay, 1)["action"][1, 0] == 1.0, "clipped as in the environment"
    wider = SPEC._replace(
        observation_space=make_spec(3, 6).observation_space,
        action_space=make_spec(3, 6, 5).action_space,
    )
    replay, _ = load_demonstrations(written, wider, 0, CPU)
    assert held(replay, 0)["observation"].shape == (9, 6)
    assert not held(replay, 0)["observation"][:, 4:].any()
    assert not held(replay, 0)["action"][:, 2:].any()


def test_batches_have_the_same_number_of_rows_of_every_trained_task(written):
    spec = SPEC._replace(train_tasks=(0, 2))
    replay, identity = load_demonstrations(written, spec, 0, CPU)
    assert identity["transitions"] == {"far": 9, "between": 2}
    counts = {}
    for _ in range(300):
        batch = replay.sample(8)
        assert batch.task_Rn.tolist() == [[0] * 4, [2] * 4]
        assert batch.observation_RnD[..., 0].tolist() == [[0] * 4, [20] * 4]
        for row in batch.observation_RnD[1, :, 1].tolist():
            counts[row] = counts.get(row, 0) + 1
    # the short task's two transitions, each with probability 1/2: four standard deviations
    assert sum(counts.values()) == 1200 and len(counts) == 2
    assert all(abs(count - 600) < 4 * np.sqrt(1200 / 4) for count in counts.values())


def test_what_the_demonstrator_chose_is_in_the_batches(tmp_path):
    folder = write_demonstrations(tmp_path / "noisy", num_episodes=2, noise=0.3)
    replay, _ = load_demonstrations(str(folder), ToyReach().spec, 0, CPU)
    batch = replay.sample(60)
    columns = read_collection(folder).columns
    pairs = [columns["action"], columns["policy_action"]]
    known = {tuple(row) for row in np.concatenate(pairs, axis=1).tolist()}
    pairs = [batch.action_RnA, batch.extra["policy_action"]]
    assert {tuple(row) for row in torch.cat(pairs, -1).flatten(0, 1).tolist()} <= known
    assert not torch.equal(*pairs)


def data_of(folder, **options):
    return MultiTaskData(ToyReach(), 12, demonstrations=str(folder), **options)


def test_sampling_continues_from_its_state_with_the_same_demonstrations_alone(tmp_path):
    folder = write_demonstrations(tmp_path / "one", num_episodes=2)
    data = data_of(folder)
    data.open_demonstrations()
    data.buffer.sample(12)
    state = data.state_dict()
    expected = data.buffer.sample(12)
    (tmp_path / "one").rename(tmp_path / "moved")
    moved = data_of(tmp_path / "moved")
    moved.open_demonstrations()
    moved.load_state_dict(state)
    assert torch.equal(moved.buffer.sample(12).observation_RnD, expected.observation_RnD)
    other = data_of(write_demonstrations(tmp_path / "other", num_episodes=2, seed=1))
    other.open_demonstrations()
    message = (
        r"data\.demonstrations has other transitions than .* \(120 with checksum .* there, 120 with"
    )
    with pytest.raises(ConfigurationError, match=message):
        other.load_state_dict(state)
    gone = data_of(folder)
    with pytest.raises(ConfigurationError, match="one is no collection"):
        gone.open_demonstrations()


def test_an_excluded_task_needs_no_demonstrations(tmp_path):
    columns = columns_of(SPEC)
    is_kept_N = columns["task"] != 2
    columns = {name: column[is_kept_N] for name, column in columns.items()}
    write_collection(tmp_path / "two", SPEC, columns, {})
    with pytest.raises(ConfigurationError, match="has no episode of between"):
        load_demonstrations(str(tmp_path / "two"), SPEC, 0, CPU)
    load_demonstrations(str(tmp_path / "two"), SPEC._replace(train_tasks=(0, 1)), 0, CPU)


def test_the_demonstrations_are_of_the_benchmark(tmp_path):
    folder = write_demonstrations(tmp_path / "toy", num_episodes=1)
    spec = trained_spec(ToyReach(horizon=7), None)
    assert len(load_demonstrations(str(folder), spec, 0, CPU)[0]) == 60, "another horizon may be"
    other = spec._replace(protocol={**spec.protocol, "benchmark": "other"})
    with pytest.raises(ConfigurationError, match="has benchmark toy, and the benchmark that is"):
        load_demonstrations(str(folder), other, 0, CPU)


def images_of(lengths):
    """Return a benchmark's tasks and the columns of episodes whose frames are all different."""
    stack = 3
    spec = pixel_spec(1, 2, stack)._replace(frame_stack=stack, horizon=max(lengths))
    parts = []
    rng = np.random.default_rng(0)
    _, *frame = spec.observation_space.shape
    for steps in lengths:
        frame_N = rng.integers(0, 255, (steps + 1, *frame), np.uint8)
        padded = np.concatenate([frame_N[:1]] * (stack - 1) + [frame_N])
        parts.append(np.stack([padded[i : i + stack] for i in range(steps + 1)]))
    is_last_N = np.concatenate([np.arange(steps) == steps - 1 for steps in lengths])
    return spec, {
        "observation": np.concatenate([stacks[:-1] for stacks in parts]),
        "action": rng.uniform(-1, 1, (sum(lengths), *spec.action_space.shape)),
        "reward": np.zeros(sum(lengths)),
        "next_observation": np.concatenate([stacks[1:] for stacks in parts]),
        "terminated": is_last_N,
        "truncated": np.zeros_like(is_last_N),
        "success": is_last_N,
        "task": np.zeros(sum(lengths), np.int64),
        "episode": np.repeat(np.arange(len(lengths)), lengths),
    }


def write_in_files_of(num_bytes, folder, spec, columns):
    """Write a collection with files of so many bytes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            collection, "ReplaySnapshots", partial(ReplaySnapshots, chunk_mebibytes=num_bytes / MIB)
        )
        write_collection(folder, spec, columns, {})
    return list((folder / "replay").iterdir())


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_demonstrations_in_many_files_are_those_in_one(tmp_path, kind):
    spec, columns = (SPEC, columns_of(SPEC)) if kind == "vectors" else images_of([2, 9, 4, 7])
    write_collection(tmp_path / "one", spec, columns, {})
    row_bytes = sum(np.asarray(column[0]).nbytes for column in columns.values())
    files = write_in_files_of(2.5 * row_bytes, tmp_path / "many", spec, columns)
    assert len(files) > 3, "episodes go on from one file to the next"
    expected, found = (read_collection(tmp_path / name) for name in ("one", "many"))
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name], column)
    expected, found = (
        load_demonstrations(str(tmp_path / name), spec, 0, CPU) for name in ("one", "many")
    )
    assert found[1] == expected[1]
    for ring in range(spec.num_tasks):
        rows = held(found[0], ring)
        for name, column in held(expected[0], ring).items():
            assert torch.equal(rows[name], column)


def test_demonstrations_are_loaded_file_by_file(tmp_path):
    num_rows = 40_000
    columns = {
        name: np.resize(column, (num_rows, *column.shape[1:]))
        for name, column in columns_of(SPEC).items()
    }
    columns["terminated"] = np.ones(num_rows, np.bool_)
    columns["episode"] = np.arange(num_rows)
    files = write_in_files_of(MIB / 8, tmp_path / "large", SPEC, columns)
    load_demonstrations(str(tmp_path / "large"), SPEC, 0, CPU)  # imports
    tracemalloc.start()
    try:
        replay, _ = load_demonstrations(str(tmp_path / "large"), SPEC, 0, CPU)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held_bytes = sum(column.nbytes for ring in range(3) for column in held(replay, ring).values())
    # tensors are not traced: what is, is a file and what is made of its rows
    assert 8 * max(path.stat().st_size for path in files) > peak < held_bytes / 2


def test_images_of_episodes_shorter_than_the_horizon_are_all_held(tmp_path):
    spec, columns = images_of([2] * 20 + [40])
    write_collection(tmp_path / "images", spec, columns, {})
    replay, identity = load_demonstrations(str(tmp_path / "images"), spec, 0, CPU)
    assert len(replay) == identity["transitions"][spec.task_names[0]] == 80
    found = held(replay, 0)
    for name in ("observation", "next_observation"):
        assert torch.equal(found[name], torch.from_numpy(columns[name]))


def test_episodes_of_another_split_are_a_warning(tmp_path, recwarn):
    for split in ("train", "eval"):
        write_collection(tmp_path / split, SPEC, columns_of(SPEC), {"split": split})
    load_demonstrations(str(tmp_path / "train"), SPEC, 0, CPU, "train")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="are episodes of the split eval, which is not trained in"):
        load_demonstrations(str(tmp_path / "eval"), SPEC, 0, CPU, "train")
    toy = read_collection(write_demonstrations(tmp_path / "toy", num_episodes=1))
    write_collection(tmp_path / "test", toy.spec, toy.columns, {"split": "eval"})
    with pytest.warns(UserWarning, match="Collect those of train"):
        data_of(tmp_path / "test").open_demonstrations()


def test_without_demonstrations_the_option_is_named():
    with pytest.raises(ConfigurationError, match=r"data\.demonstrations is missing"):
        MultiTaskData(ToyReach()).open_demonstrations()
