"""Episodes of a replay in Minari's data sets, compared with those that the collector saw."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch

from mtrl_lightning.counters import Counters
from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.replay import episodes, export_to_minari
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.rollout import Collector
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.saved import FORMAT
from mtrl_lightning.saved_spec import describe_spec
from tests.helpers.altered_reach import OnceFaulty
from tests.helpers.fakes import Scripted, Uniform


class Seen(NamedTuple):
    """An episode, or a part of one, as the collector saw it."""

    env: int
    task: int
    observations: list
    actions: list
    rewards: list
    terminated: bool


class Recorded:
    """A replay, and the episodes that were added to it."""

    def __init__(self, benchmark, tasks, num_steps, capacity):
        envs = VectorEnv(benchmark, tasks, seed=3, num_workers=0, max_restarts=5)
        self.spec = benchmark.spec
        self.collector = Collector(envs, Uniform(2, seed=0))
        self.buffer = ReplayBuffer(self.spec, capacity * len(tasks), tasks=tasks)
        self.seen: list[Seen] = []
        running: dict[int, Seen] = {}
        for _ in range(num_steps):
            transitions, _ = self.collector.step("explore")
            self.buffer.add(transitions)
            for env in set(running) - set(transitions.env_E.tolist()):
                self.seen.append(running.pop(env))  # it was rebuilt
            for row, env in enumerate(transitions.env_E.tolist()):
                task = int(transitions.task_E[row])
                one = running.setdefault(env, Seen(env, task, [], [], [], False))
                one.observations.append(transitions.observation_ED[row])
                one.actions.append(transitions.action_EA[row])
                one.rewards.append(transitions.reward_E[row])
                is_terminated = bool(transitions.terminated_E[row])
                if is_terminated or transitions.truncated_E[row]:
                    one.observations.append(transitions.next_observation_ED[row])
                    self.seen.append(running.pop(env)._replace(terminated=is_terminated))
        self.seen += running.values()
        envs.close()

    def kept(self):
        """Return the seen episodes that the rings hold from their start on, by ring."""
        storage = self.buffer.storage
        kept = {env: [] for env in range(storage.num_envs)}
        for env, episodes_of_ring in kept.items():
            number = 0
            for one in [one for one in self.seen if one.env == env]:
                if number >= storage.added_E[env] - storage.size_E[env]:
                    episodes_of_ring.append((number, one))
                number += len(one.rewards)
        return kept

    def save(self, folder):
        """Write what a run leaves of its replay; return the run's folder."""
        run = folder / "try" / "version_0"
        (run / "checkpoints").mkdir(parents=True)
        counters = Counters(env_steps=self.collector.counters.env_steps)
        content = {
            "mtrl_lightning": {
                "format": FORMAT,
                "spec": describe_spec(self.spec),
                "algorithm": {"class_path": "mtrl_lightning.algorithms.SAC"},
                "counters": counters.state_dict(),
            },
            MultiTaskData.__qualname__: {
                "replay": ReplaySnapshots(run / "replay").save(self.buffer.storage)
            },
        }
        torch.save(content, run / "checkpoints" / "last.ckpt")
        return run


def assert_same(found, seen):
    assert found.length == len(seen.rewards)
    np.testing.assert_array_equal(
        found.observation[: len(seen.observations)], np.array(seen.observations, np.float32)
    )
    np.testing.assert_array_equal(found.action, np.array(seen.actions))
    np.testing.assert_array_equal(found.reward, np.array(seen.rewards, np.float32))
    assert found.terminated == seen.terminated


@pytest.mark.parametrize("capacity", [100, 11])
@pytest.mark.parametrize(
    ("benchmark", "tasks"), [(Scripted(2), [0, 1, 1]), (OnceFaulty(step=7), [0, 1, 2])]
)
def test_episodes_are_those_that_the_collector_saw(benchmark, tasks, capacity):
    recorded = Recorded(benchmark, tasks, 24, capacity)
    storage = recorded.buffer.storage
    assert (storage.size_E < storage.added_E).any() == (capacity == 11)
    assert (recorded.collector.counters.dropped_transitions > 0) == isinstance(
        benchmark, OnceFaulty
    )
    for env, kept in recorded.kept().items():
        found = list(episodes(storage, env, benchmark.spec.horizon, has_all=True))
        oldest = storage.added_E[env] - storage.size_E[env]
        # the oldest part is left out, also where an episode happens to start with it
        kept = [(number, one) for number, one in kept if number > oldest or oldest == 0]
        assert [one.first for one in found] == [number for number, _ in kept]
        assert sum(one.length for one in found) == storage.added_E[env] - found[0].first
        for one, (_, seen) in zip(found, kept, strict=True):
            assert_same(one, seen)


def test_episodes_that_end_where_they_start_are_separated_by_the_horizon():
    recorded = Recorded(Scripted(1), [0], 1, 20)
    storage = recorded.buffer.storage
    row = storage.take(*storage.numbers(0, 0, 1))
    row["next_observation"] = row["observation"]
    again = ReplayBuffer(recorded.spec, 20).storage
    for number in range(8):
        row["terminated"] = torch.tensor([number == 1])
        again.add(np.array([0]), row)
    found = list(episodes(again, 0, 3, has_all=True))
    assert [(one.length, one.terminated) for one in found] == [(2, True), (3, False), (3, False)]
    # what the first one began with is not known
    unknown = list(episodes(again, 0, 3, has_all=False))
    assert [(one.first, one.length) for one in unknown] == [(2, 3), (5, 3)]


def test_minari_reads_the_episodes_of_each_task(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    recorded = Recorded(Scripted(2), [0, 0, 1, 1], 24, 15)
    run = recorded.save(tmp_path)
    folder, exported = export_to_minari(run)
    assert folder == run / "export" / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    assert sorted(minari.list_local_datasets()) == [one.dataset_id for one in exported]
    storage = recorded.buffer.storage
    for task, one in enumerate(exported):
        assert one.dataset_id == f"try/version_0/task-{task}-v0"
        data = minari.load_dataset(one.dataset_id)
        assert data.observation_space.shape == (4,) and data.action_space.shape == (2,)
        expected = [
            found
            for env in (2 * task, 2 * task + 1)
            for found in episodes(storage, env, recorded.spec.horizon, has_all=True)
        ]
        expected.sort(key=lambda found: found.first)
        read = list(data.iterate_episodes())
        assert len(read) == len(expected) == one.num_episodes == data.total_episodes
        assert data.total_steps == one.num_steps
        assert 0 < one.num_steps <= int(storage.size_E[[2 * task, 2 * task + 1]].sum())
        for episode, wanted in zip(read, expected, strict=True):
            np.testing.assert_array_equal(episode.observations, wanted.observation)
            np.testing.assert_array_equal(episode.actions, wanted.action)
            np.testing.assert_array_equal(episode.rewards, wanted.reward)
            # odd tasks terminate, and only the last step ends an episode
            assert episode.terminations.sum() == wanted.terminated <= task
            assert episode.terminations[-1] or episode.truncations[-1]
            assert episode.terminations.sum() + episode.truncations.sum() == 1
        assert any(wanted.terminated for wanted in expected) == bool(task)
    with pytest.raises(ConfigurationError, match=r"version_0 exists: delete it, or give another"):
        export_to_minari(run)


def test_observations_and_actions_have_the_tasks_own_size(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    recorded = Recorded(Scripted(2), [0, 1], 12, 50)
    recorded.spec = recorded.spec._replace(observation_sizes=(4, 3), action_sizes=(1, 2))
    monkeypatch.chdir(tmp_path)
    _, exported = export_to_minari(recorded.save(tmp_path), "own")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "own"))
    small, large = (minari.load_dataset(one.dataset_id) for one in exported)
    assert small.observation_space.shape == (4,) and small[0].actions.shape[1:] == (1,)
    assert large.observation_space.shape == (3,) and large[0].observations.shape[1:] == (3,)


def test_what_cannot_be_exported(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    recorded = Recorded(Scripted(1), [0], 12, 2)
    run = recorded.save(tmp_path)
    with pytest.raises(ConfigurationError, match="has no episode with its start: it holds 2"):
        export_to_minari(run)
    assert list((run / "export" / "minari").iterdir()) == []
    (chunk,) = (run / "replay").iterdir()
    chunk.unlink()
    with pytest.raises(ConfigurationError, match=r"1 of the 1 replay files .* were deleted"):
        export_to_minari(run)
    path = run / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content[MultiTaskData.__qualname__]["replay"] = None
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match="has no replay: on-policy algorithms"):
        export_to_minari(run)
    monkeypatch.setitem(__import__("sys").modules, "minari", None)
    message = re.escape('minari is not installed: pip install "mtrl_lightning[minari]"')
    with pytest.raises(ConfigurationError, match=message):
        export_to_minari(run)
