"""Wrappers around any benchmark's environments: what is observed, saved and refused."""

from functools import partial

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import FlattenObservation, FrameStackObservation, TimeLimit, TransformReward

from mtrl_lightning.envs import GymnasiumTasks, ToyReach, VectorEnv, WithWrappers
from mtrl_lightning.envs.benchmarks.wrappers import with_layers
from mtrl_lightning.envs.names import values_text
from tests.helpers.altered_reach import Halves
from tests.helpers.environments import run
from tests.helpers.fakes import half, point_in_space, point_on_a_line

HORIZON = 7
STACK = {"class_path": "gymnasium.wrappers.FrameStackObservation", "init_args": {"stack_size": 3}}
FLATTEN = "gymnasium.wrappers.FlattenObservation"
WITH_TIME = {
    "class_path": "gymnasium.wrappers.TimeAwareObservation",
    "init_args": {"normalize_time": True, "flatten": False},
}
HALF = {
    "class_path": "gymnasium.wrappers.TransformReward",
    "init_args": {"func": "tests.helpers.fakes.half"},
}


def taken(benchmark, action_SEA, num_workers=0):
    """Return observations and rewards of steps in all tasks."""
    envs = VectorEnv(benchmark, range(benchmark.spec.num_tasks), num_workers=num_workers)
    first_ED, _ = envs.reset(seed=1)
    results = run(envs, action_SEA)
    envs.close()
    observations = [first_ED, *(result.observation_ED for result in results)]
    return np.array(observations), np.array([result.reward_E for result in results])


def test_wrappers_apply_to_any_benchmark_also_in_workers():
    toy = ToyReach(2, HORIZON)
    wrapped = WithWrappers(toy, [HALF, STACK, FLATTEN])
    actions_SEA = np.random.default_rng(0).uniform(-1, 1, (4, 2, 2)).astype(np.float32)
    plain_SED, plain_SE = taken(toy, actions_SEA)
    found_SED, found_SE = taken(wrapped, actions_SEA, num_workers=1)
    first_SED = np.concatenate([plain_SED[:1], plain_SED[:1], plain_SED])  # repeats the first
    stacked_SED = np.concatenate([first_SED[:-2], first_SED[1:-1], first_SED[2:]], axis=-1)
    assert np.array_equal(found_SED, stacked_SED)
    assert np.array_equal(found_SE, plain_SE / 2)
    spec = wrapped.spec
    assert spec.observation_space == Box(-1.0, 1.0, (6,), np.float32)
    assert (spec.action_space, spec.horizon) == (toy.spec.action_space, HORIZON)
    assert spec.protocol == toy.spec.protocol | {
        "wrappers": 'gymnasium.wrappers.TransformReward {"func": "tests.helpers.fakes.half"} >'
        ' gymnasium.wrappers.FrameStackObservation {"stack_size": 3} >'
        " gymnasium.wrappers.FlattenObservation"
    }
    given = [
        partial(TransformReward, func=half),
        partial(FrameStackObservation, stack_size=3),
        FlattenObservation,
    ]
    assert WithWrappers(toy, given).spec == spec, "the same from Python"
    assert with_layers(toy, [], None) is toy
    twice = WithWrappers(wrapped, [HALF])
    assert twice.spec.protocol["wrappers"].startswith(f"{wrapped.pipeline} > gymnasium")


def test_dict_is_flattened_and_time_known_everywhere():
    benchmark = WithWrappers(ToyReach(1, HORIZON), [WITH_TIME])
    found_SED, _ = taken(benchmark, np.zeros((HORIZON + 1, 1, 2), np.float32))
    steps = [*range(HORIZON), 0, 1]  # the observation after an episode is the next one's first
    assert found_SED[:, 0, 2] == pytest.approx([step / HORIZON for step in steps])


class LongerTests(ToyReach):
    def horizon_of(self, split):
        return HORIZON + 2 if split == "eval" else HORIZON


@pytest.mark.parametrize(
    ("wrapper", "horizons"),
    [(HALF, (HORIZON, HORIZON + 2)), (partial(TimeLimit, max_episode_steps=3), (3, 3))],
)
def test_horizon_is_the_splits_or_a_wrappers_shorter_one(wrapper, horizons):
    wrapped = WithWrappers(LongerTests(1, HORIZON), [wrapper])
    assert (wrapped.spec.horizon, wrapped.horizon_of("eval")) == horizons
    with_time = WithWrappers(LongerTests(1, HORIZON), [wrapper, WITH_TIME])
    for split, horizon in zip(("train", "eval"), horizons, strict=True):
        env = with_time.make_env(0, split, seed=0)
        env.reset(seed=0)
        assert env.step(np.zeros(2, np.float32))[0][2] == pytest.approx(1 / horizon)


def test_tasks_of_different_sizes_are_wrapped_then_padded():
    tasks = GymnasiumTasks({"line": point_on_a_line, "space": point_in_space}, horizon=HORIZON)
    wrapped = WithWrappers(tasks, [STACK, FLATTEN])
    assert (wrapped.spec.observation_sizes, wrapped.spec.action_sizes) == ((3, 9), (1, 3))
    found_SED, _ = taken(wrapped, np.full((2, 2, 3), 0.5, np.float32))
    assert not found_SED[:, 0, 3:].any() and found_SED[:, 0, :3].all()
    # a step of 0.2 times the action in the last frame alone
    assert np.diff(found_SED[:2, 0, :3], axis=0)[0] == pytest.approx([0, 0, 0.1], abs=1e-6)


def test_unchanged_spaces_and_score_are_the_benchmarks_own():
    class Wider(ToyReach):
        @property
        def spec(self):
            space = Box(-5.0, 5.0, (2,), np.float32)
            return super().spec._replace(observation_space=space, max_return=5.0)

    shorter = partial(TimeLimit, max_episode_steps=HORIZON - 1)
    for wrapper, bound, max_return in (
        (HALF, 5, None),
        ("tests.helpers.fakes.Drift", np.inf, 5.0),
        (shorter, 5, None),
    ):
        spec = WithWrappers(Wider(2, HORIZON), [wrapper]).spec
        assert spec.observation_space.high.tolist() == [bound] * 2
        assert spec.max_return == max_return


def test_wrapped_benchmark_keeps_splits_and_rendering():
    benchmark = WithWrappers(Halves(2, horizon=HORIZON), [STACK, FLATTEN])
    assert [benchmark.split_tasks(split) for split in benchmark.splits] == [(0,), (1,)]
    assert benchmark.camera(1) == "camera 1"
    env = benchmark.make_rendered_env(1, "eval", seed=0)
    assert env.render_mode == "rgb_array" and env.render().ndim == 3
    assert env.observation_space == benchmark.spec.observation_space


def test_the_protocol_has_the_values_of_objects():
    box = {"low": -9.0, "high": 9.0, "shape": [2]}
    arguments = {
        "func": "numpy.asarray",
        "observation_space": {"class_path": "gymnasium.spaces.Box", "init_args": box},
    }
    wrapper = {"class_path": "gymnasium.wrappers.TransformObservation", "init_args": arguments}
    wrapped = WithWrappers(ToyReach(), [wrapper])
    assert "Box(-9.0, 9.0, (2,), float32)" in wrapped.spec.protocol["wrappers"]
    found = values_text([Halves.__new__(Halves), {"b", "a"}])  # an object without a text of its own
    assert found == f'["{Halves.__module__}.Halves", ["\\"a\\"", "\\"b\\""]]'
