"""Episodes in which another task's policy acts: who acts where, and who learns from them."""

import numpy as np
import pytest
from lightning.pytorch import Trainer

from mtrl_lightning.algorithms import PPO
from mtrl_lightning.data import RolloutData
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.rollout import Collector, EpisodeWindows, PolicyReuse, StartMidway
from mtrl_lightning.transitions import Episode
from tests.helpers.fakes import Recorder, Scripted
from tests.helpers.fitting import QUIET, SMALL
from tests.helpers.rollout import windows_with

TASKS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
EVERYWHERE = np.ones(9, np.bool_)
SPEC = ToyReach(3).spec


def begun(reuse, *results, tasks=TASKS, spec=SPEC):
    """Begin with results of other policies: task, acting task, success, return."""
    reuse.begin(spec, np.array(tasks))
    lists = [[own, acting, [[success, return_]]] for own, acting, success, return_ in results]
    reuse.load_state_dict({**reuse.state_dict(), "results": lists})
    return reuse


def always(**options):
    """Another policy acts in all episodes of a task without success, if there is a solved task."""
    pairs = [(own, other, 1.0, 9.0) for own in range(3) for other in range(3)]
    return begun(PolicyReuse(0.9), *pairs, **options)


def test_solved_tasks_act_in_all_but_the_first_environment():
    reuse = always()
    reuse.start_episodes(np.arange(9) == 1, {}, windows_with(0.0, 1.0, 0.0))
    assert reuse.acting_task_E.tolist() == [0, 1, 0, 1, 1, 1, 2, 2, 2]
    reuse.start_episodes(np.arange(9) == 1, {}, windows_with(0.6, 1.0, 0.0))
    assert reuse.acting_task_E.tolist() == TASKS, "it has been solved since"
    reuse.start_episodes(EVERYWHERE, {}, windows_with(0.0, 1.0, 0.0))
    assert reuse.acting_task_E.tolist() == [0, 1, 1, 1, 1, 1, 2, 1, 1]
    assert reuse.is_foreign_E.tolist() == [False, True, True] + [False] * 4 + [True, True]
    assert reuse.fractions() == pytest.approx({0: 2 / 3, 1: 0.0, 2: 2 / 3})


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
    reuse.start_episodes(EVERYWHERE, {}, windows)
    assert reuse.acting_task_E.tolist() == TASKS


def test_a_policy_acts_only_in_tasks_of_its_sizes():
    spec = SPEC._replace(action_sizes=(2, 1, 2), observation_sizes=(2, 2, 2))
    reuse = always(spec=spec)
    reuse.start_episodes(EVERYWHERE, {}, windows_with(0.0, 1.0, 1.0))
    assert reuse.acting_task_E.tolist() == [0, 2, 2, 1, 1, 1, 2, 2, 2]


def test_without_a_success_signal_the_score_decides():
    spec = SPEC._replace(has_success=False, max_return=10.0)
    windows = EpisodeWindows(3, 50)
    windows.add(Episode(task, 4.0 * task, 10, False, False) for task in range(3))
    results = [(0, 1, 0.0, 1.0), (0, 2, 0.0, 2.0), (1, 2, 0.0, 5.0)]
    reuse = begun(PolicyReuse(0.9, success=0.8, episodes=1), *results, spec=spec)
    reuse.start_episodes(EVERYWHERE, {}, windows)
    assert reuse.acting_task_E[:4].tolist() == [0, 2, 2, 1], "a score of 0 against 0.8"


HALF, NONE = (0.25, 1.0, 1.0), (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("success", "results", "shares"),
    [
        # 0.1 times 1 - success, of which each of two has a half
        (HALF, [], [0.0375, 0.0375]),
        # and 0.4 times 1 - success for the best one
        (HALF, [(0, 1, 0.3, 9.0), (0, 2, 0.5, 1.0)], [0.0375, 0.0375 + 0.3]),
        (NONE, [(0, 1, 0.3, 9.0), (0, 2, 0.5, 1.0)], [0.05, 0.05 + 0.4]),
        # the best one has unlearned its own task
        ((0.25, 1.0, 0.4), [(0, 1, 0.3, 9.0), (0, 2, 0.5, 1.0)], [0.075 + 0.3, 0.0]),
        # the own policy, which has a success of 0.25 and returns of 0, is as good
        (HALF, [(0, 1, 0.2, 99.0), (0, 2, 0.25, 0.0)], [0.0375, 0.0375]),
        (HALF, [(0, 1, 0.2, 99.0), (0, 2, 0.25, 0.1)], [0.0375, 0.0375 + 0.3]),
        # those that have been tried least are tried first
        (HALF, [(0, 1, 0.0, -1.0)], [0.0, 0.075]),
        (NONE, [(0, 1, 0.0, 1.0)], [0.4, 0.1]),
        # without a success the return decides
        (NONE, [(0, 1, 0.0, 2.0), (0, 2, 0.0, 1.0)], [0.05 + 0.4, 0.05]),
    ],
)
def test_less_success_means_more_reuse_of_better_policies(success, results, shares):
    """How often the policies of tasks 1 and 2 are chosen for an episode of task 0."""
    num_envs = 10_000
    reuse = begun(PolicyReuse(0.4), *results, tasks=[0] * num_envs + [1, 2, 2])
    reuse.start_episodes(np.ones(num_envs + 3, np.bool_), {}, windows_with(*success))
    acting_E = reuse.acting_task_E[:num_envs]
    assert [np.mean(acting_E == task) for task in (1, 2)] == pytest.approx(shares, abs=0.01)


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


def collector_of(fraction=0.9, tasks=(0, 0, 1, 1)):
    envs = VectorEnv(Scripted(2), tasks, num_workers=0)
    reuse = PolicyReuse(fraction)
    collector = Collector(envs, Recorder(), extras=[reuse])
    reuse.load_state_dict({**reuse.state_dict(), "results": [[0, 1, [[1.0, 9.0]]]]})
    collector.windows = windows_with(0.0, 1.0)
    collector.reset([0] * len(tasks))
    return collector


def acting_tasks(collector):
    return [task_E.tolist() for task_E in collector.policy.tasks]


@pytest.mark.parametrize("mode", ["exploit", "random"])
def test_another_policy_acts_only_where_the_run_explores(mode):
    collector = collector_of()
    transitions, _ = collector.step("explore")
    assert transitions.task_E.tolist() == [0, 0, 1, 1], "the environments' own tasks"
    for _ in range(3):
        collector.step(mode)
    assert acting_tasks(collector) == [[0, 1, 1, 1]] + [[0, 0, 1, 1]] * 3
    assert collector.windows.count_T[0] == 20 + 4, "episodes that it ended for itself count"


def test_foreign_episodes_are_counted_but_in_no_statistic():
    """Task 0 has episodes of 3, 1 and 4 steps, task 1 of 1, 4 and 2."""
    collector = collector_of()
    ended_envs = []
    for _ in range(4):
        own_E = ~collector.foreign_E
        transitions, ended = collector.step("explore", own_E)
        assert transitions.env_E.tolist() == [0, 2, 3]
        ended_envs += list(ended)
    assert sorted(ended_envs) == [0, 0, 1, 1, 2, 3]
    assert collector.windows.count_T.tolist() == [20 + 2, 20 + 2]
    assert collector.counters.env_steps == 4 * 4
    assert collector.counters.episodes == 6


def test_the_same_seed_gives_the_same_choices():
    def tasks(seed, seed_before):
        collector = collector_of(0.5, [0] * 12 + [1] * 2)
        collector.extras[0].seed(seed_before)
        collector.sample(num_steps=14 * 6, seed=seed)
        return acting_tasks(collector)

    assert tasks(4, 1) == tasks(4, 2) != tasks(5, 1)


def test_a_new_process_has_choices_but_no_results():
    reuse = always()
    second = begun(PolicyReuse())
    reuse.start_episodes(EVERYWHERE, {}, windows_with(0.0, 1.0, 0.0))
    second.load_state_dict({"per_env": reuse.state_dict()["per_env"]})
    assert second.acting_task_E.tolist() == reuse.acting_task_E.tolist() != TASKS
    assert second.state_dict()["results"] == []


def test_ppo_learns_in_which_steps_another_policy_acted(tmp_path, monkeypatch):
    foreign_SE, learned, receive = [], [], Collector.receive

    class Observed(PPO):
        def begin_iteration(self, collected, progress):
            learned.append(collected.columns["foreign"].numpy().copy())
            return super().begin_iteration(collected, progress)

    def noting(collector, selected_E=None):
        if collector.extras:
            foreign_SE.append(collector.foreign_E)
        return receive(collector, selected_E)

    monkeypatch.setattr(Collector, "receive", noting)
    extras = [PolicyReuse(0.9, success=0.01, episodes=1), StartMidway()]
    data = RolloutData(ToyReach(3, horizon=30), 960, envs_per_task=4, num_workers=0, extras=extras)
    model = Observed(data.spec, num_steps=40, num_minibatches=4, num_epochs=1, **SMALL)
    Trainer(**QUIET, default_root_dir=tmp_path).fit(model, data)
    assert np.array_equal(np.concatenate(learned), np.stack(foreign_SE))
    assert 0 < np.mean(foreign_SE) < 0.5
