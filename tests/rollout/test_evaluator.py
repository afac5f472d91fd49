import numpy as np
import pytest

from mtrl_lightning.callbacks.evaluation import table
from mtrl_lightning.envs import GymnasiumTasks, ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import OnlyTasks, WithInfo
from mtrl_lightning.errors import PolicyFaultError
from mtrl_lightning.rollout import Evaluation, Evaluator
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.rollout.evaluator import main_metric, metric_names
from mtrl_lightning.training import evaluate
from tests.helpers.fakes import (
    Constant,
    Line,
    Recorder,
    Scripted,
    Seeker,
    Selected,
    point_in_space,
    point_on_a_line,
    scripted_length,
    scripted_success,
)
from tests.helpers.transforms import Scale

NAMES = ("task-0", "task-1", "task-2")


@pytest.mark.parametrize(("num_episodes", "envs_per_task"), [(1, 1), (5, 2), (8, 3), (5, 9)])
def test_every_task_has_its_own_episodes_0_to_n_counted_exactly(num_episodes, envs_per_task):
    evaluator = Evaluator(
        Scripted(3), num_episodes=num_episodes, envs_per_task=envs_per_task, num_workers=0
    )
    evaluation = evaluator.evaluate(Constant())
    episodes = range(num_episodes)
    # returns of episodes 0 .. n - 1 add up to what no other set of n episodes does; all of it is
    # the last step's reward
    expected = [1000 * (task + 1) + (2**num_episodes - 1) / num_episodes for task in range(3)]
    np.testing.assert_allclose(evaluation.return_T, expected, rtol=1e-15)
    success = [[scripted_success(task, k, 0) for k in episodes] for task in range(3)]
    last = [
        [scripted_success(task, k, scripted_length(task, k)) for k in episodes] for task in range(3)
    ]
    np.testing.assert_allclose(evaluation.success_T, np.mean(success, axis=1), rtol=1e-15)
    np.testing.assert_allclose(evaluation.success_last_T, np.mean(last, axis=1), rtol=1e-15)


def test_only_the_best_actions_are_asked_for_and_no_more():
    policy = Recorder()
    Evaluator(Scripted(2), num_episodes=4, num_workers=0).evaluate(policy)
    assert set(policy.modes) == {"exploit"}
    assert policy.tasks[0].tolist() == [0, 1]
    assert len(policy.modes) == max(
        sum(scripted_length(task, k) for k in range(4)) for task in range(2)
    )
    copies = Recorder()
    Evaluator(Scripted(2), num_episodes=2, envs_per_task=9, num_workers=0).evaluate(copies)
    assert copies.tasks[0].tolist() == [0, 0, 1, 1], "one environment for each episode"


def test_evaluation_equals_a_slow_loop():
    benchmark, policy = ToyReach(3, horizon=9), Seeker(3)
    evaluation = Evaluator(benchmark, num_episodes=4, envs_per_task=2, num_workers=0).evaluate(
        policy
    )
    for task in range(3):
        returns, successes = [], []
        for episode in range(4):
            env = benchmark.make_env(task, "eval", 1000)
            observation, _ = env.reset(seed=episode)
            rewards = []
            truncated = False
            while not truncated:
                action = policy.act(observation[None], np.array([task]), "exploit")[0]
                observation, reward, _, truncated, info = env.step(action)
                rewards.append(reward)
            returns.append(sum(rewards))
            successes.append(info["success"])
        assert evaluation.return_T[task] == pytest.approx(np.mean(returns), rel=1e-12)
        assert evaluation.success_last_T[task] == np.mean(successes) == 1.0


def test_interrupted_evaluation_leaves_no_trace():
    calls = []

    def on_step():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    evaluator = Evaluator(Scripted(3), num_episodes=4, num_workers=0)
    expected = evaluator.evaluate(Constant())
    with pytest.raises(KeyboardInterrupt):
        evaluator.evaluate(Constant(), on_step)
    assert len(calls) == 5
    assert np.array_equal(evaluator.evaluate(Constant()).return_T, expected.return_T)
    evaluator.close()
    again = evaluator.evaluate(Constant())
    assert np.array_equal(again.return_T, expected.return_T), "in new environments"


def named(prefix, values, tasks):
    """Return metrics by name: the mean, and after it the value of each task."""
    return {
        f"{prefix}/{name}{task}": value
        for name, of_tasks in values.items()
        for task, value in zip(("", *(f"/{task}" for task in tasks)), of_tasks, strict=True)
    }


def test_metrics_have_their_names_and_means_over_tasks():
    evaluation = Evaluation(
        "eval", 4, np.array([1.0, 0.5, 0.0]), np.array([0.5, 0.25, 0.0]), np.array([7.0, 8.0, 12.0])
    )
    expected = {
        "success": (0.5, 1.0, 0.5, 0.0),
        "success_last": (0.25, 0.5, 0.25, 0.0),
        "return": (9.0, 7.0, 8.0, 12.0),
    }
    metrics = evaluation.metrics(NAMES)
    assert metrics == {**named("eval", expected, NAMES), "eval/success_worst_1": 0.0}
    assert all(type(value) is float for value in metrics.values())


def test_success_intervals_are_wilsons():
    success_T = np.array([48 / 50, 0.0])
    evaluation = Evaluation("eval", 50, success_T, success_T, success_T)
    intervals = evaluation.success_intervals(("a", "b"))
    # (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), z = 1.959964
    assert intervals == {
        "eval/success": pytest.approx((0.384646, 0.576834), abs=1e-6),
        "eval/success/a": pytest.approx((0.865399, 0.988961), abs=1e-6),
        "eval/success/b": pytest.approx((0.0, 0.071348), abs=1e-6),
    }
    rows = table(evaluation, ("a", "b"), 7, intervals=intervals).splitlines()
    assert "0.96 [0.87, 0.99]" in rows[2]


def test_the_success_of_the_worst_tasks_is_their_mean():
    success_T = np.array([0.9, 0.1, 1.0, 0.4, 0.0, 0.6])
    metrics = Evaluation("eval", 10, success_T, success_T, success_T).metrics(tuple("abcdef"))
    assert metrics["eval/success_worst_1"] == 0.0
    assert metrics["eval/success_worst_5"] == pytest.approx((0.0 + 0.1 + 0.4 + 0.6 + 0.9) / 5)
    assert metrics["eval/success"] == pytest.approx(0.5)  # of all
    of_five = Evaluation("eval", 10, success_T[:5], success_T[:5], success_T[:5])
    assert "eval/success_worst_5" not in of_five.metrics(tuple("abcde"))


def test_a_score_is_the_return_divided_by_the_largest_one():
    zero_T = np.zeros(2)
    returns_T = np.array([250.0, 500.0])
    evaluation = Evaluation(
        "eval", 1, zero_T, zero_T, returns_T, has_success=False, max_return=1000.0
    )
    expected = {"return": (375.0, 250.0, 500.0), "score": (0.375, 0.25, 0.5)}
    assert evaluation.metrics(("a", "b")) == named("eval", expected, ("a", "b"))
    assert table(evaluation, ("a", "b"), 7).splitlines() == [
        "eval after 7 env steps",
        "task        return   score",
        "a            250.0   0.250",
        "b            500.0   0.500",
        "--------------------------",
        "average      375.0   0.375",
    ]
    assert evaluation.success_intervals(("a", "b")) == {}


class Modes(Scripted):
    """The last two of five tasks are never trained, and evaluated in a split of their own."""

    splits = ("train", "eval_base", "eval_extrapolation")

    def __init__(self):
        super().__init__(5)
        self.tasks = {"train": (0, 1, 2), "eval_base": (2, 0), "eval_extrapolation": (3, 4)}

    def split_tasks(self, split):
        return self.tasks[split]


def test_a_split_evaluates_only_its_own_tasks():
    benchmark = WithInfo(Modes(), [])
    found = {}
    for split in benchmark.splits[1:]:
        found |= evaluate(Constant(), benchmark, 3, split=split, num_workers=0)
    # the sum of 2^k over episodes k = 0, 1, 2 is 7
    returns = [1000 * (task + 1) + 7 / 3 for task in range(5)]
    expected = {}
    for split, tasks in (("eval_base", (2, 0)), ("eval_extrapolation", (3, 4))):
        of_tasks = [returns[task] for task in tasks]
        values = {"return": (np.mean(of_tasks), *of_tasks)}
        expected |= named(split, values, [f"task-{task}" for task in tasks])
    assert {name: found[name] for name in found if "/return" in name} == pytest.approx(expected)
    assert set(metric_names(benchmark)) == set(found)
    assert metric_names(benchmark)[0] == "eval_base/success", "the first split decides what is best"


def test_best_is_by_success_else_score_else_return():
    spec = Scripted(1).spec._replace(max_return=5.0)
    assert main_metric(spec) == "success"
    assert main_metric(spec._replace(has_success=False)) == "score"
    assert main_metric(spec._replace(has_success=False, max_return=None)) == "return"


def test_a_policys_fault_is_no_fault_of_an_environment():
    restarts = []
    evaluator = Evaluator(
        ToyReach(2), num_episodes=1, num_workers=0, max_restarts=5, on_restart=restarts.append
    )
    with pytest.raises(PolicyFaultError, match="goal-0, goal-1"):
        evaluator.evaluate(Constant((np.nan, 0.0)))
    assert restarts == [] and evaluator.num_restarts == 0


def test_tasks_are_matched_by_name_behind_transforms():
    toy = ToyReach(3)
    policy = Recorder(Seeker(3), toy.spec)
    acting = with_action_transforms(policy, [Scale(1.0)])
    expected = evaluate(acting, toy, num_episodes=2, num_workers=0)
    assert expected["eval/success"] == 1
    chosen = evaluate(acting, Selected(toy, 2, 0), num_episodes=2, num_workers=0)
    assert policy.tasks[-1].tolist() == [2, 0]
    for name in ("success", "return"):
        for task in ("goal-0", "goal-2"):
            assert chosen[f"eval/{name}/{task}"] == expected[f"eval/{name}/{task}"]
    assert "eval/success/goal-1" not in chosen


def test_a_subset_that_is_padded_to_another_size_simply_works():
    tasks = {"line": point_on_a_line, "space": point_in_space}
    both = GymnasiumTasks(tasks, horizon=5, has_success=False)
    policy = Recorder(Constant((0.5, -0.25, 0.125)), both.spec)
    expected = evaluate(policy, both, num_episodes=2, num_workers=0)
    line = GymnasiumTasks({"line": tasks["line"]}, horizon=5, has_success=False)
    assert line.spec.observation_space.shape == (1,)
    found = evaluate(policy, line, num_episodes=2, num_workers=0)
    assert policy.observations[-1].shape == (1, 3) and not policy.observations[-1][:, 1:].any()
    assert found["eval/return/line"] == expected["eval/return/line"]


def test_tasks_are_evaluated_in_the_given_order():
    metrics = evaluate(Seeker(3), ToyReach(3), 2, tasks=["goal-2", "goal-0"], num_workers=0)
    names = [name for name in metrics if name.startswith("eval/success/")]
    assert names == ["eval/success/goal-2", "eval/success/goal-0"]
    assert metrics["eval/success"] == 1


def test_splits_without_the_chosen_tasks_are_left_out():
    only = OnlyTasks(Modes(), ["task-2"])
    assert only.splits == ("train", "eval_base")
    assert only.split_tasks("eval_base") == (2,)
    assert only.split_tasks("train") == (0, 1, 2)


class Fixed(Line):
    """All of its episodes begin at the same place."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


def test_test_episodes_that_are_all_the_same_warn_once(recwarn):
    benchmark = GymnasiumTasks({"a": Fixed, "b": Line}, horizon=4)
    evaluator = Evaluator(benchmark, num_episodes=3, envs_per_task=2, num_workers=0)
    for _ in range(2):
        evaluator.evaluate(Constant([0.5]))
    assert ["episodes of a are" in str(one.message) for one in recwarn] == [True]
