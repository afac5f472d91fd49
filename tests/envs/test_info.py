"""Numbers of ``info`` that are logged, and stored if that is wanted."""

import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import WithInfo, check_spec
from mtrl_lightning.rollout import Collector, Evaluator
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.spec import Field
from tests.helpers.altered_reach import Reporting
from tests.helpers.fakes import Uniform

KEYS = ("place", "steps", "score", "odd")


def collector_of(benchmark):
    return Collector(VectorEnv(benchmark, [0, 1, 2], num_workers=0), Uniform())


@pytest.mark.parametrize("workers", [0, 1])
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
    transitions = collector_of(benchmark).sample(num_steps=12, seed=0).transitions
    assert list(transitions.extra) == ["place", "steps"]
    assert np.array_equal(transitions.extra["place"], transitions.next_observation_ED[:, 0])
    assert transitions.extra["steps"].tolist() == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3
    with pytest.warns(UserWarning, match="nothing"):
        collector_of(WithInfo(Reporting(3, horizon=2), ["nothing"])).sample(num_episodes=3)
    logged_too = check_spec(WithInfo(benchmark, ["place"]).spec)
    assert logged_too.info_fields == (Field("place"), Field("steps"))
    assert logged_too.info_keys == ("place", "steps")


def test_an_evaluation_averages_them_by_task():
    evaluator = Evaluator(
        WithInfo(Reporting(2, horizon=4), ["steps", "score", "odd"]), num_episodes=3, num_workers=0
    )
    metrics = evaluator.evaluate(Uniform()).metrics()
    known = metric_names(WithInfo(ToyReach(2), ["steps", "score", "odd"]))
    # only the odd task reports it
    assert set(known) - set(metrics) == {"eval/info/odd/goal-0", "eval/info/odd_last/goal-0"}
    expected = {  # the mean, then that of each task
        "steps": (2.5, 2.5, 2.5),
        "steps_last": (4.0, 4.0, 4.0),
        "score": (5.0, 0.0, 10.0),
        "score_last": (5.0, 0.0, 10.0),
        "odd": (1.0, None, 1.0),
    }
    for key, values in expected.items():
        for task, value in zip(("", "/goal-0", "/goal-1"), values, strict=True):
            assert metrics.get(f"eval/info/{key}{task}") == value
