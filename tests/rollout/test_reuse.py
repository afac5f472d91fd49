"""Episodes in which another task's policy acts: who acts where, and who learns from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from mtrl_lightning.algorithms import PPO
from mtrl_lightning.data import RolloutData
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.rollout import Collector, PolicyReuse, StartMidway
from mtrl_lightning.rollout.episodes import EpisodeWindows
from mtrl_lightning.transitions import Episode
from tests.helpers.fakes import Scripted
from tests.helpers.fitting import QUIET, SMALL

TASKS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
SPEC = ToyReach(3).spec


def windows_with(*success_of_task, num_episodes=20):
    """The windows after episodes of which a fraction has succeeded."""
    windows = EpisodeWindows(len(success_of_task), 50)
    for task, success in enumerate(success_of_task):
        successes = np.arange(num_episodes) >= num_episodes * (1 - success)
        windows.add(Episode(task, 0.0, 10, bool(s), bool(s), env=100 + task) for s in successes)
    return windows


def begun(reuse, tasks=TASKS, spec=SPEC, seed=0):
    reuse.begin(spec, np.array(tasks))
    reuse.seed(seed)
    return reuse


def with_results(reuse, *results):
    """Give it results of other policies: task, acting task, success, return."""
    lists = [[own, acting, [[success, return_]]] for own, acting, success, return_ in results]
    reuse.load_state_dict({**reuse.state_dict(), "results": lists})
    return reuse


def always(tasks=TASKS, spec=SPEC):
    """Another policy acts in all episodes of a task without success, if there is a solved task."""
    pairs = [(own, other, 1.0, 9.0) for own in range(3) for other in range(3)]
    return with_results(begun(PolicyReuse(0.9), tasks, spec), *pairs)


def everywhere(reuse):
    return np.ones(len(reuse.acting_task_E), np.bool_)


def test_solved_tasks_act_in_all_but_the_first_env():
    reuse = always()
    reuse.start_episodes(everywhere(reuse), {}, windows_with(0.0, 1.0, 0.0))
    assert reuse.acting_task_E.tolist() == [0, 1, 1, 1, 1, 1, 2, 1, 1]
    assert reuse.is_foreign_E.tolist() == [False, True, True] + [False] * 4 + [True, True]
    assert reuse.fractions() == pytest.approx({0: 2 / 3, 1: 0.0, 2: 2 / 3})


def test_environments_in_an_episode_keep_their_policy():
    reuse = always()
    reuse.start_episodes(np.arange(9) == 1, {}, windows_with(0.0, 1.0, 0.0))
    assert reuse.acting_task_E.tolist() == [0, 1, 0, 1, 1, 1, 2, 2, 2]
    reuse.start_episodes(np.arange(9) == 1, {}, windows_with(0.6, 1.0, 0.0))
    assert reuse.acting_task_E.tolist() == TASKS, "it has been solved since"


def shares(*results, success=(0.25, 1.0, 1.0)):
    """How often the policies of tasks 1 and 2 are chosen for an episode of task 0."""
    num_envs = 10_000
    reuse = with_results(begun(PolicyReuse(0.4), [0] * num_envs + [1, 2, 2]), *results)
    reuse.start_episodes(everywhere(reuse), {}, windows_with(*success))
    acting_E = reuse.acting_task_E[:num_envs]
    return [pytest.approx(np.mean(acting_E == task), abs=0.01) for task in (1, 2)]


def test_less_success_means_more_reuse():
    # 0.1 times 1 - success, of which each of two has a half
    assert shares() == [0.0375, 0.0375]
    # and 0.4 times 1 - success for the best one
    results = [(0, 1, 0.3, 9.0), (0, 2, 0.5, 1.0)]
    assert shares(*results) == [0.0375, 0.0375 + 0.3]
    assert shares(*results, success=(0.0, 1.0, 1.0)) == [0.05, 0.05 + 0.4]
    # the best one has unlearned its own task
    assert shares(*results, success=(0.25, 1.0, 0.4)) == [0.075 + 0.3, 0.0]


def test_policy_that_is_no_better_is_only_tried():
    # the own policy has a success of 0.25 and returns of 0
    assert shares((0, 1, 0.2, 99.0), (0, 2, 0.25, 0.0)) == [0.0375, 0.0375]
    assert shares((0, 1, 0.2, 99.0), (0, 2, 0.25, 0.1)) == [0.0375, 0.0375 + 0.3]


def test_those_that_have_been_tried_least_are_tried_first():
    assert shares((0, 1, 0.0, -1.0)) == [0.0, 0.075]
    assert shares((0, 1, 0.0, 1.0), success=(0.0, 1.0, 1.0)) == [0.4, 0.1]


def test_without_a_success_the_return_decides():
    results = [(0, 1, 0.0, 2.0), (0, 2, 0.0, 1.0)]
    assert shares(*results, success=(0.0, 1.0, 1.0)) == [0.05 + 0.4, 0.05]


def test_policy_is_judged_by_its_last_five_full_episodes():
    reuse = begun(PolicyReuse())

    def end(acting, return_, success=False, midway=False):
        """End an episode in the second environment."""
        reuse.acting_task_E = np.array([0, acting, 0, 1, 1, 1, 2, 2, 2])
        ended = {1: Episode(0, return_, 10, success, False, 1, midway=midway)}
        reuse.start_episodes(np.zeros(9, np.bool_), ended, windows_with(0.0, 1.0, 1.0))
        return reuse.state_dict()["results"]

    assert end(1, 5.0) == [[0, 1, [[0.0, 5.0]]]]
    for return_ in range(4):
        results = end(1, float(return_), success=True)
    assert results == [[0, 1, [[0.0, 5.0], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]]]
    assert end(2, 99.0, success=True, midway=True) == results
    assert end(0, 99.0, success=True) == results, "its own policy"
    results[0][2] = [*results[0][2][1:], [0.0, 9.0]]
    assert end(1, 9.0) == results


@pytest.mark.parametrize(
    "windows",
    [
        windows_with(0.0, 0.0, 0.45),
        windows_with(0.5, 0.5, 0.5),
        windows_with(0.0, 1.0, 1.0, num_episodes=19),
        EpisodeWindows(3, 50),
    ],
    ids=["none is solved", "all are", "few episodes", "none"],
)
def test_else_every_task_acts_for_itself(windows):
    reuse = always()
    reuse.start_episodes(everywhere(reuse), {}, windows)
    assert reuse.acting_task_E.tolist() == TASKS


def test_a_policy_acts_in_tasks_of_its_sizes_alone():
    spec = SPEC._replace(action_sizes=(2, 1, 2), observation_sizes=(2, 2, 2))
    reuse = always(spec=spec)
    reuse.start_episodes(everywhere(reuse), {}, windows_with(0.0, 1.0, 1.0))
    assert reuse.acting_task_E.tolist() == [0, 2, 2, 1, 1, 1, 2, 2, 2]


def test_without_a_success_signal_the_score_decides():
    spec = SPEC._replace(has_success=False, max_return=10.0)
    windows = EpisodeWindows(3, 50)
    windows.add(Episode(task, 4.0 * task, 10, False, False) for task in range(3))
    reuse = begun(PolicyReuse(0.9, success=0.8, episodes=1), spec=spec)
    reuse = with_results(reuse, (0, 1, 0.0, 1.0), (0, 2, 0.0, 2.0), (1, 2, 0.0, 5.0))
    reuse.start_episodes(everywhere(reuse), {}, windows)
    assert reuse.is_foreign_E[1:3].all(), "a score of 0 against 0.8"
    assert (reuse.acting_task_E[1:6] == [2, 2, 1, *reuse.acting_task_E[4:6]]).all()


class Asked:
    """A policy that stands still, and keeps the tasks of each step."""

    def __init__(self):
        self.tasks = []

    def act(self, observation_ED, task_E, mode, noise_EA=None):
        self.tasks.append(task_E.tolist())
        return np.zeros((len(task_E), 2), np.float32)


def collector_of(fraction=0.9, tasks=(0, 0, 1, 1)):
    envs = VectorEnv(Scripted(2), tasks, num_workers=0)
    collector = Collector(envs, Asked(), reuse=PolicyReuse(fraction))
    with_results(collector.reuse, (0, 1, 1.0, 9.0))
    collector.windows = windows_with(0.0, 1.0)
    collector.reset([0] * len(tasks))
    return collector


def test_collector_records_the_envs_own_task():
    collector = collector_of()
    transitions, _ = collector.step("explore")
    assert collector.policy.tasks == [[0, 1, 1, 1]]
    assert transitions.task_E.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("mode", ["exploit", "random"])
def test_in_other_modes_every_task_acts_for_itself(mode):
    collector = collector_of()
    collector.step("explore")
    for _ in range(3):
        collector.step(mode)
    assert collector.policy.tasks[1] == [0, 0, 1, 1]
    assert collector.windows.count_T[0] == 20 + 4, "episodes that it ended for itself count"


def test_an_algorithm_acts_with_the_policies_that_were_chosen():
    """Of PPO the log densities tell whose policy it was."""
    algorithm = PPO(SPEC, seed=1)
    envs = VectorEnv(ToyReach(3, horizon=4), TASKS, num_workers=0)
    collector = Collector(envs, algorithm, reuse=PolicyReuse(0.5))
    collector.windows = windows_with(0.0, 1.0, 1.0)
    collector.reset(2)
    num_foreign = 0
    for _ in range(20):
        acting_E = collector.reuse.acting_task_E.copy()
        num_foreign += (acting_E != TASKS).sum()
        transitions, _ = collector.step("explore")
        own = log_densities(algorithm, transitions, TASKS)
        chosen = log_densities(algorithm, transitions, acting_E)
        found = transitions.extra["log_prob"]
        np.testing.assert_allclose(found, chosen, rtol=1e-4)
        assert (np.isclose(found, own, rtol=1e-4) == (acting_E == TASKS)).all()
    assert 0 < num_foreign < 20 * 6
    action_EA = algorithm.act(collector.observation_ED, np.array(TASKS), "exploit")
    expected = algorithm.policy(
        torch.from_numpy(collector.observation_ED.copy()), torch.tensor(TASKS)
    ).mean_BA
    np.testing.assert_allclose(action_EA, expected.detach().clamp(-1, 1), atol=1e-6)


def log_densities(algorithm, transitions, tasks):
    observation_ED = torch.from_numpy(transitions.observation_ED.copy())
    policy = algorithm.policy(observation_ED, torch.from_numpy(np.array(tasks)))
    sample_EA = torch.from_numpy(transitions.extra["unclipped_action"])
    return policy.log_prob(sample_EA).detach().numpy()


def test_ppo_learns_in_which_steps_another_policy_acted(tmp_path, monkeypatch):
    foreign_SE, learned, receive = [], [], Collector.receive

    class Observed(PPO):
        def begin_iteration(self, collected, progress):
            learned.append((collected.columns["foreign"].numpy().copy(), progress))
            return super().begin_iteration(collected, progress)

    def noting(collector, selected_E=None):
        if collector.reuse is not None:
            foreign_SE.append(collector.foreign_E)
        return receive(collector, selected_E)

    monkeypatch.setattr(Collector, "receive", noting)
    extras = [PolicyReuse(0.9, success=0.01, episodes=1), StartMidway()]
    data = RolloutData(ToyReach(3, horizon=30), 2880, envs_per_task=4, num_workers=0, extras=extras)
    model = Observed(data.spec, num_steps=60, num_minibatches=4, num_epochs=1, **SMALL)
    Trainer(**QUIET, default_root_dir=tmp_path).fit(model, data)
    assert np.array_equal(np.concatenate([one for one, _ in learned]), np.stack(foreign_SE))
    # four iterations of 60 steps in 12 environments, which count whoever acts
    assert [progress for _, progress in learned] == [0.0, 0.25, 0.5, 0.75]
    assert 0 < np.mean(foreign_SE) < 0.5


def test_foreign_episodes_are_counted_but_in_no_statistic():
    """Task 0 has episodes of 3, 1 and 4 steps, task 1 of 1, 4 and 2."""
    collector = collector_of()
    count_T = collector.windows.count_T.copy()
    ended_envs = []
    for _ in range(4):
        own_E = ~collector.foreign_E
        transitions, ended = collector.step("explore", own_E)
        assert transitions.env_E.tolist() == [0, 2, 3]
        ended_envs += list(ended)
    assert sorted(ended_envs) == [0, 0, 1, 1, 2, 3]
    assert (collector.windows.count_T - count_T).tolist() == [2, 2]
    assert collector.counters.env_steps == 4 * 4
    assert collector.counters.episodes == 6


def test_the_same_seed_gives_the_same_choices():
    def tasks(seed):
        collector = collector_of(0.5, [0] * 12 + [1] * 2)
        collector.sample(num_steps=14 * 6, seed=seed)
        return collector.policy.tasks

    assert tasks(4) == tasks(4) != tasks(5)


def test_a_restored_collector_continues_with_the_same_choices():
    collector, other = collector_of(0.5, [0] * 12 + [1] * 2), collector_of(0.5, [0] * 12 + [1] * 2)
    collector.step("explore")
    other.set_state(collector.get_state())
    collector.policy.tasks.clear()
    for _ in range(12):
        collector.step("explore")
        other.step("explore")
    assert collector.policy.tasks == other.policy.tasks[-12:]
    assert len({tuple(tasks) for tasks in collector.policy.tasks}) > 1


def test_a_new_process_takes_over_choices_and_no_results():
    tasks = [0, 0, 1, 1]
    reuse = with_results(begun(PolicyReuse(0.9), tasks), (0, 1, 1.0, 9.0))
    reuse.start_episodes(everywhere(reuse), {}, windows_with(0.0, 1.0))
    second = begun(PolicyReuse(), tasks, seed=5)
    second.load_state_dict({"per_env": reuse.state_dict()["per_env"]})
    assert second.acting_task_E.tolist() == [0, 1, 1, 1]
    assert second.state_dict()["results"] == []
