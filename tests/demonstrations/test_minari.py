"""Episodes as Minari data sets: read back as they were written, complete or absent."""

import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning.demonstrations import (
    RecordedEpisode,
    UniformPolicy,
    collect,
    open_data_sets,
    write_data_sets,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.replay import export_to_minari
from tests.helpers.algorithms import make_spec
from tests.helpers.demonstrations import read_episodes
from tests.helpers.fakes import Costly, Scripted
from tests.helpers.recorded import Recorded

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")

SHAPES = [(3,), (5,), (2, 4, 4), (3, 40, 40)]
"""Of observations; Minari takes uint8 of the last one as an image."""


def random_rows(rng, num_rows, shape, dtype):
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=(num_rows, *shape)).astype(dtype)
    return rng.integers(0, 2 if dtype == "bool" else 256, (num_rows, *shape)).astype(dtype)


def random_episode(rng, num_steps, observation, reward_type, infos):
    """Return an episode of random numbers.

    Args:
        rng: of the numbers.
        num_steps: number of steps.
        observation: shape and type.
        reward_type: of the rewards.
        infos: shape and type of each column by name.
    """
    is_last_N = np.arange(num_steps) == num_steps - 1
    is_terminated = bool(rng.integers(2))
    return RecordedEpisode(
        random_rows(rng, num_steps + 1, *observation),
        random_rows(rng, num_steps, (2,), "float32"),
        random_rows(rng, num_steps, (), reward_type),
        is_last_N & is_terminated,
        is_last_N & (not is_terminated),
        {name: random_rows(rng, num_steps, *column) for name, column in infos.items()},
        int(rng.integers(2**31)),
    )


def assert_equal(found, expected):
    """Compare two episodes bit by bit."""
    assert found.seed == expected.seed and found.infos.keys() == expected.infos.keys()
    pairs = [*zip(found[:5], expected[:5], strict=True)]
    pairs += [(found.infos[name], column) for name, column in expected.infos.items()]
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(10))
def test_episodes_are_read_as_they_were_written(tmp_path, seed):
    rng = np.random.default_rng(seed)
    shape = SHAPES[rng.integers(len(SHAPES))]
    dtype = str(rng.choice(["float32", "float64", "uint8"]))
    limits = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
    spec = make_spec(3)._replace(observation_space=Box(*limits, shape, np.dtype(dtype).type))
    possible = {
        "success": ((), "bool"),
        "policy_action": ((2,), "float32"),
        "cost": ((), "float64"),
        "grid": ((2, 3), "int64"),
    }
    infos = {name: column for name, column in possible.items() if rng.integers(2)}
    reward_type = str(rng.choice(["float32", "float64"]))
    written = {
        name: [
            random_episode(rng, int(rng.integers(1, 9)), (shape, dtype), reward_type, infos)
            for _ in range(rng.integers(1, 5))
        ]
        for name in spec.task_names[:2]
    }
    facts = {"policy": "by hand", "attempts": {"task-0": 3}}
    write_data_sets(tmp_path / "new" / "sets", spec, {**written, spec.task_names[2]: []}, facts)
    data_sets = open_data_sets(tmp_path / "new" / "sets")
    assert data_sets.keys() == written.keys(), "a task without an episode has no data set"
    for name, data_set in data_sets.items():
        assert data_set.spec == spec and facts.items() <= data_set.facts.items()
        assert data_set.facts["versions"]["numpy"] == np.__version__
        assert data_set.lengths == [one.num_steps for one in written[name]]
        assert data_set.info_shapes == {info: column[0] for info, column in infos.items()}
        for found, expected in zip(data_set.episodes(), written[name], strict=True):
            assert_equal(found, expected)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sets"]


def test_minari_reads_the_data_sets(tmp_path, monkeypatch):
    benchmark = Costly(2)
    collected = collect(
        UniformPolicy(benchmark.spec), benchmark, 3, split="eval", noise=0.1, num_workers=0
    )
    monkeypatch.chdir(tmp_path)
    write_data_sets("sets", benchmark.spec, collected.episodes, {"policy": "random"})
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    assert sorted(minari.list_local_datasets()) == ["task-0-v0", "task-1-v0"]
    data = minari.load_dataset("task-1-v0")
    assert data.storage.metadata["algorithm_name"] == "random"
    assert [len(one) for one in data] == [1, 4, 2]
    for episode, expected in zip(data, collected.episodes["task-1"], strict=True):
        np.testing.assert_array_equal(episode.observations, expected.observations)
        np.testing.assert_array_equal(episode.actions, expected.actions)
        np.testing.assert_array_equal(episode.rewards, expected.rewards)
        # Minari has an entry of the reset, too
        for name in ("success", "policy_action", "cost"):
            np.testing.assert_array_equal(episode.infos[name][1:], expected.infos[name])
    seeds = [one["seed"] for one in data.storage.get_episode_metadata(range(3))]
    assert seeds == [one.seed for one in collected.episodes["task-1"]] == [0, 1, 2]


def test_an_exported_replay_is_read_in_each_tasks_own_size(tmp_path):
    recorded = Recorded(Scripted(2), [0, 1], 12, 50)
    recorded.spec = recorded.spec._replace(observation_sizes=(4, 3), action_sizes=(1, 2))
    folder, exported = export_to_minari(recorded.save(tmp_path))
    data_sets = open_data_sets(folder)
    for task, (name, data_set) in enumerate(data_sets.items()):
        assert data_set.spec == recorded.spec and not data_set.info_shapes
        assert data_set.facts["policy"] == "SAC"
        for found, episode in zip(data_set.episodes(), exported[name], strict=True):
            size, action_size = recorded.spec.observation_sizes[task], task + 1
            own_size = episode._replace(
                observations=episode.observations[:, :size],
                actions=episode.actions[:, :action_size],
            )
            assert_equal(found, own_size)


def test_equal_minari_names_get_separate_data_sets(tmp_path):
    names = ("walk 0.5", "walk_0_5", "walk")
    spec = make_spec(3)._replace(task_names=names)
    rng = np.random.default_rng(0)
    written = {name: [random_episode(rng, 3, ((4,), "float32"), "float32", {})] for name in names}
    write_data_sets(tmp_path / "sets", spec, written, {})
    assert {path.name for path in (tmp_path / "sets").iterdir()} == {
        "walk_0_5-v0",
        "walk_0_5-v1",
        "walk-v0",
    }
    for name, (episode,) in read_episodes(tmp_path / "sets").items():
        assert_equal(episode, written[name][0])


@pytest.fixture
def written(tmp_path):
    """Write two tasks' data sets; return their folder."""
    benchmark = Scripted(2)
    policy = UniformPolicy(benchmark.spec)
    collected = collect(policy, benchmark, 3, split="eval", num_workers=0)
    write_data_sets(tmp_path / "sets", benchmark.spec, collected.episodes, {})
    return tmp_path / "sets"


def test_a_folder_that_exists_is_not_written_to(tmp_path, written):
    before = sorted(written.rglob("*"))
    spec = Scripted(2).spec
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in (written, tmp_path, tmp_path / "link"):
        with pytest.raises(ConfigurationError, match="exists"):
            write_data_sets(folder, spec, read_episodes(written), {})
    assert sorted(written.rglob("*")) == before
    assert {path.name for path in tmp_path.iterdir()} == {"sets", "link"}


def test_nothing_is_left_of_an_unfinished_write(tmp_path, written, monkeypatch):
    episodes = read_episodes(written)
    update = h5py.Group.create_dataset
    calls = []

    def full(*args, **options):
        calls.append(args)
        if len(calls) == 20:
            raise OSError("the disk is full")
        return update(*args, **options)

    monkeypatch.setattr(h5py.Group, "create_dataset", full)
    with pytest.raises(OSError, match="full"):
        write_data_sets(tmp_path / "new", Scripted(2).spec, episodes, {})
    assert [path.name for path in tmp_path.iterdir()] == ["sets"]
