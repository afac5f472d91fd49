from functools import partial
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.envs import GymnasiumTasks, ToyReach, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, Standardize
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.rollout import Collector, EpisodeListener
from mtrl_lightning.transitions import Episode, Transitions
from mtrl_lightning.utils.counters import Counters
from tests.helpers.altered_reach import FaultyReach
from tests.helpers.environments import assert_toy_steps, through_a_file
from tests.helpers.fakes import (
    Constant,
    Line,
    Numbering,
    Recorder,
    Scripted,
    Uniform,
    limited,
    scripted_length,
    scripted_return,
    scripted_success,
)


def scripted_episode(task, number, env=None):
    """Return an episode of ``Scripted``; by default the environment has the task's number."""
    return Episode(
        task,
        scripted_return(task, number),
        scripted_length(task, number),
        scripted_success(task, number, 0),
        scripted_success(task, number, scripted_length(task, number)),
        task if env is None else env,
    )


def scripted(tasks=(0, 1, 2), policy=None, **kwargs):
    envs = VectorEnv(Scripted(3), list(tasks), num_workers=0)
    return Collector(envs, Constant() if policy is None else policy, **kwargs)


def toy(policy=None, tasks=(0, 1, 2), horizon=6):
    envs = VectorEnv(ToyReach(3, horizon=horizon), list(tasks), num_workers=0)
    return Collector(envs, Uniform() if policy is None else policy)


class Diary(EpisodeListener):
    def __init__(self):
        self.lines = []
        self.samples = []

    def on_environment_created(self, env, task):
        self.lines.append(("built", env, task))

    def on_episode_created(self, env, task):
        self.lines.append(("created", env, task))

    def on_episode_started(self, env, task, observation_D):
        self.lines.append(("started", env, task, observation_D.tolist()))

    def on_episode_stepped(self, env, task, return_, length):
        self.lines.append(("stepped", env, task, return_, length))

    def on_episode_ended(self, env, episode):
        self.lines.append(("ended", env, episode))

    def on_sample_end(self, sample):
        self.samples.append((sample, len(self.lines)))


def test_transitions_and_listeners_follow_every_episode():
    tasks, diary = [0, 1, 2, 1], Diary()
    sample = scripted(tasks, Numbering(), listeners=[diary]).sample(num_steps=120, seed=0)
    transitions = sample.transitions
    assert all(len(field) == 120 for field in transitions[:-1])
    assert transitions.task_E.tolist() == tasks * 30
    for e, task in enumerate(tasks):
        mine = Transitions(*(field[e::4] for field in transitions[:-1]))
        episode, step = e, 0
        begun = [("created", e, task), ("started", e, task, [task, episode, 0, 0])]
        lines = [("built", e, task), *begun]
        for t in range(30):
            assert mine.observation_ED[t, :3].tolist() == [task, episode, step]
            assert mine.next_observation_ED[t, :3].tolist() == [task, episode, step + 1]
            assert mine.next_observation_ED[t, 3] == mine.action_EA[t, 0] == (4 * t + e + 1) / 1024
            step += 1
            done = step == scripted_length(task, episode)
            return_ = scripted_return(task, episode) if done else 0.0
            assert mine.terminated_E[t] == (done and task == 1)
            assert mine.truncated_E[t] == (done and task != 1)
            assert mine.reward_E[t] == return_
            lines.append(("stepped", e, task, return_, step))
            if done:
                lines.append(("ended", e, scripted_episode(task, episode, e)))
                episode, step = episode + 1, 0
                lines.append(("created", e, task))
                lines.append(("started", e, task, [task, episode, 0, 0]))
        assert [line for line in diary.lines if line[1] == e] == lines
    assert len(sample.episodes) > 20
    ((found, num_lines),) = diary.samples
    assert found is sample and num_lines == len(diary.lines)


class Careless:
    """Returns one array again and again, and writes into the observations that it is given.

    MetaWorld's scripted door-open policy does the latter.
    """

    def __init__(self):
        self.action_EA = np.zeros((3, 2), np.float32)

    def act(self, observation_ED, task_E, mode):
        observation_ED[:] += 0.05
        self.action_EA += 1 / 64
        return self.action_EA


def test_transitions_survive_a_policy_that_writes_into_arrays():
    policy = Recorder(Careless())
    transitions = scripted(policy=policy).sample(num_steps=60).transitions
    assert transitions.action_EA[:, 0].tolist() == np.repeat(np.arange(1, 21) / 64, 3).tolist()
    assert np.array_equal(np.concatenate(policy.observations), transitions.observation_ED)
    assert all(task_E.tolist() == [0, 1, 2] for task_E in policy.tasks)
    assert set(policy.modes) == {"explore"}


def test_steps_round_up_and_episodes_span_calls_or_are_dropped():
    counters = Counters(env_steps=100, vector_steps=50, updates=7, episodes=3)
    # lengths: task 0: 3 1 4 2, task 1: 1 4 2 6, task 2: 4 2 6 5
    collector = scripted(counters=counters)
    sizes, episodes = [], []
    for num_steps in (4, 1, 9):
        sample = collector.sample(num_steps=num_steps)
        sizes.append(len(sample.transitions.task_E))
        episodes.append(sample.episodes)
    assert sizes == [6, 3, 9]
    assert episodes[0] == [scripted_episode(1, 0)]
    assert episodes[1] == [scripted_episode(0, 0)]
    assert episodes[2] == [
        scripted_episode(0, 1),
        scripted_episode(2, 0),
        scripted_episode(1, 1),
        scripted_episode(2, 1),
    ]
    assert collector.counters is counters
    assert counters == Counters(env_steps=118, vector_steps=56, updates=7, episodes=9)
    assert collector.times.drain().keys() == {0, 1, 2}
    # all tasks are in their episodes 2
    forced = collector.sample(num_steps=12, force_reset=True)
    assert forced.transitions.observation_ED[:3, 1:3].tolist() == [[3, 0], [3, 0], [3, 0]]
    assert forced.episodes == [scripted_episode(0, 3)]


@pytest.mark.parametrize("number", [1, 7])
def test_episodes_are_as_many_as_requested_in_even_shares(number):
    collector = scripted()
    sample = collector.sample(num_episodes=number, seed=[0, 0, 0])
    again = collector.sample(num_episodes=3).transitions
    assert again.observation_ED[:3, 2].tolist() == [0, 0, 0], "the first steps of episodes"
    shares = [number // 3 + (task < number % 3) for task in range(3)]
    expected = [scripted_episode(task, k) for task in range(3) for k in range(shares[task])]
    assert sorted(sample.episodes) == expected
    transitions = sample.transitions
    for task in range(3):  # further steps of environments that finished early are dropped
        mine = transitions.task_E == task
        lengths = [scripted_length(task, k) for k in range(shares[task])]
        numbers = transitions.observation_ED[mine][:, 1].tolist()
        assert numbers == np.repeat(np.arange(shares[task]), lengths).tolist()
        done_E = (transitions.terminated_E | transitions.truncated_E)[mine]
        assert np.flatnonzero(done_E).tolist() == [end - 1 for end in np.cumsum(lengths)]


def test_either_steps_or_episodes_are_required():
    for numbers in ({}, {"num_steps": 1, "num_episodes": 1}, {"num_steps": 0}):
        with pytest.raises(ConfigurationError, match="num_steps"):
            scripted().sample(**numbers)


def small_sac(seed=0, width=4):
    small = partial(MLP, width=width, depth=1)
    return SAC(ToyReach(3).spec, actor=small, critic=small, encoder=Standardize, seed=seed)


@pytest.mark.parametrize("mode", ["explore", "random"])
def test_the_same_seed_gives_the_same_episodes(mode):
    collector = toy(LoadedPolicy(small_sac()))
    first = collector.sample(num_episodes=6, mode=mode, seed=3)
    collector.sample(num_steps=5, mode=mode)
    again = collector.sample(num_steps=36, mode=mode, seed=3)
    assert all(map(np.array_equal, first.transitions, again.transitions))
    assert first.episodes == again.episodes
    other = collector.sample(num_episodes=6, mode=mode, seed=4)
    assert not np.array_equal(first.transitions.action_EA[0], other.transitions.action_EA[0])
    by_list = collector.sample(num_episodes=6, mode=mode, seed=[3, 4, 5])
    assert np.array_equal(by_list.transitions.observation_ED[:3], first.transitions[0][:3])
    assert not np.array_equal(by_list.transitions.action_EA, first.transitions.action_EA)


def test_parts_of_the_state_can_be_taken_and_restored(monkeypatch):
    diary = Diary()
    fresh, resumed = scripted(window=2, listeners=[diary]), scripted()
    collector, other = scripted(window=2), scripted(window=2)
    state = collector.get_state()
    resumed.sample(num_steps=6)
    resumed.set_state(through_a_file(state))
    first = collector.sample(num_steps=24)
    assert resumed.sample(num_steps=24).episodes == first.episodes, "saved before the first reset"
    other.sample(num_steps=9)
    before = other.get_state(["episodes"])
    with monkeypatch.context() as patched:
        patched.setattr(VectorEnv, "get_state", None)  # the workers are not asked
        windows = collector.get_state(["windows", "listeners"])
    other.set_state(windows)
    assert other.windows.summary() == collector.windows.summary()
    assert other.get_state(["episodes"]) == before
    fresh.set_state(collector.get_state(["episodes"]))
    assert fresh.windows.summary() == {}
    assert fresh.sample(num_steps=30).episodes == collector.sample(num_steps=30).episodes
    assert diary.lines[3][0] == "stepped", "an episode that is continued does not start"


def test_state_of_other_envs_is_refused_without_a_change():
    collector, other = scripted([0, 1, 2, 1]), scripted([0, 2, 1, 1])
    collector.sample(num_steps=8)
    other.sample(num_steps=8)
    before = other.state_dict()
    with pytest.raises(ConfigurationError, match="tasks"):
        other.load_state_dict(collector.state_dict())
    assert other.state_dict() == before


def best(policy):
    return policy.act(np.full((3, 2), 0.3), np.arange(3), "exploit").tolist()


@pytest.mark.parametrize(("own", "given", "is_taken"), [(4, 5, True), (5, 5, False), (6, 0, True)])
def test_weights_are_taken_if_they_are_newer_and_0_forces(own, given, is_taken):
    learner, other = small_sac(1), small_sac(2)
    observation_ED = torch.tensor(toy().sample(num_steps=3).transitions.observation_ED)
    learner.encoder.observe(observation_ED, torch.zeros(len(observation_ED)))  # sent, too
    learner.counters.updates, other.counters.updates = given, own
    before, sent = best(other), best(learner)
    assert before != sent
    collector = toy(policy=LoadedPolicy(other), tasks=[0, 1])
    source = toy(policy=learner)
    source.send("random")  # a step may be under way
    state = source.get_state(["weights"])
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(1.0)
    collector.set_state(through_a_file(state))
    assert best(other) == (sent if is_taken else before)
    number = given if is_taken else own
    assert collector.sample(num_steps=2).weights_seq_no == collector.weights_seq_no == number


def test_other_weights_and_policies_without_are_refused():
    state = toy(policy=small_sac()).get_state(["weights"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        toy(policy=small_sac(width=5)).set_state(state)
    with pytest.raises(ConfigurationError, match="Uniform"):
        toy(policy=Uniform()).set_state(state)
    assert toy().sample(num_steps=3).weights_seq_no == 0


def test_fault_gives_no_false_transition():
    """The middle task breaks in its 47th step and, rebuilt, in the 47th after that."""
    num_steps, faults, diary = 100, [46, 93], Diary()
    envs = VectorEnv(FaultyReach("nan"), [0, 1, 2], num_workers=2, max_restarts=5)
    collector = Collector(envs, Numbering(), listeners=[diary])
    parts = [collector.step("explore") for _ in range(num_steps)]
    envs.close()
    for s, (transitions, _) in enumerate(parts):
        assert transitions.env_E.tolist() == ([2] if s in faults else [0, 1, 2])
        assert_toy_steps(*transitions[:4], transitions.task_E)
    for before, after in pairwise(transitions for transitions, _ in parts):
        for e in {*before.env_E} & {*after.env_E}:
            was, now = before.env_E == e, after.env_E == e
            continues = np.array_equal(before.next_observation_ED[was], after.observation_ED[now])
            assert continues != before.truncated_E[was]
    ended = [(e, episode.length) for _, of_step in parts for e, episode in of_step.items()]
    # 46 steps have two episodes, and so have the next 46; an undisturbed task has five in 100
    assert sorted(ended) == [(0, 20)] * 4 + [(1, 20)] * 4 + [(2, 20)] * 5
    assert collector.counters == Counters(
        env_steps=296, vector_steps=num_steps, episodes=13, dropped_transitions=4
    )
    begun = ["created", "started"]
    until_fault = [*[*["stepped"] * 20, "ended", *begun] * 2, *["stepped"] * 6]
    rebuilt = ["built", "stepped", *begun]
    assert [line[0] for line in diary.lines if line[1] == 1] == [
        *("built", *begun),
        *[*until_fault, *rebuilt] * 2,
        *["stepped"] * 6,
    ]


class Ending(Line):
    """Its episodes terminate after these numbers of steps, one after another."""

    def __init__(self, *lengths):
        super().__init__()
        self.lengths = cycle(lengths)

    def reset(self, *, seed=None, options=None):
        self.remaining = next(self.lengths)
        return super().reset(seed=seed)

    def step(self, action):
        self.remaining -= 1
        observation, reward, _, *rest = super().step(action)
        return observation, reward, self.remaining == 0, *rest


def test_episodes_that_all_terminate_at_one_length_warn_once(recwarn):
    tasks = {"fall": partial(Ending, 5, 3), "bandit": partial(Ending, 1), "limited": limited(3)}
    benchmark = GymnasiumTasks({"clock": partial(Ending, 3), **tasks}, horizon=9)
    envs = VectorEnv(benchmark, [0, 1, 2, 3], num_workers=0)
    collector = Collector(envs, Uniform(1))
    collector.sample(num_episodes=160, mode="exploit")
    assert not recwarn.list
    collector.sample(num_episodes=160)
    assert ["clock" in str(one.message) for one in recwarn] == [True]
