import numpy as np
import pytest

from mtrl_lightning.envs import GymnasiumTasks, ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import OnlyTasks
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
    point_in_space,
    point_on_a_line,
    scripted_length,
    scripted_success,
)
from tests.helpers.rollout import Scale


@pytest.mark.parametrize(("num_episodes", "envs_per_task"), [(5, 2), (8, 3), (5, 9)])
def test_every_task_has_its_own_episodes_0_to_n_counted_exactly(num_episodes, envs_per_task):
    evaluation = Evaluator(
        Scripted(3), num_episodes=num_episodes, envs_per_task=envs_per_task, num_workers=0
    ).evaluate(Constant())
    # returns of episodes 0 .. n - 1 add up to what no other set of n episodes does
    expected = [1000 * (task + 1) + (2**num_episodes - 1) / num_episodes for task in range(3)]
    np.testing.assert_allclose(evaluation.return_T, expected, rtol=1e-15)
    episodes = [(task, k) for task in range(3) for k in range(num_episodes)]
    success = [scripted_success(task, k, 0) for task, k in episodes]
    last = [scripted_success(task, k, scripted_length(task, k)) for task, k in episodes]
    for found_T, expected in ((evaluation.success_T, success), (evaluation.success_last_T, last)):
        np.testing.assert_allclose(found_T, np.reshape(expected, (3, -1)).mean(1), rtol=1e-15)


def test_only_deterministic_actions_are_requested_and_no_more():
    policy, copies = Recorder(), Recorder()
    Evaluator(Scripted(2), num_episodes=4, num_workers=0).evaluate(policy)
    assert set(policy.modes) == {"exploit"} and policy.tasks[0].tolist() == [0, 1]
    lengths = [sum(scripted_length(task, k) for k in range(4)) for task in range(2)]
    assert len(policy.modes) == max(lengths)
    Evaluator(Scripted(2), num_episodes=2, envs_per_task=9, num_workers=0).evaluate(copies)
    assert copies.tasks[0].tolist() == [0, 0, 1, 1], "one environment for each episode"


def named(prefix, name, values, tasks):
    """Return a metric's values by name: the mean, and after it the value of each task."""
    names = [f"{prefix}/{name}", *(f"{prefix}/{name}/{task}" for task in tasks)]
    return dict(zip(names, values, strict=True))


def evaluation_of(success_T, num_episodes=10, **changed):
    """Return an evaluation of the tasks a, b, ... with half as much success in the last step."""
    tasks = tuple(range(len(success_T)))
    spec = Scripted(len(tasks)).spec._replace(task_names=tuple("abcdef")[: len(tasks)], **changed)
    success_T = np.array(success_T)
    return_T = 250 * np.arange(1.0, 1 + len(tasks))
    return Evaluation(spec, "eval", tasks, num_episodes, success_T, success_T / 2, return_T)


def test_metrics_have_their_names_and_means_over_tasks():
    success_T = np.array([0.9, 0.1, 1.0, 0.4, 0.0, 0.6])
    assert evaluation_of(success_T).metrics() == {
        **named("eval", "success", (pytest.approx(0.5), *success_T), "abcdef"),
        **named("eval", "success_last", (pytest.approx(0.25), *success_T / 2), "abcdef"),
        **named("eval", "return", (875.0, *range(250, 1501, 250)), "abcdef"),
        "eval/success_worst_1": 0.0,
        "eval/success_worst_5": pytest.approx((0.0 + 0.1 + 0.4 + 0.6 + 0.9) / 5),
    }
    assert "eval/success_worst_5" not in evaluation_of(success_T[:5]).metrics()


def test_success_intervals_are_wilsons():
    evaluation = evaluation_of([48 / 50, 0.0], num_episodes=50)
    intervals = evaluation.success_intervals()
    # (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), z = 1.959964
    assert intervals == {
        "eval/success": pytest.approx((0.384646, 0.576834), abs=1e-6),
        "eval/success/a": pytest.approx((0.865399, 0.988961), abs=1e-6),
        "eval/success/b": pytest.approx((0.0, 0.071348), abs=1e-6),
    }


def test_a_score_is_the_return_divided_by_the_largest_one():
    evaluation = evaluation_of([0.0, 0.0], has_success=False, max_return=1000.0)
    assert evaluation.metrics() == {
        **named("eval", "return", (375.0, 250.0, 500.0), "ab"),
        **named("eval", "score", (0.375, 0.25, 0.5), "ab"),
    }
    assert evaluation.success_intervals() == {}


class Modes(Scripted):
    """The last two of five tasks are never trained, and evaluated in a split of their own."""

    splits = ("train", "eval_base", "eval_extrapolation")

    def __init__(self):
        super().__init__(5)
        self.tasks = {"train": (0, 1, 2), "eval_base": (2, 0), "eval_extrapolation": (3, 4)}

    def split_tasks(self, split):
        return self.tasks[split]


def test_a_split_evaluates_only_its_own_tasks():
    benchmark = Modes()
    found, expected = {}, {}
    # the sum of 2^k over episodes k = 0, 1, 2 is 7
    returns = [1000 * (task + 1) + 7 / 3 for task in range(5)]
    for split, tasks in (("eval_base", (2, 0)), ("eval_extrapolation", (3, 4))):
        found |= evaluate(Constant(), benchmark, 3, split=split, num_workers=0)
        values = [returns[task] for task in tasks]
        names = [f"task-{task}" for task in tasks]
        expected |= named(split, "return", [np.mean(values), *values], names)
    assert {name: found[name] for name in found if "/return" in name} == pytest.approx(expected)
    assert set(metric_names(benchmark)) == set(found)
    assert metric_names(benchmark)[0] == "eval_base/success", "the first split decides what is best"


def test_best_is_by_success_else_score_else_return():
    spec = Scripted(1).spec._replace(max_return=5.0)
    assert main_metric(spec) == "success"
    assert main_metric(spec._replace(has_success=False)) == "score"
    assert main_metric(spec._replace(has_success=False, max_return=None)) == "return"


def test_tasks_are_matched_by_name_behind_transforms():
    toy = ToyReach(3)
    policy = Recorder(spec=toy.spec._replace(task_names=("goal-2", "goal-0", "goal-1")))
    evaluate(with_action_transforms(policy, [Scale(1.0)]), toy, 1, num_workers=0)
    assert policy.tasks[-1].tolist() == [1, 2, 0]


def test_a_subset_that_is_padded_to_another_size_simply_works():
    tasks = {"line": point_on_a_line, "space": point_in_space}
    both = GymnasiumTasks(tasks, horizon=5)
    policy = Recorder(Constant((0.5, -0.25, 0.125)), both.spec)
    expected = evaluate(policy, both, num_episodes=2, num_workers=0)
    line = GymnasiumTasks({"line": point_on_a_line}, horizon=5)
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
