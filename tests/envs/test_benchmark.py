import metaworld
import mujoco
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from mtrl_lightning.envs import DMControl, GymnasiumTasks, MetaWorld, ToyReach, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import check_spec, tasks_of
from mtrl_lightning.envs.benchmarks.toy import STEP
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import known_tasks
from tests.helpers.fakes import limited


def test_a_version_may_be_left_out_where_only_one_is_known():
    known = ["door-open-v3", "door-v2", "door-v3", "reach"]
    found = known_tasks(["reach", "door-open", "door-v2"], known)
    assert found == ("reach", "door-open-v3", "door-v2")


@pytest.mark.parametrize(
    ("name", "num_trained", "num_tested"), [("MT10", 10, 0), ("MT50", 50, 0), ("ML45", 45, 5)]
)
def test_named_sets_are_metaworlds_own_in_its_order(name, num_trained, num_tested, monkeypatch):
    # goals are not needed, and slow
    monkeypatch.setattr(metaworld, "_make_tasks", lambda *_, **__: [])
    upstream = getattr(metaworld, name)()
    benchmark = MetaWorld(name)
    spec = check_spec(benchmark.spec)
    found = {
        split: [spec.task_names[task] for task in tasks_of(benchmark, split)]
        for split in benchmark.splits
    }
    trained = list(upstream.train_classes)
    tested = {"eval_test": list(upstream.test_classes)} if num_tested else {}
    assert found == {"train": trained, "eval": trained, **tested}
    assert spec.train_tasks == tuple(range(num_trained))
    assert len(set(spec.task_names)) == num_trained + num_tested


def test_spec_and_protocol_say_what_belongs_beside_every_number():
    spec = MetaWorld(
        ["reach", "push"], reward_version="v1", horizon=150, num_goals=7, goal_seed=3
    ).spec
    assert spec.protocol == {
        "benchmark": "metaworld",
        "metaworld": "3.1.1",
        "mujoco": mujoco.__version__,
        "reward_version": "v1",
        "horizon": 150,
        "num_goals": 7,
        "goal_seed": 3,
    }
    assert (spec.train_tasks, spec.horizon, spec.has_success) == ((0, 1), 150, True)
    assert spec.observation_space == Box(-np.inf, np.inf, (39,), np.float64)
    assert spec.action_space == Box(-1.0, 1.0, (4,), np.float32)


SEEDED = {
    "toy": lambda: ToyReach(horizon=3),
    "MetaWorld": lambda: MetaWorld(["reach"], horizon=3),
    "suite": lambda: DMControl(["reacher-easy"], horizon=6, action_repeat=2),
    "Gymnasium": lambda: GymnasiumTasks({"a": limited(3)}),
}


def starts(env, seed, number=4):
    return [env.reset(seed=seed)[0].tolist()] + [env.reset()[0].tolist() for _ in range(number)]


def draws(env):
    """Draw as a wrapper would."""
    return env.unwrapped.np_random.random(3).tolist()


@pytest.mark.usefixtures("few_goals")
@pytest.mark.filterwarnings("ignore:.*horizon")
@pytest.mark.parametrize("name", SEEDED)
def test_seeds_decide_episodes_and_evaluations_number_them(name):
    benchmark = SEEDED[name]()
    env, other = (benchmark.make_env(0, "train", seed) for seed in (1, 2))
    other.reset()
    assert starts(env, 9) == starts(other, 9)
    assert draws(env) == draws(other)
    assert starts(env, 10) != starts(other, 9)
    first = [starts(benchmark.make_env(0, "train", seed), None) for seed in (3, 3, 4)]
    assert first[0] == first[1] != first[2]

    env, other = (benchmark.make_env(0, "eval", seed) for seed in (1, 2))
    numbered = starts(env, 0)
    other.reset()
    assert [other.reset(seed=k)[0].tolist() for k in range(5)] == numbered
    assert other.reset()[0].tolist() == env.reset(seed=5)[0].tolist()
    assert draws(env) == draws(other)
    assert len({tuple(start) for start in numbered}) == 5
    action = np.zeros(env.action_space.shape, env.action_space.dtype)
    ends = [env.step(action)[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_environment_with_other_actions_than_the_spec_is_refused():
    env = ToyReach().make_env(1, "train", 0)
    benchmark = ToyReach()
    benchmark.make_env = lambda *_: env
    for env.action_space in (Discrete(4), Box(-1, 1, (3,))):
        with pytest.raises(ConfigurationError, match="goal-1"):
            VectorEnv(benchmark, [1], num_workers=0).reset()


@pytest.mark.parametrize(
    ("x", "success"), [(0.549, False), (0.551, True), (0.849, True), (0.851, False)]
)
def test_toy_succeeds_within_a_radius_of_its_goal(x, success):
    env = ToyReach(1, horizon=100).make_env(0, "train", 0)  # the goal is at (0.7, 0)
    env.reset(seed=0)
    way_D = np.array([x, 0.0]) - 1
    *_, last = (env.step(action) for action in [np.ones(2)] * 10 + [way_D / (10 * STEP)] * 10)
    assert last[4]["success"] == success
