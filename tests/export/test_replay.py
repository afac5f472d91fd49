"""Episodes of a replay in Minari's data sets, compared with those that the collector saw."""

import numpy as np
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.replay import episodes, export_to_minari
from mtrl_lightning.replay import ReplayBuffer
from tests.helpers.altered_reach import OnceFaulty
from tests.helpers.fakes import Scripted
from tests.helpers.recorded import Recorded


@pytest.mark.parametrize("capacity", [100, 11])
@pytest.mark.parametrize(
    ("benchmark", "tasks"), [(Scripted(2), [0, 1, 1]), (OnceFaulty(step=7), [0, 1, 2])]
)
def test_episodes_are_those_that_the_collector_saw(benchmark, tasks, capacity):
    recorded = Recorded(benchmark, tasks, 24, capacity)
    storage = recorded.buffer.storage
    assert (storage.size_E < storage.added_E).any() == (capacity == 11)
    is_faulty = recorded.collector.counters.dropped_transitions > 0
    assert is_faulty == isinstance(benchmark, OnceFaulty)
    for env, kept in recorded.kept().items():
        found = list(episodes(storage, env, benchmark.spec.horizon, has_all=True))
        oldest = storage.added_E[env] - storage.size_E[env]
        # the oldest part is left out, also where an episode happens to start with it
        kept = [(number, one) for number, one in kept if number > oldest or oldest == 0]
        assert [number for number, _ in found] == [number for number, _ in kept]
        num_steps = sum(one.num_steps for _, one in found)
        assert num_steps == storage.added_E[env] - found[0][0]
        for (_, one), (_, seen) in zip(found, kept, strict=True):
            assert one.num_steps == len(seen.rewards)
            seen_ND = np.array(seen.observations, np.float32)
            np.testing.assert_array_equal(one.observations[: len(seen_ND)], seen_ND)
            np.testing.assert_array_equal(one.actions, np.array(seen.actions))
            np.testing.assert_array_equal(one.rewards, np.array(seen.rewards, np.float32))
            assert not (one.terminations | one.truncations)[:-1].any()
            assert one.terminations[-1] == seen.terminated == (not one.truncations[-1])


def test_horizon_separates_episodes_that_end_where_they_start():
    recorded = Recorded(Scripted(1), [0], 1, 20)
    storage = recorded.buffer.storage
    row = storage.take(*storage.numbers(0, 0, 1))
    row["next_observation"] = row["observation"]
    again = ReplayBuffer(recorded.spec, 20).storage
    for number in range(9):
        row["terminated"] = torch.tensor([number == 1])
        again.add(np.array([0]), row)
    found = list(episodes(again, 0, 3, has_all=True))
    ends = [(one.num_steps, one.terminations[-1]) for _, one in found]
    assert ends == [(2, True), (3, False), (3, False), (1, False)]
    # the start of the first episode is not known
    unknown = list(episodes(again, 0, 3, has_all=False))
    assert [(first, one.num_steps) for first, one in unknown] == [(2, 3), (5, 3), (8, 1)]


def test_minari_reads_the_episodes_of_each_task(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    recorded = Recorded(Scripted(2), [0, 0, 1, 1], 24, 15)
    run = recorded.save(tmp_path)
    folder, exported = export_to_minari(run)
    assert folder == run / "export" / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    assert sorted(minari.list_local_datasets()) == ["task-0-v0", "task-1-v0"]
    storage = recorded.buffer.storage
    for task, name in enumerate(exported):
        expected = [
            found
            for env in (2 * task, 2 * task + 1)
            for found in episodes(storage, env, recorded.spec.horizon, has_all=True)
        ]
        expected.sort(key=lambda found: found[0])
        read = list(minari.load_dataset(f"{name}-v0").iterate_episodes())
        assert len(read) == len(expected) == len(exported[name]) > 0
        for episode, (_, wanted) in zip(read, expected, strict=True):
            np.testing.assert_array_equal(episode.observations, wanted.observations)
            np.testing.assert_array_equal(episode.actions, wanted.actions)
            np.testing.assert_array_equal(episode.rewards, wanted.rewards)
            # odd tasks terminate, and only the last step ends an episode
            assert episode.terminations.sum() == wanted.terminations[-1] <= task
            assert episode.terminations.sum() + episode.truncations.sum() == 1
        assert any(wanted.terminations[-1] for _, wanted in expected) == bool(task)
    with pytest.raises(ConfigurationError, match="exists"):
        export_to_minari(run)


def test_run_without_a_complete_replay_is_refused(tmp_path):
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    run = Recorded(Scripted(1), [0], 12, 2).save(tmp_path)
    with pytest.raises(ConfigurationError, match="no episode"):
        export_to_minari(run)
    assert not (run / "export").exists()
    path = run / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["ReplayData"]["replay"] = None
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match="no replay"):
        export_to_minari(run)
