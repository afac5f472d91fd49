"""Numbers of ``info`` that are logged, and stored if that is wanted."""

import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import WithInfo, check_spec
from mtrl_lightning.rollout import Collector, Evaluator
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import STORED, transition_fields
from tests.helpers.altered_reach import Reporting
from tests.helpers.fakes import Uniform

KEYS = ("place", "steps", "score", "odd")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_has_the_numbers_and_nan_where_it_reports_none(workers):
    envs = VectorEnv(WithInfo(Reporting(3, horizon=2), KEYS), [0, 1, 2, 1], num_workers=workers)
    envs.reset(seed=0)
    for step in (1, 2, 1):
        envs.send(np.full((4, 2), 0.5, np.float32))
        result = envs.receive()
        assert result.extra == {}, "nothing is stored"
        assert list(result.info) == list(KEYS)
        place_E = result.next_observation_ED[:, 0].astype(np.float64)
        assert np.array_equal(result.info["place"], place_E)
        assert result.info["steps"].tolist() == [step] * 4
        score_E = np.array([0.0, 10.0, 20.0, 10.0]) if step == 2 else np.full(4, np.nan)
        assert np.array_equal(result.info["score"], score_E, equal_nan=True)
        assert np.array_equal(result.info["odd"], [np.nan, 1, np.nan, 1], equal_nan=True)
    envs.close()


def test_what_is_stored_is_a_field_of_the_transition_too():
    benchmark = WithInfo(Reporting(3, horizon=2), ["place", "steps"], store=True)
    assert [field.name for field in transition_fields(benchmark.spec)] == [
        *STORED,
        "place",
        "steps",
    ]
    collector = Collector(VectorEnv(benchmark, [0, 1, 2], num_workers=0), Uniform())
    transitions = collector.sample(num_steps=12, seed=0).transitions
    assert np.array_equal(transitions.extra["place"], transitions.next_observation_ED[:, 0])
    assert transitions.extra["steps"].tolist() == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3
    only_logged = WithInfo(Reporting(3), ["place"]).spec
    assert [field.name for field in transition_fields(only_logged)] == list(STORED)


def test_a_field_of_the_benchmark_may_be_logged_too():
    class Costly(Reporting):
        @property
        def spec(self):
            return super().spec._replace(info_fields=(Field("place"),))

    spec = check_spec(WithInfo(Costly(3), ["place"]).spec)
    assert (spec.info_fields, spec.info_keys) == ((Field("place"),), ("place",))


def test_an_evaluation_averages_them_by_task():
    evaluator = Evaluator(
        WithInfo(Reporting(2, horizon=4), ["steps", "score", "odd"]), num_episodes=3, num_workers=0
    )
    metrics = evaluator.evaluate(Uniform()).metrics(("goal-0", "goal-1"))
    evaluator.close()
    known = metric_names(WithInfo(ToyReach(2), ["steps", "score", "odd"]))
    assert set(known) - set(metrics) == {
        f"eval/info/{name}/goal-0" for name in ("odd", "odd_last")
    }, "only even tasks never report it"
    assert {name: value for name, value in metrics.items() if "/info/" in name} == {
        "eval/info/steps": 2.5,
        "eval/info/steps/goal-0": 2.5,
        "eval/info/steps/goal-1": 2.5,
        "eval/info/steps_last": 4.0,
        "eval/info/steps_last/goal-0": 4.0,
        "eval/info/steps_last/goal-1": 4.0,
        "eval/info/score": 5.0,
        "eval/info/score/goal-0": 0.0,
        "eval/info/score/goal-1": 10.0,
        "eval/info/score_last": 5.0,
        "eval/info/score_last/goal-0": 0.0,
        "eval/info/score_last/goal-1": 10.0,
        "eval/info/odd": 1.0,
        "eval/info/odd/goal-1": 1.0,
        "eval/info/odd_last": 1.0,
        "eval/info/odd_last/goal-1": 1.0,
    }


def test_a_number_that_no_environment_reports_is_named_once():
    benchmark = WithInfo(Reporting(3, horizon=4), ["steps", "speed", "odd"])
    collector = Collector(VectorEnv(benchmark, [0, 1, 2], num_workers=0), Uniform())
    collector.sample(num_steps=9)
    with pytest.warns(UserWarning, match="reported") as warned:
        collector.sample(num_steps=30)
    assert len(warned) == 1


def test_replaced_benchmark_logs_the_same_numbers():
    evaluator = Evaluator(
        WithInfo(Reporting(3, horizon=2), ["steps"]), num_episodes=1, num_workers=0
    )
    evaluator.remake_envs(Reporting(3, horizon=4))
    evaluation = evaluator.evaluate(Uniform())
    assert evaluation.info["steps"] == {0: 2.5, 1: 2.5, 2: 2.5}
    evaluator.close()
