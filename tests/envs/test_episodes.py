"""Episodes are resumed by being repeated from their seeds and actions: bit for bit, or anew."""

import random
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import FrameStackObservation, StickyAction

from mtrl_lightning.envs import (
    DMControl,
    DMControlFamily,
    GymnasiumTasks,
    MetaWorld,
    Pixels,
    ToyReach,
    VectorEnv,
    WithWrappers,
)
from tests.helpers.environments import through_a_file

HORIZON = 8
MUJOCO = ["Reacher-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Walker2d-v5"]


def stacked(env):
    return FrameStackObservation(env, 3)


def sticky(env):
    return StickyAction(env, 0.3)


def metaworld(tasks=("push", "door-open"), **options):
    return MetaWorld(tasks, horizon=HORIZON, num_goals=6, **options)


BENCHMARKS = {
    "toy": lambda: ToyReach(2, HORIZON),
    "MetaWorld": metaworld,
    "MetaWorld's own classes": lambda: metaworld(fast=False),
    "suite": lambda: DMControl(["walker-walk", "reacher-hard"], horizon=2 * HORIZON),
    "suite's own code": lambda: DMControl(["walker-walk"], horizon=2 * HORIZON, fast=False),
    "family": lambda: DMControlFamily("cartpole_pole", horizon=2 * HORIZON),
    "classic control": lambda: GymnasiumTasks(["Pendulum-v1", "MountainCarContinuous-v0"], HORIZON),
    "Gymnasium's MuJoCo": lambda: GymnasiumTasks(MUJOCO, HORIZON),
    "wrappers": lambda: WithWrappers(ToyReach(2, HORIZON), [sticky, stacked]),
    "pixels": lambda: Pixels(ToyReach(2, HORIZON), size=12),
}
EVERY_TASK = {
    "MT50": lambda: metaworld("MT50"),
    "DMC21": lambda: DMControl("DMC21", horizon=2 * HORIZON),
}


def run(envs, action_SEA):
    """All that the environments report in these steps."""
    reported = []
    for action_EA in action_SEA:
        envs.send(action_EA)
        result = envs.receive()
        reported += [array.tobytes() for array in result if isinstance(array, np.ndarray)]
    return reported


def actions(envs, num_steps):
    shape = (num_steps, envs.num_envs, *envs.single_action_space.shape)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def saved(envs, action_SEA):
    """Step, and return the state and the last observations."""
    observation_ED, _ = envs.reset()
    for action_EA in action_SEA:
        observation_ED, *_ = envs.step(action_EA)
    return through_a_file(envs.get_state()), observation_ED


def assert_continues(make, workers=(0, 0), num_steps=3 * HORIZON + 5, **options):
    tasks = [*range(make().spec.num_tasks), 0]
    envs = VectorEnv(make(), tasks, seed=1, num_workers=workers[0], **options)
    other = VectorEnv(make(), tasks, seed=2, num_workers=workers[1], **options)
    action_SEA = actions(envs, num_steps + 2 * HORIZON)
    state, observation_ED = saved(envs, action_SEA[:num_steps])
    saved(other, action_SEA[:3])  # what came before does not matter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(other.set_state(state), observation_ED)
    assert other.get_state() == state
    following = action_SEA[num_steps:]
    assert run(other, following) == run(envs, following)
    envs.close()
    other.close()


@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_an_episode_continues_bit_for_bit(name):
    assert_continues(BENCHMARKS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize("name", EVERY_TASK)
def test_an_episode_of_every_task_continues_bit_for_bit(name):
    assert_continues(EVERY_TASK[name])


@pytest.mark.usefixtures("few_goals")
@pytest.mark.parametrize("workers", [(0, 2), (2, 0)])
@pytest.mark.parametrize(
    "make",
    [lambda: ToyReach(2, 30), lambda: MetaWorld(["push", "door-open"], horizon=30, num_goals=6)],
    ids=["toy", "MetaWorld"],
)
def test_it_continues_with_other_workers_and_midway_starts(make, workers):
    assert_continues(make, workers, num_steps=125, midway_starts=1.0, after_success=2)


def test_it_continues_at_a_reset_and_before_the_last_step():
    for num_steps in (0, HORIZON - 1, HORIZON):
        assert_continues(BENCHMARKS["toy"], num_steps=num_steps)


def test_the_state_is_bounded_by_the_actions_of_an_episode():
    envs = VectorEnv(ToyReach(1, HORIZON), [0], num_workers=0)
    envs.reset()
    action_SEA = actions(envs, 5 * HORIZON + 3)
    for action_EA in action_SEA:
        envs.step(action_EA)
    (state,) = envs.get_state()
    assert np.array_equal(np.float32(state["state"]["actions"]), action_SEA[-3:, 0])


class Counting(gym.Wrapper):
    """Depends on the number of resets, which no seed decides.

    Args:
        change: of the first number of an observation per reset.
    """

    def __init__(self, env, change):
        super().__init__(env)
        self.change = change
        self.resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        observation, info = self.env.reset(**kwargs)
        return self.changed(observation), info

    def step(self, action):
        observation, *rest = self.env.step(action)
        return self.changed(observation), *rest

    def changed(self, observation):
        return observation + np.array([self.change * self.resets, 0], observation.dtype)


class OneCounting(ToyReach):
    def __init__(self, change):
        super().__init__(3, HORIZON)
        self.change = change

    def make_env(self, task, split, seed):
        env = super().make_env(task, split, seed)
        return Counting(env, self.change) if task == 1 else env


def test_new_episode_starts_if_repeating_diverges():
    envs, other = (VectorEnv(OneCounting(0.01), [0, 1, 2], num_workers=0) for _ in range(2))
    state, _ = saved(envs, actions(envs, HORIZON + 3))
    with pytest.warns(UserWarning, match="goal-1"):
        other.set_state(state)
    steps = []
    for action_EA in actions(envs, 2):
        envs.send(action_EA)
        other.send(action_EA)
        steps.append((envs.receive(), other.receive()))
    assert [other.valid_E.tolist() for _, other in steps] == [[True, False, True], [True] * 3]
    for uninterrupted, resumed in steps:
        assert np.array_equal(uninterrupted.reward_E[[0, 2]], resumed.reward_E[[0, 2]])
    assert [len(one["state"]["actions"]) for one in other.get_state()] == [5, 1, 5]


def test_an_episode_that_differs_by_rounding_continues():
    envs, other = (VectorEnv(OneCounting(1e-7), [0, 1, 2], num_workers=0) for _ in range(2))
    state, _ = saved(envs, actions(envs, HORIZON + 3))
    other.set_state(state)
    assert run(other, actions(other, 1)) and not any(one["new"] for one in other.get_state())


class Dice(gym.Env):
    """Draws from the global generators, when it is made, too."""

    observation_space = Box(0, 1, (3,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.bias = random.random() + np.random.random()

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.drawn(), {}

    def step(self, action):
        self.steps += 1
        return self.drawn(), np.random.normal(), False, self.steps == HORIZON, {}

    def drawn(self):
        return np.array([self.bias, np.random.random(), random.gauss(0, 1)])


def test_draws_of_global_generators_depend_on_the_seed_alone():
    benchmark = GymnasiumTasks({"dice": Dice}, HORIZON)
    found = []
    before = np.random.get_state()[1].tolist(), random.getstate()
    for workers in (0, 2, 0):
        envs = VectorEnv(benchmark, [0, 0, 0], seed=3, num_workers=workers)
        observation_ED, _ = envs.reset()
        found.append((observation_ED.tolist(), run(envs, actions(envs, 2 * HORIZON))))
        envs.close()
    assert found[0] == found[1] == found[2]
    drawn = np.array(found[0][0])
    assert len(np.unique(drawn)) == drawn.size, "each environment has draws of its own"
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before


def test_episode_with_global_draws_continues_bit_exact():
    def make():
        return GymnasiumTasks({"dice": Dice}, HORIZON)

    envs, other = (VectorEnv(make(), [0, 0], seed=3, num_workers=0) for _ in range(2))
    state, observation_ED = saved(envs, actions(envs, HORIZON + 3))
    assert np.array_equal(other.set_state(state), observation_ED)
    assert run(other, actions(other, 2 * HORIZON)) == run(envs, actions(envs, 2 * HORIZON))
