"""Episodes that begin in the middle of an earlier one: which, how often, bit-exact."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning.envs import MetaWorld, ToyReach, VectorEnv
from mtrl_lightning.envs.vector.episodes import Episodes
from mtrl_lightning.envs.vector.global_random import GlobalRandom
from mtrl_lightning.envs.vector.midway_starts import NUM_BEGINNINGS, MidwayStarts
from tests.helpers.environments import through_a_file

HORIZON = 40
SPEC = ToyReach(1, HORIZON).spec


class Hill(gym.Env):
    """The reward is the action's number; the observation holds the seed and all actions' sum."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)
    observation_space = Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, success_from=None, repeats=True):
        self._success_from = success_from
        self._repeats = repeats
        self._generator = np.random.default_rng(0)
        self.seed = 0
        self.steps = 0
        self.total = 0.0

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.steps = 0
        self.total = 0.0 if self._repeats else float(self._generator.random())
        return np.array([self.seed, self.total], np.float64), {}

    def step(self, action):
        self.steps += 1
        self.total += float(action[0])
        success = self._success_from is not None and action[0] >= self._success_from
        observation = np.array([self.seed, self.total])
        return observation, action[0], False, self.steps == HORIZON, {"success": success}


class Clocked(Hill):
    def restart_clock(self):
        self.steps = 0


class Noisy(Clocked):
    """With noise of its own in the observation, and of the global generator in a third number."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)

    def reset(self, *, seed=None, options=None):
        self.np_random = np.random.default_rng(seed)
        observation, info = super().reset(seed=seed, options=options)
        return np.append(observation, np.random.random()), info

    def step(self, action):
        observation, reward, *rest = super().step(action)
        observation[1] += self.np_random.random()
        return np.append(observation, np.random.random()), np.float64(reward), *rest


def noisy():
    return GlobalRandom(Noisy(), 0)


def started(env, fraction=1.0, spec=SPEC):
    wrapped = not_started(env, fraction, spec)
    wrapped.reset()
    return wrapped


def not_started(env, fraction=1.0, spec=SPEC, seed=7):
    return Episodes(MidwayStarts(env, spec, fraction), seed, is_numbered=False)


def continue_from(other, env):
    """Repeat the running episode of an environment in another one."""
    observation = other.repeat(through_a_file(env.get_state()))
    assert other.get_state() == env.get_state()
    return observation


def episode(env, best_step=None, largest=0.5, num_steps=None):
    """Step to the episode's end; one step has the largest reward. Return its number of steps."""
    for step in range(1, 1 + (num_steps or HORIZON)):
        reward = largest if step == best_step else 0.01 * (step % 7)
        _, _, _, truncated, _ = env.step(np.array([reward, 0.0], np.float32))
        if truncated:
            return step
    return step


@pytest.mark.parametrize(("best_step", "expected"), [(25, 20), (31, 30), (30, 20), (11, 10)])
def test_the_next_episode_begins_just_before_the_largest_reward(best_step, expected):
    env = started(Hill())
    first = env.unwrapped.seed
    episode(env, best_step)
    observation, _ = env.reset()
    assert env.unwrapped.seed == first, "the same episode"
    total = sum(np.float32(0.01 * (step % 7)) for step in range(1, expected + 1))
    assert observation.tolist() == [first, pytest.approx(total)]
    assert episode(env) == HORIZON - expected, "it is shorter by the repeated steps"


def test_clock_gives_the_new_episode_all_steps():
    env = started(Clocked())
    episode(env, 25)
    env.reset()
    assert episode(env) == HORIZON


def test_what_is_before_the_first_moment_begins_nothing():
    env = started(Hill())
    episode(env, best_step=4)
    seed = env.unwrapped.seed
    env.reset()
    assert env.unwrapped.seed != seed and env.unwrapped.steps == 0


def test_an_episode_that_is_no_better_later_on_adds_nothing():
    env = started(Clocked())
    episode(env, best_step=35)
    env.reset()
    episode(env, best_step=6, largest=0.9)  # before the first moment after the repeated steps
    assert [len(beginning.action_SA) for beginning in env.env._beginnings] == [30]


def test_midway_starts_follow_one_another_up_to_some_horizons():
    env = started(Clocked())
    episode(env, best_step=35)
    for number in range(12):
        env.reset()
        env.env._start_from(env.env._beginnings[0], len(env.env._beginnings[0].action_SA), 0, None)
        episode(env, best_step=25, largest=0.51 + 0.01 * number)
    found = [len(beginning.action_SA) for beginning in env.env._beginnings]
    assert found == [150, 130, 110, 90, 70], "by 20 each; the next one is beyond 160"


def test_the_best_beginnings_are_kept_and_all_of_them_are_used():
    env = started(Hill(), fraction=0.0)
    rewards = [0.3, 0.9, 0.2, 0.5, 0.4, 0.8, 0.7]
    seeds = {}
    for reward in rewards:
        seeds[env.unwrapped.seed] = reward
        episode(env, 15, largest=reward)
        env.reset()
    env.env._fraction = 1.0
    found = set()
    for _ in range(60):
        env.reset()
        found.add(seeds[env.unwrapped.seed])
    assert found == set(sorted(rewards)[-NUM_BEGINNINGS:])


def test_a_reward_after_the_first_success_counts_nothing():
    env = started(Hill(success_from=0.8), fraction=1.0)
    env.env._success = 0.0
    for step in range(1, HORIZON + 1):
        reward = {15: 0.5, 25: 0.85, 35: 0.95}.get(step, 0.1)
        env.step(np.array([reward, 0.0], np.float32))
    env.env._success = 0.0  # as if it had been luck
    env.reset()
    assert env.unwrapped.steps == 10


def test_more_success_means_fewer_midway_starts():
    env = started(Hill(success_from=0.4), fraction=0.6)
    shares = []
    for has_success in (False, True):
        num_midway = 0
        for _ in range(400):
            num_midway += env.unwrapped.steps > 0
            episode(env, 25, largest=0.5 if has_success else 0.3)
            env.reset()
        shares.append(num_midway / 400)
    assert shares[0] == pytest.approx(0.6, abs=0.08)
    assert shares[1] < 0.03


def test_with_each_success_episodes_may_begin_earlier_on_the_way():
    env = started(Hill(success_from=0.9))
    episode(env, 38)
    assert {env.reset() and env.unwrapped.steps for _ in range(9)} == {30}
    for expected in ((20, 30), (10, 20, 30), (10, 20, 30)):
        episode(env, 5, largest=1.0)
        starts = [env.reset() and env.unwrapped.steps for _ in range(300)]
        assert set(starts) == set(expected)
        shares = [starts.count(steps) / 300 for steps in expected]
        assert shares == pytest.approx([1 / len(expected)] * len(expected), abs=0.08)
    observation, _ = env.reset()
    assert observation[1] == pytest.approx(
        sum(0.01 * (step % 7) for step in range(1, env.unwrapped.steps + 1)), abs=1e-6
    )
    before = env.env._beginnings.copy()
    episode(env, 8, largest=0.8)
    assert env.env._beginnings == before, "a longer beginning is not needed"


def test_restored_env_knows_where_its_episode_began():
    env, other = started(Hill(success_from=0.9)), not_started(Hill(0.9), seed=8)
    episode(env, 38)
    env.reset()
    continue_from(other, env)
    for one in (env, other):
        episode(one, 5, largest=1.0)
    starts, others = (
        [one.reset() and one.unwrapped.steps for _ in range(20)] for one in (env, other)
    )
    assert starts == others and set(starts) == {20, 30}


def test_a_task_without_a_success_signal_follows_its_score():
    env = started(Hill(), spec=SPEC._replace(has_success=False, max_return=10.0))
    for _ in range(60):
        env.env._num_repeated = 0  # as if it had begun with a reset
        episode(env, 15, largest=0.7)
        env.reset()
    of_one = sum(0.01 * (step % 7) for step in range(1, HORIZON + 1)) - 0.01 + 0.7
    assert 0 < env.env._success < 0.3
    assert env.env._success <= of_one / 10 + 0.01


def test_seeded_reset_starts_from_the_beginning():
    def run():
        env = started(Hill(), fraction=0.5)
        found = []
        for _ in range(3):
            episode(env, 15)
            env.reset()
        observation, _ = env.reset(seed=5)
        assert observation.tolist() == [5, 0.0]
        for _ in range(8):
            found.append((env.unwrapped.seed, env.unwrapped.steps))
            episode(env, 25)
            env.reset()
        return found

    assert run() == run()
    assert any(steps for _, steps in run()) and not all(steps for _, steps in run())


def test_reset_follows_where_repeating_diverges():
    env = started(Hill(repeats=False))
    episode(env, 25)
    with pytest.warns(UserWarning, match="StartMidway"):
        env.reset()
    assert env.unwrapped.steps == 0 and not env.env._beginnings
    assert episode(env, 25) == HORIZON


@pytest.mark.parametrize("num_steps", [0, 13, HORIZON - 1])
def test_restored_env_continues_as_uninterrupted(num_steps):
    env, other = started(noisy(), fraction=0.5), not_started(noisy(), 0.5, seed=8)
    for _ in range(4):
        episode(env, 25)
        env.reset()
    if num_steps:
        episode(env, 11, num_steps=num_steps)
    continue_from(other, env)
    for _ in range(10):
        assert episode(env, 21) == episode(other, 21)
        (observation, _), (other_observation, _) = env.reset(), other.reset()
        assert observation.tolist() == other_observation.tolist()


def test_episodes_with_one_beginning_have_noise_of_their_own():
    env = started(noisy())
    episode(env, 25)
    starts, noise = [], []
    for _ in range(30):
        observation, _ = env.reset()
        starts.append(observation[:2].tolist())
        following = [env.step(np.zeros(2, np.float32))[0] for _ in range(3)]
        noise.append(np.stack(following)[:, 1:])
    assert starts == [starts[0]] * 30
    assert len(np.unique(np.stack(noise)[:, 0, 0])) == 30, "np_random"
    assert len(np.unique(np.stack(noise)[:, 0, 1])) == 30, "np.random"


TASKS = ["push", "pick-place", "door-open", "hammer"]


@pytest.mark.usefixtures("few_goals")
@pytest.mark.filterwarnings("error:the same seed and actions")
@pytest.mark.parametrize(
    "tasks", [TASKS, pytest.param("MT50", marks=pytest.mark.slow)], ids=["four", "MT50"]
)
def test_metaworld_repeats_and_continues_bit_exact(tasks):
    """An episode that is repeated with another bit warns."""
    benchmark = MetaWorld(tasks, horizon=HORIZON, num_goals=6)
    num_tasks = benchmark.spec.num_tasks
    envs, other = (
        VectorEnv(benchmark, range(num_tasks), num_workers=0, seed=3, midway_starts=1.0)
        for _ in range(2)
    )
    generator = np.random.default_rng(0)

    def step(*which):
        action_EA = generator.uniform(-1, 1, (num_tasks, 4)).astype(np.float32)
        for one in which:
            one.send(action_EA)
        return [one.receive() for one in which]

    envs.reset()
    for _ in range(5 * HORIZON + HORIZON // 2):
        step(envs)
    starts = [env.is_midway for env in envs._groups[0]._group._envs]
    assert np.mean(starts) > 0.5
    other.set_state(through_a_file(envs.get_state()))
    for _ in range(4 * HORIZON):
        here, there = step(envs, other)
        assert np.array_equal(here.observation_ED, there.observation_ED)
        assert np.array_equal(here.reward_E, there.reward_E)


class CountedReach(ToyReach):
    """Its environments count all their steps."""

    def make_env(self, task, split, seed):
        return CountSteps(super().make_env(task, split, seed))


class CountSteps(gym.Wrapper):
    steps_taken = 0

    def step(self, action):
        CountSteps.steps_taken += 1
        return super().step(action)


def test_repeated_steps_are_all_that_are_in_no_vector_step():
    CountSteps.steps_taken = 0
    benchmark = CountedReach(2, HORIZON)
    envs = VectorEnv(benchmark, [0, 1], num_workers=0, seed=3, midway_starts=0.5)
    envs.reset()
    generator = np.random.default_rng(0)
    repeated_steps = []
    for _ in range(20 * HORIZON):
        envs.send(generator.uniform(-1, 1, (2, 2)).astype(np.float32))
        envs.receive()
        repeated_steps.append(envs.take_repeated_steps())
    assert CountSteps.steps_taken == 2 * 20 * HORIZON + sum(repeated_steps)
    assert sum(repeated_steps) > 0


def test_steps_say_whether_their_episode_began_midway():
    envs = VectorEnv(ToyReach(2, HORIZON), [0, 1, 1], num_workers=0, seed=3, midway_starts=0.5)
    envs.reset()
    wrappers = envs._groups[0]._group._envs
    generator = np.random.default_rng(0)
    seen = []
    for _ in range(20 * HORIZON):
        expected = [env.is_midway for env in wrappers]
        envs.send(generator.uniform(-1, 1, (3, 2)).astype(np.float32))
        assert envs.receive().midway_E.tolist() == expected
        seen += expected
    assert 0.1 < np.mean(seen) < 0.5
