"""Demonstrations as a replay: matched by name, sampled equally over the tasks, recognized."""

import numpy as np
import pytest
import torch

from mtrl_lightning.data import DemonstrationData
from mtrl_lightning.data.demonstrations import load_demonstrations
from mtrl_lightning.demonstrations import RecordedEpisode, write_data_sets
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import trained_spec
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import Field
from mtrl_lightning.utils.devices import CPU
from tests.helpers.algorithms import make_spec, pixel_spec
from tests.helpers.demonstrations import need_minari, read_episodes, write_demonstrations
from tests.helpers.replay import newest

NAMES = ("far", "near", "between")
LENGTHS = [3, 9, 1, 2]
TASKS = [1, 0, 1, 2]
"""Of the episodes."""


def episodes_of(spec):
    """Return episodes whose numbers tell their task and row; the first's action is too large."""
    rng = np.random.default_rng(0)
    episodes = {name: [] for name in NAMES}
    for task, steps in zip(TASKS, LENGTHS, strict=True):
        observation_ND = rng.normal(size=(steps + 1, *spec.observation_space.shape))
        observation_ND[:, 0] = 10 * task
        action_NA = rng.uniform(-1, 1, (steps, *spec.action_space.shape))
        if not episodes[NAMES[1]]:
            action_NA[1, 0] = 3.0
        is_last_N = np.arange(steps) == steps - 1
        episodes[NAMES[task]].append(
            RecordedEpisode(
                observation_ND * spec.observation_mask_TD[task],
                action_NA * spec.action_mask_TA[task],
                np.full(steps, task + 0.5),
                is_last_N,
                np.zeros_like(is_last_N),
                {"success": is_last_N},
            )
        )
    return episodes


SPEC = make_spec(3, 4, 2)._replace(
    task_names=NAMES, observation_sizes=(4, 3, 2), action_sizes=(2, 1, 2)
)


def test_tasks_are_matched_by_name_and_padded_as_they_are_here(tmp_path):
    need_minari()
    written = str(tmp_path / "demonstrations")
    write_data_sets(written, SPEC, episodes_of(SPEC), {})
    # fewer tasks, in another order, whose largest is smaller: less padding
    spec = make_spec(2, 3, 2)._replace(
        task_names=("between", "near"), observation_sizes=(2, 3), action_sizes=(2, 1)
    )
    replay, identity = load_demonstrations(written, spec, 0, CPU)
    assert identity["transitions"] == {"between": 2, "near": 4}
    for ring, name in enumerate(spec.task_names):
        episodes = episodes_of(SPEC)[name]
        found = newest(replay.storage, ring)
        columns = {
            "observation": [one.observations[:-1, :3] for one in episodes],
            "next_observation": [one.observations[1:, :3] for one in episodes],
            "action": [one.actions[:, :2].clip(-1, 1) for one in episodes],
            "reward": [one.rewards for one in episodes],
            "terminated": [one.terminations for one in episodes],
        }
        for key, parts in columns.items():
            expected = torch.from_numpy(np.concatenate(parts)).to(found[key].dtype)
            assert torch.equal(found[key], expected), key
    assert newest(replay.storage, 1)["action"][1, 0] == 1.0, "clipped as in the environment"
    wider = SPEC._replace(
        observation_space=make_spec(3, 6).observation_space,
        action_space=make_spec(3, 6, 5).action_space,
    )
    found = newest(load_demonstrations(written, wider, 0, CPU)[0].storage, 0)
    assert found["observation"].shape == (9, 6)
    assert not found["observation"][:, 4:].any() and not found["action"][:, 2:].any()


def test_what_the_demonstrator_chose_is_in_the_replay(tmp_path):
    folder = write_demonstrations(tmp_path / "noisy", num_episodes=2, noise=0.3)
    spec = ToyReach().spec
    replay, _ = load_demonstrations(str(folder), spec, 0, CPU)
    for ring, name in enumerate(spec.task_names):
        episodes = read_episodes(folder)[name]
        found = newest(replay.storage, ring)
        chosen = np.concatenate([one.infos["policy_action"] for one in episodes])
        sent = np.concatenate([one.actions for one in episodes]).clip(-1, 1)
        assert np.array_equal(found["policy_action"], chosen.astype(np.float32))
        assert np.array_equal(found["action"], sent.astype(np.float32))
        assert not np.array_equal(sent, chosen)


def test_an_excluded_task_needs_no_demonstrations(tmp_path):
    need_minari()
    write_data_sets(tmp_path / "two", SPEC, {**episodes_of(SPEC), "between": []}, {})
    with pytest.raises(ConfigurationError, match="between"):
        load_demonstrations(str(tmp_path / "two"), SPEC, 0, CPU)
    spec = SPEC._replace(train_tasks=(0, 1))
    _, identity = load_demonstrations(str(tmp_path / "two"), spec, 0, CPU)
    assert identity["transitions"] == {"far": 9, "near": 4}


def test_the_demonstrations_are_of_the_benchmark(tmp_path):
    folder = write_demonstrations(tmp_path / "toy", num_episodes=1)
    spec = trained_spec(ToyReach(horizon=7), None)
    assert len(load_demonstrations(str(folder), spec, 0, CPU)[0]) == 60, "another horizon may be"
    protocol = spec.protocol
    larger = make_spec(3, 3).observation_space
    for changed, message in (
        ({"protocol": {**protocol, "benchmark": "other"}}, "benchmark toy, but .* other"),
        ({"protocol": {**protocol, "reward_version": "v1"}}, "reward_version none, but .* v1"),
        ({"observation_space": larger}, r"shape \(2,\) in the demonstrations and \(3,\)"),
        ({"info_fields": (Field("cost"),)}, "have no cost"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_demonstrations(str(folder), spec._replace(**changed), 0, CPU)
    with pytest.raises(ConfigurationError, match="Minari"):
        load_demonstrations(str(tmp_path / "nowhere"), spec, 0, CPU)
    of_another = {**protocol, "task elsewhere": "another"}
    load_demonstrations(str(folder), spec._replace(protocol=of_another), 0, CPU)


def test_images_of_short_episodes_are_all_held(tmp_path):
    need_minari()
    spec = pixel_spec(1, 2, 3)._replace(frame_stack=3, horizon=40)
    rng = np.random.default_rng(0)
    episodes = []
    for steps in [2] * 20 + [40]:
        frame_N = rng.integers(0, 255, (steps + 1, *spec.observation_space.shape[1:]), np.uint8)
        padded = np.concatenate([frame_N[:1]] * 2 + [frame_N])
        stack_N = np.stack([padded[i : i + 3] for i in range(steps + 1)])
        no_end_N = np.zeros(steps, np.bool_)
        is_last_N = np.arange(steps) == steps - 1
        action_NA = np.zeros((steps, *spec.action_space.shape))
        episodes.append(RecordedEpisode(stack_N, action_NA, np.zeros(steps), is_last_N, no_end_N))
    write_data_sets(tmp_path / "images", spec, {spec.task_names[0]: episodes}, {})
    replay, identity = load_demonstrations(str(tmp_path / "images"), spec, 0, CPU)
    assert len(replay) == identity["transitions"][spec.task_names[0]] == 80
    found = newest(replay.storage, 0)
    for name, rows in (("observation", slice(-1)), ("next_observation", slice(1, None))):
        expected = np.concatenate([one.observations[rows] for one in episodes])
        assert torch.equal(found[name], torch.from_numpy(expected))


def test_episodes_of_another_split_are_a_warning(tmp_path, recwarn):
    toy = read_episodes(write_demonstrations(tmp_path / "toy", num_episodes=1))
    for split in ("train", "eval"):
        write_data_sets(tmp_path / split, ToyReach().spec, toy, {"split": split})
        DemonstrationData(ToyReach(), tmp_path / split, batch_size=12)._read(CPU)
    assert ["Collect episodes of train" in str(one.message) for one in recwarn] == [True]
