"""Episodes that begin in the middle of an earlier one: which, how often, bit-exact."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning.envs import ToyReach, VectorEnv, WithWrappers
from mtrl_lightning.envs.vector.episodes import Episodes
from mtrl_lightning.envs.vector.global_random import GlobalRandom
from mtrl_lightning.envs.vector.midway_starts import NUM_BEGINNINGS, MidwayStarts
from mtrl_lightning.rollout import RunningEpisodes
from tests.helpers.environments import draw, run, through_a_file

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


def noisy(success_from=None):
    return GlobalRandom(Noisy(success_from), 0)


def not_started(env, fraction=1.0, spec=SPEC, seed=7):
    return Episodes(MidwayStarts(env, spec, fraction), seed, is_numbered=False)


def started(env, fraction=1.0, spec=SPEC):
    wrapped = not_started(env, fraction, spec)
    wrapped.reset()
    return wrapped


def continue_from(other, env):
    """Repeat the running episode of an environment in another one."""
    other.repeat(through_a_file(env.get_state()))
    assert other.get_state() == env.get_state()


def small(step):
    return 0.01 * (step % 7)


def episode(env, best_step=None, largest=0.5, num_steps=HORIZON):
    """Step to the episode's end; one step has the largest reward. Return its number of steps."""
    for step in range(1, 1 + num_steps):
        reward = largest if step == best_step else small(step)
        if env.step(np.array([reward, 0.0], np.float32))[3]:
            break
    return step


def starts(env, number):
    """At which steps the next episodes begin."""
    return [env.reset() and env.unwrapped.steps for _ in range(number)]


def beginnings(env):
    return env.get_state()["midway"]["beginnings"]


def lengths(env):
    return [len(beginning["action_SA"]) for beginning in beginnings(env)]


@pytest.mark.parametrize(
    ("best_step", "expected"), [(25, 20), (31, 30), (30, 20), (11, 10), (10, 0), (4, 0)]
)
def test_the_next_episode_begins_just_before_the_largest_reward(best_step, expected):
    env = started(Hill())
    first = env.unwrapped.seed
    episode(env, best_step)
    observation, _ = env.reset()
    assert (env.unwrapped.seed == first) == (expected > 0), "the same episode"
    total = sum(np.float32(small(step)) for step in range(1, expected + 1))
    assert observation.tolist() == [env.unwrapped.seed, pytest.approx(total)]
    assert episode(env) == HORIZON - expected, "it is shorter by the repeated steps"


def test_clock_gives_the_new_episode_all_steps():
    env = started(Clocked())
    episode(env, best_step=35)
    env.reset()
    # the best step is before the first moment after the repeated steps: it adds nothing
    assert episode(env, best_step=6, largest=0.9) == HORIZON
    assert lengths(env) == [30]


def test_midway_starts_follow_one_another_up_to_some_horizons():
    env = started(Clocked())
    episode(env, best_step=35)
    for number in range(12):
        state = env.get_state()["midway"]
        best = {"source": 0, "num_repeated": lengths(env)[0]}
        env.env.set_state({**state, **best})  # the next episode begins from the best one
        env.reset()
        episode(env, best_step=25, largest=0.51 + 0.01 * number)
    assert lengths(env) == [150, 130, 110, 90, 70], "by 20 each; the next one is beyond 160"


def test_the_best_beginnings_are_kept_and_all_of_them_are_used():
    env, other = started(Hill(), fraction=0.0), not_started(Hill())
    rewards = [0.3, 0.9, 0.2, 0.5, 0.4, 0.8, 0.7]
    seeds = {}
    for reward in rewards:
        seeds[env.unwrapped.seed] = reward
        episode(env, 15, largest=reward)
        env.reset()
    continue_from(other, env)
    found = {other.reset() and seeds[other.unwrapped.seed] for _ in range(60)}
    assert found == set(sorted(rewards)[-NUM_BEGINNINGS:])


def test_a_reward_after_the_first_success_counts_nothing():
    env = started(Hill(success_from=0.8))
    for step in range(1, HORIZON + 1):
        reward = {15: 0.5, 25: 0.85, 35: 0.95}.get(step, 0.1)
        env.step(np.array([reward, 0.0], np.float32))
    assert lengths(env) == [10]


def test_with_each_success_episodes_may_begin_earlier_on_the_way():
    env = started(Hill(success_from=0.9))
    episode(env, 38)
    assert set(starts(env, 9)) == {30}
    for expected in ((20, 30), (10, 20, 30), (10, 20, 30)):
        episode(env, 5, largest=1.0)
        found = starts(env, 300)
        assert set(found) == set(expected)
        shares = [found.count(steps) / 300 for steps in expected]
        assert shares == pytest.approx([1 / len(expected)] * len(expected), abs=0.08)
    observation, _ = env.reset()
    total = sum(small(step) for step in range(1, env.unwrapped.steps + 1))
    assert observation[1] == pytest.approx(total, abs=1e-6)
    before = beginnings(env)
    episode(env, 8, largest=0.8)
    assert beginnings(env) == before, "a longer beginning is not needed"


@pytest.mark.parametrize(("largest", "share"), [(0.3, 0.6), (0.5, 0.0)])
def test_more_success_means_fewer_midway_starts(largest, share):
    env = started(Hill(success_from=0.4), fraction=0.6)
    num_midway = 0
    for _ in range(400):
        num_midway += env.is_midway
        episode(env, 25, largest=largest)
        env.reset()
    assert num_midway / 400 == pytest.approx(share, abs=0.08 if share else 0.03)


def test_a_task_without_a_success_signal_follows_its_score():
    spec = SPEC._replace(has_success=False, max_return=10.0)
    env = started(Hill(), fraction=0.0, spec=spec)
    for _ in range(60):
        episode(env, 15, largest=0.7)
        env.reset()
    score = (sum(small(step) for step in range(1, HORIZON + 1)) - small(15) + 0.7) / 10
    assert env.get_state()["midway"]["success"] == pytest.approx(score, rel=1e-4)


def test_seeded_reset_forgets_the_episodes_before():
    env = started(Hill(success_from=0.9), fraction=0.0)
    for best_step, largest in ((25, 0.5), (15, 1.0)):
        episode(env, best_step, largest)
        env.reset()
    assert beginnings(env) and env.get_state()["midway"]["success"]
    observation, _ = env.reset(seed=5)
    assert observation.tolist() == [5, 0.0]
    assert not beginnings(env) and not env.get_state()["midway"]["success"]


def test_reset_follows_where_repeating_diverges():
    env = started(Hill(repeats=False))
    episode(env, 25)
    with pytest.warns(UserWarning, match="StartMidway"):
        env.reset()
    assert env.unwrapped.steps == 0 and not beginnings(env)
    assert episode(env, 25) == HORIZON


@pytest.mark.parametrize("num_steps", [0, 13, HORIZON - 1])
@pytest.mark.parametrize(
    ("make", "fraction"), [(noisy, 0.5), (lambda: noisy(0.4), 0.5), (lambda: Clocked(0.9), 1.0)]
)
def test_restored_env_continues_as_uninterrupted(make, fraction, num_steps):
    env, other = started(make(), fraction), not_started(make(), fraction, seed=8)
    for _ in range(4):
        episode(env, 25)
        env.reset()
    if num_steps:
        episode(env, 11, num_steps=num_steps)
    continue_from(other, env)
    for _ in range(10):
        assert episode(env, 21, largest=0.95) == episode(other, 21, largest=0.95)
        (observation, _), (other_observation, _) = env.reset(), other.reset()
        assert observation.tolist() == other_observation.tolist()


def test_episodes_with_one_beginning_have_noise_of_their_own():
    env = started(noisy())
    episode(env, 25)
    starts, noise = [], []
    for _ in range(30):
        observation, _ = env.reset()
        starts.append(observation[:2].tolist())
        noise.append(env.step(np.zeros(2, np.float32))[0])
    assert starts == [starts[0]] * 30
    assert len({row[1] for row in noise}) == 30, "np_random"
    assert len({row[2] for row in noise}) == 30, "np.random"


def test_repeated_steps_are_counted_and_shorten_episodes():
    taken = []

    class CountSteps(gym.Wrapper):
        def step(self, action):
            taken.append(1)
            return super().step(action)

    benchmark = WithWrappers(ToyReach(2, HORIZON), [CountSteps])
    envs = VectorEnv(benchmark, [0, 1], num_workers=0, seed=3, midway_starts=0.5)
    envs.reset()
    running = RunningEpisodes(envs.task_E)
    results = run(envs, draw(envs, 20 * HORIZON))
    episodes = [one for result in results for one in running.add(result).values()]
    assert all(one.midway == (one.length < HORIZON) for one in episodes)
    repeated_steps = envs.take_repeated_steps()
    assert 0.1 < np.mean([one.midway for one in episodes]) < 0.6
    assert len(taken) == 2 * 20 * HORIZON + repeated_steps and repeated_steps > 0
    assert envs.take_repeated_steps() == 0
