from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.envs import GymnasiumTasks, ToyReach, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import WithInfo
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP, Standardize
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.rollout import Collector, EpisodeListener
from mtrl_lightning.rollout.collector_state import COMPONENTS
from mtrl_lightning.transitions import Episode, Transitions
from mtrl_lightning.utils.counters import Counters
from tests.helpers import diary as kept
from tests.helpers.altered_reach import FaultyReach
from tests.helpers.environments import through_a_file
from tests.helpers.fakes import (
    Constant,
    Line,
    Named,
    Numbering,
    Recorder,
    ReplayedEnvs,
    Scripted,
    Seeker,
    Uniform,
    limited,
    scripted_length,
    scripted_return,
    scripted_success,
    step_result,
)


def scripted_episode(task, number, env=None):
    """Return an episode of ``Scripted``; where tasks are 0, 1, 2, environments have their place."""
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


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# ---- transitions ----


@pytest.mark.parametrize("workers", [0, 2])
def test_no_transition_crosses_an_episodes_end(workers):
    tasks = [0, 1, 2, 1]
    envs = VectorEnv(Scripted(3), tasks, num_workers=workers)
    collector = Collector(envs, Numbering())
    transitions = collector.sample(num_steps=120, seed=0).transitions
    envs.close()
    assert all(len(field) == 120 for field in transitions[:-1])
    assert transitions.task_E.tolist() == tasks * 30
    ends = 0
    for e, task in enumerate(tasks):
        mine = Transitions(*(field[e::4] for field in transitions[:-1]))
        episode, step = e, 0
        for t in range(30):
            assert mine.observation_ED[t, :3].tolist() == [task, episode, step]
            assert mine.next_observation_ED[t, :3].tolist() == [task, episode, step + 1]
            assert mine.next_observation_ED[t, 3] == mine.action_EA[t, 0] == (4 * t + e + 1) / 1024
            done = step + 1 == scripted_length(task, episode)
            assert mine.terminated_E[t] == (done and task == 1)
            assert mine.truncated_E[t] == (done and task != 1)
            assert mine.reward_E[t] == (scripted_return(task, episode) if done else 0)
            if t + 1 < 30:
                continues = np.array_equal(mine.next_observation_ED[t], mine.observation_ED[t + 1])
                assert continues != done
            episode, step, ends = (episode + 1, 0, ends + 1) if done else (episode, step + 1, ends)
    assert ends > 20


def test_policy_sees_the_stored_observation():
    policy = Recorder(Uniform())
    collector = scripted(policy=policy)
    transitions = collector.sample(num_steps=60).transitions
    assert np.array_equal(np.concatenate(policy.observations), transitions.observation_ED)
    assert all(task_E.tolist() == [0, 1, 2] for task_E in policy.tasks)
    done_E = transitions.terminated_E | transitions.truncated_E
    assert collector.envs.get_attr("num_resets") == tuple(1 + done_E[e::3].sum() for e in range(3))


def test_transitions_survive_a_policy_reusing_its_array():
    class Reusing:
        def __init__(self):
            self.action_EA = np.zeros((3, 2), np.float32)

        def act(self, observation_ED, task_E, mode):
            self.action_EA += 1 / 64
            return self.action_EA

    transitions = scripted(policy=Reusing()).sample(num_steps=12).transitions
    assert transitions.action_EA[:, 0].tolist() == [
        k / 64 for k in (1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4)
    ]
    first, second = (collector_step[0] for collector_step in _two_steps(scripted(policy=Reusing())))
    assert first.action_EA[0, 0] == 1 / 64
    assert second.action_EA[0, 0] == 2 / 64


def _two_steps(collector):
    return [collector.step("explore"), collector.step("explore")]


def test_between_send_and_receive_the_caller_may_work():
    together, apart = toy(), toy()
    together.reset(seed=1)
    apart.reset(seed=1)
    for _ in range(8):
        expected = together.step("explore")
        apart.send("explore")
        transitions, ended = apart.receive()
        assert same(transitions, expected[0])
        assert ended == expected[1]
    apart.send("explore")
    for misuse in (lambda: apart.send("explore"), apart.reset, apart.state_dict):
        with pytest.raises(AssertionError):
            misuse()
    apart.receive()
    with pytest.raises(AssertionError):
        apart.receive()


def test_restarted_workers_step_is_dropped_and_not_counted():
    go, stop = [False, False], [True, True]
    results = [
        step_result([1.0, 10.0], go, go, go, [True, True]),
        step_result([2.0, 20.0], go, go, go, [False, True]),
        step_result([4.0, 40.0], go, stop, go, [True, True]),
    ]
    collector = Collector(ReplayedEnvs([0, 1], results), Constant())
    steps = [collector.step("explore") for _ in results]
    assert [transitions.reward_E.tolist() for transitions, _ in steps] == [[1, 10], [20], [4, 40]]
    assert [transitions.task_E.tolist() for transitions, _ in steps] == [[0, 1], [1], [0, 1]]
    assert steps[2][1] == {
        0: Episode(0, 4.0, 1, False, False, env=0),
        1: Episode(1, 70.0, 3, False, False, env=1),
    }
    assert collector.counters == Counters(
        env_steps=5, vector_steps=3, updates=0, episodes=2, dropped_transitions=1
    )
    assert collector.windows.summary()[0]["return"]["mean"] == 4.0


# ---- sample ----


def test_steps_round_up_and_episodes_span_calls():
    collector = scripted()  # lengths: task 0: 3 1 4 2, task 1: 1 4 2 6, task 2: 4 2 6 5
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
    assert collector.counters == Counters(env_steps=18, vector_steps=6, updates=0, episodes=6)


@pytest.mark.parametrize("number", [1, 3, 7, 12])
def test_episodes_are_exactly_as_many_as_asked_in_even_shares(number):
    tasks = [0, 1, 2]
    collector = scripted(tasks)
    sample = collector.sample(num_episodes=number, seed=[0, 0, 0])
    shares = [number // 3 + (e < number % 3) for e in range(3)]
    expected = [
        scripted_episode(task, k)
        for task, share in zip(tasks, shares, strict=True)
        for k in range(share)
    ]
    assert sorted(sample.episodes) == sorted(expected)
    assert len(sample.episodes) == number
    for task in tasks:  # the surplus of environments that were ready early is dropped
        mine = sample.transitions.task_E == task
        numbers = sample.transitions.observation_ED[mine][:, 1]
        lengths = [scripted_length(task, k) for k in range(shares[task])]
        assert numbers.tolist() == [k for k, length in enumerate(lengths) for _ in range(length)]
        done_E = (sample.transitions.terminated_E | sample.transitions.truncated_E)[mine]
        assert np.flatnonzero(done_E).tolist() == [end - 1 for end in np.cumsum(lengths)]


def test_force_reset_drops_running_episodes():
    collector = scripted()
    # tasks 0 and 2 are in their episode 0, task 1 in its episode 1; see above
    collector.sample(num_steps=6)
    plain = collector.sample(num_steps=3)
    assert plain.transitions.observation_ED[:, 1:3].tolist() == [[0, 2], [1, 1], [0, 2]]
    # now tasks 0 and 2 are at the beginning of their episodes 2 and 1
    collector.sample(num_steps=3)
    forced = collector.sample(num_steps=12, force_reset=True)
    assert forced.transitions.observation_ED[:3, 1:3].tolist() == [[3, 0], [2, 0], [2, 0]]
    assert forced.episodes == [scripted_episode(0, 3), scripted_episode(1, 2)]


def test_seed_decides_the_episodes():
    collector = toy(policy=Seeker(3))
    first = collector.sample(num_steps=30, seed=3)
    again = collector.sample(num_steps=30, seed=3)
    other = collector.sample(num_steps=30, seed=4)
    assert same(first.transitions, again.transitions)
    assert first.episodes == again.episodes != other.episodes
    fresh = toy(policy=Seeker(3)).sample(num_episodes=6, seed=3)
    assert fresh.episodes == collector.sample(num_episodes=6, seed=3).episodes
    assert fresh.episodes[:3] == first.episodes, "however they are collected"
    assert all(episode.length == 6 for episode in first.episodes)


@pytest.mark.parametrize("mode", ["explore", "exploit", "random"])
def test_the_mode_reaches_the_policy(mode):
    policy = Recorder()
    collector = scripted(policy=policy)
    collector.sample(num_steps=6, mode=mode)
    collector.sample(num_episodes=3, mode=mode)
    collector.step(mode)
    assert set(policy.modes) == {mode}
    collector.sample(num_steps=1)
    assert policy.modes[-1] == "explore", "the default"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_steps": 1, "num_episodes": 1},
        {"num_steps": 0},
        {"num_episodes": 0},
    ],
)
def test_bad_numbers_are_refused_before_anything_is_stepped(arguments):
    policy = Recorder()
    collector = scripted(policy=policy)
    with pytest.raises(ConfigurationError, match=r"num_steps|num_episodes"):
        collector.sample(**arguments)
    assert not policy.modes


def test_surplus_is_dropped_in_a_step_with_a_restart():
    go = [False, False, False]
    results = [
        step_result([1, 10, 100], go, [True, False, False], go, [True, True, True]),
        step_result([2, 20, 200], go, go, go, [True, True, False]),
        step_result([4, 40, 400], go, [False, True, True], go, [True, True, True]),
    ]
    collector = Collector(ReplayedEnvs([0, 1, 2], results), Constant())
    sample = collector.sample(num_episodes=3)
    assert sorted(sample.transitions.reward_E.tolist()) == [1, 10, 20, 40, 100, 400]
    assert [episode.return_ for episode in sample.episodes] == [1, 70, 400]


# ---- counters, windows, listeners ----


def test_counters_are_shared_and_counted_by_hand():
    counters = Counters(env_steps=100, vector_steps=50, updates=7, episodes=3)
    collector = scripted(counters=counters)
    collector.sample(num_steps=12)  # after 4 steps: task 0 ended 2 episodes, task 1 one, task 2 one
    assert counters == Counters(env_steps=112, vector_steps=54, updates=7, episodes=7)
    assert collector.counters is counters


class Diary(EpisodeListener):
    def __init__(self):
        self.lines, self.samples = [], []

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


def test_listeners_hear_of_every_episode_in_order():
    diary, tasks = Diary(), [2, 1, 0]
    collector = scripted(tasks, listeners=[diary])
    sample = collector.sample(num_steps=30, seed=[0, 0, 0])
    for e, task in enumerate(tasks):
        expected = []
        episode = 0
        step = 0
        for _ in range(10):
            if step == 0:
                expected += [("created", e, task), ("started", e, task, [task, episode, 0, 0])]
            step += 1
            last = step == scripted_length(task, episode)
            expected.append(
                ("stepped", e, task, scripted_return(task, episode) if last else 0.0, step)
            )
            if last:
                expected.append(("ended", e, scripted_episode(task, episode, e)))
                episode, step = episode + 1, 0
        if step == 0:  # the next one has begun at once
            expected += [("created", e, task), ("started", e, task, [task, episode, 0, 0])]
        assert [line for line in diary.lines if line[1] == e] == expected
    assert diary.samples == [(sample, len(diary.lines))]
    assert diary.samples[0][0] is sample


# ---- continuation ----


@pytest.mark.parametrize(
    ("workers", "before"), [((0, 0), 0), ((0, 2), 3), ((0, 0), 6), ((0, 0), 8)]
)
def test_state_continues_bit_exact_in_mid_episode(workers, before):
    """Another number of workers, seed and past: the next steps are the uninterrupted run's."""
    first, second = (
        VectorEnv(ToyReach(3, horizon=6), [0, 1, 2, 1], seed=s, num_workers=n)
        for s, n in zip((3, 4), workers, strict=True)
    )
    collector = Collector(first, Uniform(), window=3)
    resumed = Collector(second, Uniform(seed=1), window=3)
    collector.reset()
    if before:
        collector.sample(num_steps=4 * before)
    resumed.sample(num_steps=4 * 5)
    state = through_a_file(collector.state_dict())
    collector.policy, resumed.policy = Uniform(seed=9), Uniform(seed=9)
    expected = collector.sample(num_steps=4 * 20)
    resumed.load_state_dict(state)
    found = resumed.sample(num_steps=4 * 20)
    first.close()
    second.close()
    assert same(found.transitions, expected.transitions)
    types, expected_types = (
        {name: column.dtype for name, column in sample.transitions.columns().items()}
        for sample in (found, expected)
    )
    assert types == expected_types
    assert found.episodes == expected.episodes
    assert len(found.episodes) == 4 * (3 + (before % 6 >= 4))
    assert resumed.windows.summary() == collector.windows.summary() != {}


def test_state_keeps_windows_and_running_sums():
    collector, resumed = scripted(window=2), scripted(window=2)
    collector.sample(num_steps=3 * 9)
    state = collector.state_dict()
    saved = through_a_file(state)
    collector.sample(num_steps=3 * 4)
    assert state == saved, "taken, and not shared"
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert any(resumed.state_dict()["running"]["per_env"]["length"]), "in the middle of an episode"


def test_a_collector_that_has_not_begun_is_restored_as_one():
    collector, resumed = toy(), toy()
    state = through_a_file(collector.state_dict())
    resumed.sample(num_steps=9, seed=8)
    resumed.load_state_dict(state)
    expected, found = collector.sample(num_steps=30), resumed.sample(num_steps=30)
    assert (
        expected.transitions.observation_ED.tolist()[0]
        == found.transitions.observation_ED.tolist()[0]
    )
    assert len(found.episodes) == len(expected.episodes) == 3


def test_restored_listeners_hear_the_rest_of_the_episode():
    diary, later = Diary(), Diary()
    collector, resumed = scripted([2], listeners=[diary]), scripted([2], listeners=[later])
    collector.sample(num_steps=2, seed=[0])  # of the four of episode 2 of task 2
    resumed.load_state_dict(through_a_file(collector.state_dict()))
    diary.lines.clear()
    expected, found = collector.sample(num_steps=7), resumed.sample(num_steps=7)
    assert same(found.transitions, expected.transitions)
    assert later.lines == diary.lines
    assert [line[0] for line in later.lines][:2] == ["stepped", "stepped"]
    assert later.lines[0] == ("stepped", 0, 2, 0.0, 3)


@pytest.mark.parametrize("tasks", [[0, 1], [0, 2, 1, 1]])
def test_state_of_other_envs_is_refused_without_a_change(tasks):
    collector, other = scripted([0, 1, 2, 1]), scripted(tasks)
    collector.sample(num_steps=8)
    other.sample(num_steps=8)
    before = other.state_dict()
    with pytest.raises(ConfigurationError, match=r"data\.exclude_from_training"):
        other.load_state_dict(collector.state_dict())
    assert other.state_dict() == before


# ---- weights ----


def seeker(seed, **options):
    small = partial(MLP, width=4, depth=1)
    return SAC(
        ToyReach(3).spec,
        actor=small,
        critic=small,
        encoder=Standardize,
        seed=seed,
        **options,
    )


def best(policy):
    return policy.act(np.full((3, 2), 0.3), np.arange(3), "exploit").tolist()


@pytest.mark.parametrize(
    ("own", "given", "is_taken"),
    [(4, 5, True), (5, 5, False), (6, 5, False), (6, 0, True), (0, 0, True)],
)
def test_weights_are_taken_if_they_are_newer_and_0_forces(own, given, is_taken):
    learner, other = seeker(1), seeker(2)
    observation_ED = torch.tensor(toy().sample(num_steps=3).transitions.observation_ED)
    learner.encoder.observe(observation_ED, torch.zeros(len(observation_ED)))  # sent, too
    learner.counters.updates, other.counters.updates = given, own
    before, sent = best(other), best(learner)
    assert before != sent
    collector = toy(policy=LoadedPolicy(other), tasks=[0, 1])
    source = toy(policy=learner)
    source.send("random")  # a step may be under way
    collector.set_state(through_a_file(source.get_state(["weights"])))
    assert best(other) == (sent if is_taken else before)
    number = given if is_taken else own
    assert collector.sample(num_steps=2).weights_seq_no == collector.weights_seq_no == number


def test_sent_weights_do_not_change_with_the_learner():
    learner, other = seeker(1), seeker(2)
    sent = best(learner)
    state = toy(policy=learner).get_state(["weights"])
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(1.0)
    toy(policy=other).set_state(state)
    assert best(other) == sent


def test_weights_are_in_the_state_only_on_request():
    collector, resumed = toy(policy=seeker(1)), toy(policy=seeker(2))
    collector.sample(num_steps=3)
    assert not {"weights", "weights_seq_no"} & {*collector.state_dict()}, "the checkpoint has them"
    resumed.set_state(collector.get_state([*COMPONENTS, "weights"]))
    assert best(resumed.policy) == best(collector.policy)
    assert resumed.state_dict() == collector.state_dict()


def test_other_weights_and_policies_without_are_refused():
    other = SAC(ToyReach(3).spec, actor=partial(MLP, width=5), critic=partial(MLP, width=4))
    state = toy(policy=seeker(1)).get_state(["weights"])
    with pytest.raises(ConfigurationError, match="actor"):
        toy(policy=other).set_state(state)
    assert toy().sample(num_steps=3).weights_seq_no == 0
    for call in (lambda: toy().get_state(["weights"]), lambda: toy().set_state(state)):
        with pytest.raises(ConfigurationError, match="Uniform"):
            call()


# ---- faults ----


def toy_step(observation_D, action_A):
    """Where a point goes, computed as the environment does, but from what the transition says."""
    return np.clip(observation_D.astype(np.float64) + 0.2 * np.clip(action_A, -1, 1), -1, 1)


def assert_true_transitions(transitions, num_tasks):
    """Every transition of ``ToyReach`` is one that its dynamics give."""
    angle_E = 2 * np.pi * transitions.task_E / num_tasks
    goal_ED = 0.7 * np.stack([np.cos(angle_E), np.sin(angle_E)], axis=1)
    wanted_ED = toy_step(transitions.observation_ED, transitions.action_EA)
    np.testing.assert_allclose(transitions.next_observation_ED, wanted_ED, rtol=0, atol=3e-7)
    distance_E = np.linalg.norm(wanted_ED - goal_ED, axis=1)
    np.testing.assert_allclose(transitions.reward_E, 1 - distance_E, rtol=0, atol=5e-7)


@pytest.mark.parametrize(("workers", "kind"), [(0, "nan"), (0, "inf"), (0, "raise"), (3, "raise")])
def test_fault_gives_no_false_transition(workers, kind):
    """The middle task breaks in its 47th step and, made anew, in the 47th after that."""
    horizon, num_steps = 20, 100
    counters, diary = Counters(), Diary()

    def restarted(_):
        counters.worker_restarts += 1

    envs = VectorEnv(
        FaultyReach(kind), [0, 1, 2], num_workers=workers, max_restarts=5, on_restart=restarted
    )
    broken = range(3) if workers < 2 else [1]  # the rows of the group that breaks
    collector = Collector(envs, Numbering(), counters=counters, listeners=[diary])
    parts = [collector.step("explore") for _ in range(num_steps)]
    envs.close()
    faults = [46, 93]
    for s, (transitions, _) in enumerate(parts):
        expected = [e for e in range(3) if not (s in faults and e in broken)]
        assert transitions.task_E.tolist() == expected
        assert_true_transitions(transitions, 3)
    for e in range(3):
        mine = [
            Transitions(*(f[t.task_E == e] for f in t[:-1])) if e in t.task_E else None
            for t, _ in parts
        ]
        length = 0
        for s in range(num_steps):
            if mine[s] is None:
                length = 0
                continue
            length += 1
            number = (3 * s + e + 1) / 1024
            assert mine[s].action_EA[0, 0] == np.float32(number), "an action belongs to its step"
            assert mine[s].truncated_E[0] == (length == horizon)
            if s + 1 < num_steps and mine[s + 1] is not None:
                follows = np.array_equal(mine[s].next_observation_ED, mine[s + 1].observation_ED)
                assert follows == (length < horizon)
            length = length % horizon
    dropped = 2 * len(broken)
    assert counters.dropped_transitions == dropped
    assert counters.env_steps == 3 * num_steps - dropped == sum(len(t.task_E) for t, _ in parts)
    assert counters.vector_steps == num_steps
    assert counters.worker_restarts == envs.num_restarts == 2
    episodes = [episode for _, ended in parts for episode in ended.values()]
    assert counters.episodes == len(episodes)
    assert {episode.length for episode in episodes} == {horizon}
    # 46 steps have two episodes, and so have the next 46; an undisturbed task has five in 100
    counts = [sum(episode.task == e for episode in episodes) for e in range(3)]
    assert counts == [4 if e in broken else 5 for e in range(3)]
    assert {window["length"]["min"] for window in collector.windows.summary().values()} == {horizon}
    heard = [line for line in diary.lines if line[0] == "ended"]
    assert sorted(line[2] for line in heard) == sorted(episodes)
    begun = [line for line in diary.lines if line[0] == "started" and line[1] == 1]
    assert len(begun) == 1 + 4 + 2, "the first, one after each end and one after each fault"


def test_episodes_asked_by_number_are_complete_despite_a_fault():
    envs = VectorEnv(FaultyReach("raise"), [0, 1, 2], num_workers=0, max_restarts=5)
    sample = Collector(envs, Uniform()).sample(num_episodes=12)
    assert sorted((episode.task, episode.length) for episode in sample.episodes) == sorted(
        (task, 20) for task in range(3) for _ in range(4)
    )
    assert envs.num_restarts >= 1
    assert_true_transitions(sample.transitions, 3)


class Scribbling(Uniform):
    """Writes into the observations that it is given, as MetaWorld's scripted door-open policy."""

    def act(self, observation_ED, task_E, mode):
        action_EA = super().act(observation_ED, task_E, mode)
        observation_ED[:] += 0.05
        return action_EA


def test_policy_writing_into_observations_is_harmless():
    collector = toy(Scribbling())
    former = None
    for _ in range(5):
        transitions, _ = collector.step("explore")
        if former is not None:
            assert np.array_equal(transitions.observation_ED, former.next_observation_ED)
        former = transitions
    collector.envs.close()


# ---- seeds of the policy, parts of the state, other environments ----


@pytest.fixture(scope="module")
def algorithm():
    return SAC(ToyReach(3).spec, actor=partial(MLP, width=8), critic=partial(MLP, width=8))


@pytest.mark.parametrize("mode", ["explore", "random"])
@pytest.mark.parametrize("kind", ["algorithm", "loaded"])
def test_the_same_seed_gives_the_same_explored_episodes(algorithm, kind, mode):
    policy = LoadedPolicy(algorithm) if kind == "loaded" else algorithm
    collector = toy(policy)
    first = collector.sample(num_episodes=6, mode=mode, seed=3)
    collector.sample(num_steps=5, mode=mode)
    again = collector.sample(num_episodes=6, mode=mode, seed=3)
    other = collector.sample(num_episodes=6, mode=mode, seed=4)
    assert same(first.transitions, again.transitions)
    assert not np.array_equal(first.transitions.action_EA[0], other.transitions.action_EA[0])
    by_list = collector.sample(num_episodes=6, mode=mode, seed=[3, 4, 5])
    assert np.array_equal(by_list.transitions.observation_ED[:3], first.transitions[0][:3])
    assert not same(by_list.transitions, first.transitions), "the actions are of another seed"


def test_without_a_seed_the_policy_draws_on(algorithm):
    collector = toy(algorithm)
    first = collector.sample(num_episodes=3)
    collector.reset(seed=0)
    state = algorithm.generators.state_dict()["per_rank"][0]["act"]["state"].clone()
    collector.reset(seed=0)
    assert torch.equal(algorithm.generators.state_dict()["per_rank"][0]["act"]["state"], state)
    assert not same(first.transitions, collector.sample(num_episodes=3).transitions)


def test_parts_of_the_state_can_be_taken_and_restored(monkeypatch):
    collector, other = scripted(window=2), scripted(window=2)
    collector.sample(num_steps=24)
    other.sample(num_steps=9)
    before = other.get_state(["episodes"])
    with monkeypatch.context() as patched:
        patched.setattr(VectorEnv, "get_state", None)  # the workers are not asked
        parts = ["windows", "listeners", "action_transforms", "exploration", "reuse"]
        windows = through_a_file(collector.get_state(parts))
    assert set(windows) == {"per_env", *parts}
    other.set_state(windows)
    assert other.windows.summary() == collector.windows.summary()
    assert other.get_state(["episodes"]) == before
    episodes = through_a_file(collector.get_state(["episodes"]))
    fresh = scripted(window=2)
    fresh.set_state(episodes)
    assert fresh.windows.summary() == {}
    assert fresh.sample(num_steps=30).episodes == collector.sample(num_steps=30).episodes
    assert set(collector.state_dict()) == {*windows, *episodes}


@pytest.mark.parametrize("workers", [0, 2])
def test_environments_are_remade_with_a_changed_benchmark(workers):
    """One vector step is dropped; the transitions before and after are of whole episodes."""
    diary = Diary()
    envs = VectorEnv(ToyReach(3, horizon=6), [0, 1, 2], num_workers=workers)
    collector = Collector(envs, Uniform(), listeners=[diary])
    first = collector.sample(num_steps=3 * 10)
    assert {episode.length for episode in first.episodes} == {6}
    pids = envs.worker_pids
    collector.remake_envs(ToyReach(3, horizon=4))
    assert not set(pids) & set(envs.worker_pids)
    diary.lines.clear()
    second = collector.sample(num_steps=3 * 9)
    begins = [line for line in diary.lines if line[0] == "started"]
    envs.close()
    assert len(second.transitions.task_E) == 3 * 8
    assert [episode.length for episode in second.episodes] == [4] * 6
    assert collector.counters.env_steps == 3 * 18 and collector.counters.dropped_transitions == 3
    starts = second.transitions.observation_ED[:3]
    former = first.transitions.observation_ED.tolist()
    assert not any(start in former for start in starts.tolist()), "other draws"
    assert np.array_equal(starts, [line[3] for line in begins[:3]])
    assert_true_transitions(second.transitions, 3)


def test_a_benchmark_whose_attributes_have_changed_is_remade_too():
    benchmark = WithInfo(ToyReach(3, horizon=6), ["success"])
    collector = Collector(VectorEnv(benchmark, [0, 1, 2], num_workers=0), Uniform())
    collector.sample(num_steps=6)
    benchmark.benchmark.horizon = 3
    collector.remake_envs()
    assert {episode.length for episode in collector.sample(num_episodes=6).episodes} == {3}
    collector.remake_envs(ToyReach(3, horizon=2))
    (episode, *_) = collector.sample(num_episodes=3).episodes
    assert (episode.length, episode.info) == (2, {"success": 0.0, "success_last": 0.0})


@pytest.mark.parametrize("benchmark", [ToyReach(2), WithInfo(ToyReach(3), ["success"])])
def test_another_benchmark_is_refused_and_the_previous_one_stays(benchmark):
    collector = toy()
    collector.sample(num_steps=6)
    with pytest.raises(ConfigurationError):
        collector.remake_envs(benchmark)
    assert len(collector.sample(num_steps=9).transitions.task_E) == 9


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_listeners_are_called_for_every_built_env(workers):
    diary = kept.Diary()
    envs = VectorEnv(FaultyReach("raise"), [0, 1, 2], num_workers=workers, max_restarts=5)
    collector = Collector(envs, Uniform(), listeners=[diary])
    assert diary.lines == []
    collector.step("explore")
    assert diary.lines == [*[("built", e, e) for e in range(3)], *created(0, 1, 2)]
    diary.lines.clear()
    for _ in range(46):  # the middle one breaks in its 47th step
        collector.step("explore")
    rebuilt = [e for e in range(3) if workers == 0 or e == 1]
    place = diary.lines.index(("built", rebuilt[0], rebuilt[0]))
    assert diary.lines[place:] == [*[("built", e, e) for e in rebuilt], *created(*rebuilt)]
    diary.lines.clear()
    collector.remake_envs()
    collector.step("explore")
    assert [line for line in diary.lines if line[0] == "built"] == [
        ("built", e, e) for e in range(3)
    ]
    resumed_diary = kept.Diary()
    others = VectorEnv(FaultyReach("raise"), [0, 1, 2], num_workers=0, max_restarts=5)
    resumed = Collector(others, Uniform(), listeners=[EpisodeListener(), resumed_diary])
    resumed.load_state_dict(through_a_file(collector.state_dict()))
    assert resumed_diary.num_ended == diary.num_ended > 5
    resumed.step("explore")
    assert [line[0] for line in resumed_diary.lines] == ["built"] * 3, "no episode begins"
    envs.close()


def created(*envs):
    return [("created", e, e) for e in envs]


def test_tasks_are_matched_by_name():
    toy = ToyReach(3)
    spec = toy.spec._replace(task_names=("goal-2", "goal-0", "goal-1"))
    envs = VectorEnv(toy, [0, 2, 2], num_workers=0)
    policy = Named(Constant(), spec)
    collector = Collector(envs, policy)
    collector.step("explore")
    assert policy.tasks[-1].tolist() == [1, 0, 0]
    transitions, _ = collector.step("explore")
    assert transitions.task_E.tolist() == [0, 2, 2], "the benchmark's numbers are stored"
    collector.policy = Named(Constant(), toy.spec)
    collector.step("explore")
    assert collector.policy.tasks[-1].tolist() == [0, 2, 2]


# ---- time limits that are reported as terminations ----


class Ending(Line):
    """Its episodes terminate after ``length`` steps, and those of even number two later."""

    def __init__(self, length, num_more=0):
        super().__init__()
        self.length, self.num_more, self.episode = length, num_more, 0

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        length = self.length + self.num_more * (self.episode % 2)
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self.steps == length, truncated, info


def test_episodes_that_all_terminate_at_one_length_warn_once(recwarn):
    tasks = {
        "clock": partial(Ending, 3),
        "fall": partial(Ending, 3, 2),
        "limited": limited(3),
        "bandit": partial(Ending, 1),
    }
    envs = VectorEnv(GymnasiumTasks(tasks, horizon=9), [0, 1, 2, 3], num_workers=0)
    collector = Collector(envs, Uniform(1))
    collector.sample(num_episodes=160)
    assert [("clock" in str(one.message)) for one in recwarn] == [True]
