"""Episodes of a replay in Minari's data sets, compared with those that were added to it."""

import numpy as np
import pytest
import torch

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.replay import episodes, export_to_minari
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.transitions import transition_fields
from tests.helpers.command_line import SHORT
from tests.helpers.demonstrations import need_minari, read_episodes
from tests.helpers.replay import make_rings


@pytest.mark.parametrize("capacity", [100, 11])
def test_episodes_are_those_that_were_added(capacity):
    rng = np.random.default_rng(0)
    storage, added = make_rings(2, capacity), [[], []]
    # of 11 transitions, the first ring begins with an episode, the second within one
    for number, (env, steps) in enumerate([(0, 3), (1, 5), (1, 7), (0, 6), (1, 2), (0, 5)]):
        is_last_N = np.arange(steps) == steps - 1
        observation_ND = rng.normal(size=(steps + 1, 3)).astype(np.float32)
        columns = {
            "observation": observation_ND[:-1],
            "action": rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
            "reward": rng.normal(size=steps).astype(np.float32),
            "next_observation": observation_ND[1:],
            "terminated": is_last_N & (number % 2 == 1),
        }
        added[env].append((int(storage.added_E[env]), columns, is_last_N))
        storage.add(np.full(steps, env), columns)
    for env, of_env in enumerate(added):
        oldest = storage.added_E[env] - storage.size_E[env]
        # the oldest part is left out, also where an episode happens to start with it
        kept = [one for one in of_env if one[0] > oldest or oldest == 0]
        found = list(episodes(storage, env, 7, has_all=True))
        assert len(kept) == len(found) == (3 if capacity == 100 else 1 + env)
        for (first, one), (wanted_first, columns, is_last_N) in zip(found, kept, strict=True):
            assert first == wanted_first
            np.testing.assert_array_equal(one.observations[:-1], columns["observation"])
            np.testing.assert_array_equal(one.observations[1:], columns["next_observation"])
            np.testing.assert_array_equal(one.actions, columns["action"])
            np.testing.assert_array_equal(one.rewards, columns["reward"])
            np.testing.assert_array_equal(one.terminations, columns["terminated"])
            np.testing.assert_array_equal(one.truncations, is_last_N & ~columns["terminated"])


def test_horizon_separates_episodes_that_end_where_they_start():
    storage = make_rings(1, 20)
    names = ("observation", "next_observation", "action", "reward")
    for number in range(9):
        row = dict.fromkeys(names, np.zeros(1)) | {"terminated": [number == 1]}
        storage.add(np.array([0]), row)
    found = list(episodes(storage, 0, 3, has_all=True))
    ends = [(one.num_steps, one.terminations[-1]) for _, one in found]
    assert ends == [(2, True), (3, False), (3, False), (1, False)]
    # the start of the first episode is not known
    unknown = list(episodes(storage, 0, 3, has_all=False))
    assert [(first, one.num_steps) for first, one in unknown] == [(2, 3), (5, 3), (8, 1)]


def test_minari_reads_the_episodes_of_each_task(command_line, tmp_path):
    need_minari()
    command_line.finished(*SHORT, "--data.envs_per_task=2")
    run = command_line.folder()
    folder, exported = export_to_minari(run)
    assert folder == run / "export" / "minari"
    path = run / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    manifest = content["ReplayData"]["replay"]
    storage = RingStorage(transition_fields(ToyReach().spec), 6, manifest["capacity"])
    ReplaySnapshots(run / "replay").load(manifest, storage)
    read = read_episodes(folder)
    assert read.keys() == exported.keys()
    for task, of_task in enumerate(read.values()):
        rings = [list(episodes(storage, env, 20, has_all=True)) for env in (2 * task, 2 * task + 1)]
        # 30 steps of each of two environments, by the start of the episode
        assert [one.num_steps for one in of_task] == [20, 20, 10, 10]
        for found, (_, wanted) in zip(
            of_task, [rings[i % 2][i // 2] for i in range(4)], strict=True
        ):
            for name in ("observations", "actions", "rewards", "terminations", "truncations"):
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    with pytest.raises(ConfigurationError, match="exists"):
        export_to_minari(run)
    manifest["per_env"]["oldest"] = manifest["per_env"]["added"]
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match="no episode"):
        export_to_minari(path, tmp_path / "other")
    content["ReplayData"]["replay"] = None
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match="no replay"):
        export_to_minari(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()
