"""Episodes are resumed by being repeated from their seeds and actions: bit for bit, or anew."""

import itertools
import random
import warnings
from functools import partial

import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, StickyAction, TransformObservation

from mtrl_lightning.envs import (
    DMControl,
    GymnasiumTasks,
    MetaWorld,
    Pixels,
    ToyReach,
    VectorEnv,
    WithWrappers,
)
from tests.helpers.environments import draw, run, through_a_file
from tests.helpers.fakes import arrays_of

HORIZON = 8
WRAPPERS = [
    partial(StickyAction, repeat_action_probability=0.3),
    partial(FrameStackObservation, stack_size=3),
]
MUJOCO = ["Reacher-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Walker2d-v5"]


BENCHMARKS = {
    "toy": lambda: ToyReach(2, HORIZON),
    "MetaWorld": lambda: MetaWorld(["push", "door-open"], horizon=HORIZON, num_goals=6),
    "MetaWorld's own classes": lambda: MetaWorld(["push"], "v2", HORIZON, 6, fast=False),
    "suite": lambda: DMControl(["walker-walk", "reacher-hard"], horizon=2 * HORIZON),
    "suite's own code": lambda: DMControl(["walker-walk"], horizon=2 * HORIZON, fast=False),
    "Gymnasium's MuJoCo": lambda: GymnasiumTasks(MUJOCO, HORIZON),
    "wrappers": lambda: WithWrappers(ToyReach(2, HORIZON), WRAPPERS),
    "pixels": lambda: Pixels(ToyReach(2, HORIZON), size=12),
}


def reported(envs, num_steps):
    """All that the environments report in these steps."""
    results = run(envs, draw(envs, num_steps))
    return [array.tobytes() for result in results for array in arrays_of(result).values()]


def saved(envs, num_steps):
    """Step, and return the state and the last observations."""
    observation_ED, _ = envs.reset()
    for result in run(envs, draw(envs, num_steps)):
        observation_ED = result.observation_ED
    return through_a_file(envs.get_state()), observation_ED


def assert_continues(benchmark, workers=(0, 0), num_steps=3 * HORIZON + 5, seeds=(1, 2), **options):
    tasks = [*range(benchmark.spec.num_tasks), 0]
    envs, other = (
        VectorEnv(benchmark, tasks, seed=seed, num_workers=number, **options)
        for seed, number in zip(seeds, workers, strict=True)
    )
    state, observation_ED = saved(envs, num_steps)
    assert (envs.take_repeated_steps() > 0) == ("midway_starts" in options)
    saved(other, 3)  # what came before does not matter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(other.set_state(state), observation_ED)
    assert other.get_state() == state
    assert reported(other, 2 * HORIZON) == reported(envs, 2 * HORIZON)
    envs.close()
    other.close()


@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_an_episode_continues_bit_for_bit(name):
    assert_continues(BENCHMARKS[name]())


@pytest.mark.parametrize("num_steps", [0, HORIZON - 1, HORIZON])
def test_it_continues_at_a_reset_and_before_the_last_step(num_steps):
    assert_continues(ToyReach(2, HORIZON), num_steps=num_steps)


FOUR = ["push", "pick-place", "door-open", "hammer"]


@pytest.mark.usefixtures("few_goals")
@pytest.mark.filterwarnings("error:the same seed and actions")
@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (partial(ToyReach, 2), (0, 2)),
        (partial(ToyReach, 2), (2, 0)),
        (partial(MetaWorld, FOUR, num_goals=6), (0, 0)),
        pytest.param(partial(MetaWorld, "MT50", num_goals=6), (0, 0), marks=pytest.mark.slow),
    ],
)
def test_it_continues_with_other_workers_and_midway_starts(make, workers):
    """An episode that is repeated with another bit is an error."""
    options = {"num_steps": 125, "midway_starts": 1.0, "after_success": 2}
    assert_continues(make(horizon=30), workers, **options)


@pytest.mark.parametrize(("difference", "continues"), [(0.01, False), (1e-7, True)])
def test_new_episode_starts_if_the_repeated_one_differs(difference, continues, recwarn):
    made = itertools.count()

    class Differing(ToyReach):
        """Each environment of the second task observes something else than the one before."""

        def make_env(self, task, split, seed):
            env = super().make_env(task, split, seed)
            offset = np.float32(difference * next(made) if task == 1 else 0)
            return TransformObservation(env, lambda observation: observation + offset, None)

    envs, other = (VectorEnv(Differing(3, HORIZON), [0, 1, 2], num_workers=0) for _ in range(2))
    other.set_state(saved(envs, HORIZON + 3)[0])
    assert ["goal-1" in str(one.message) for one in recwarn] == [True] * (not continues)
    expected, found = run(envs, draw(envs, 2)), run(other, draw(envs, 2))
    for here, there in zip(expected, found, strict=True):
        assert np.array_equal(here.reward_E[[0, 2]], there.reward_E[[0, 2]])
    assert [there.valid_E.tolist() for there in found] == [[True, continues, True], [True] * 3]
    lengths = [len(one["state"]["actions"]) for one in other.get_state()]
    assert lengths == [5, 5 if continues else 1, 5]


def rolling(env):
    """Replace observations by draws of the global generators; one was made with the environment."""
    bias = random.random() + np.random.random()

    def rolled(observation):
        return np.array([bias + np.random.random(), random.gauss(bias, 1)], np.float32)

    return TransformObservation(env, rolled, None)


def test_draws_of_global_generators_depend_on_the_seed_alone():
    found = []
    benchmark = WithWrappers(ToyReach(1, HORIZON), [rolling])
    before = np.random.get_state()[1].tolist(), random.getstate()
    for workers in (0, 2):
        envs = VectorEnv(benchmark, [0, 0, 0], seed=3, num_workers=workers)
        observation_ED, _ = envs.reset()
        found.append((observation_ED.tolist(), reported(envs, 2 * HORIZON)))
        envs.close()
    assert found[0] == found[1]
    assert len(np.unique(observation_ED)) == 6, "each environment has draws of its own"
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    assert_continues(benchmark, seeds=(3, 3))
