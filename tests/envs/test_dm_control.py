"""Tasks of the DeepMind Control Suite beside dm_control's own, equal in every bit."""

import platform

import numpy as np
import pytest

pytest.importorskip("dm_control")

from gymnasium.error import ResetNeeded

from mtrl_lightning.envs import DMControl
from mtrl_lightning.envs.benchmarks.dm_control import steps_like_upstream
from mtrl_lightning.envs.benchmarks.dm_control_domains import domain, import_suite, load
from mtrl_lightning.envs.benchmarks.dm_control_env import FastStepper
from mtrl_lightning.envs.fast.arithmetic import SCALES
from mtrl_lightning.envs.fast.dm_control_fast import tolerance
from tests.helpers.tiers import DM_CONTROL_TASKS, slow_unless

BENCHMARKING = ["-".join(name) for name in import_suite().BENCHMARKING]
QUADRUPED = ["quadruped-walk", "quadruped-run", "quadruped-escape"]
ALL = [*BENCHMARKING, *QUADRUPED]


def env_of(name, split="train", seed=0, **options):
    return DMControl([name], **options).make_env(0, split, seed)


def actions_of(env, number, seed=0):
    draws = np.random.default_rng(seed).uniform(-1, 1, (number, *env.action_space.shape))
    return draws.astype(np.float32)


def own(name):
    """dm_control's own environment, with its own physics but for the repaired quadruped's."""
    if name in QUADRUPED:
        return load(name, fast=False)
    return import_suite().load(*name.split("-"))


def flat(observation):
    return np.concatenate([np.ravel(part) for part in observation.values()]).astype(np.float32)


def same(found, wanted):
    return found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


def compare_episodes(env, theirs, num_steps):
    """Step both with the same actions in two test episodes; ours has an action repeat of 1."""
    spec = theirs.action_spec()
    for episode in range(2):
        theirs.task._random = np.random.RandomState(episode)
        assert same(env.reset()[0], flat(theirs.reset().observation))
        for action in actions_of(env, num_steps, seed=episode):
            part = (action.astype(np.float64) + 1) / 2
            step = theirs.step(spec.minimum + (spec.maximum - spec.minimum) * part)
            observation, reward, terminated, truncated, _ = env.step(action)
            assert same(observation, flat(step.observation)) and reward == step.reward
            assert not terminated and truncated == step.last()


def test_sizes_horizon_and_protocol():
    spec = DMControl(["cartpole-swingup", "humanoid-stand"]).spec
    assert (spec.observation_sizes, spec.action_sizes) == ((5, 67), (1, 21))
    assert spec.observation_space.shape == (67,) and spec.action_space.shape == (21,)
    assert spec.observation_space.dtype == spec.action_space.dtype == np.float32
    assert (spec.horizon, spec.has_success, spec.max_return) == (500, False, 1000.0)
    assert spec.protocol == {
        "benchmark": "dm_control",
        "dm_control": "1.0.28",
        "mujoco": "3.3.0",
        "action_repeat": 2,
        "horizon": 1000,
        "frames": "1000 control steps in 500 env steps",
        "reward_scale": 1.0,
    }


def test_named_sets_are_those_of_the_papers(monkeypatch):
    monkeypatch.setattr(DMControl, "_make_spec", lambda self: None)  # without a simulation
    names = ("BENCHMARKING", "DMC19", "DMC21", "walker-walk")
    tasks = {name: DMControl(name).task_names for name in names}
    assert list(tasks["BENCHMARKING"]) == BENCHMARKING
    assert len(tasks["DMC19"]) == 19 and set(tasks["DMC19"]) < set(BENCHMARKING)
    assert tasks["DMC21"] == (*tasks["DMC19"], "quadruped-walk", "quadruped-run")
    assert tasks["walker-walk"] == ("walker-walk",)


@pytest.mark.parametrize("name", slow_unless(DM_CONTROL_TASKS, ALL))
def test_every_task_gives_dm_controls_own_numbers(name):
    theirs = own(name)
    assert 999 < theirs._step_limit <= 1000
    compare_episodes(env_of(name, "eval", action_repeat=1), theirs, 25)


def test_full_episodes_are_equal_and_end_by_truncation():
    env = env_of("cartpole-swingup", "eval", action_repeat=1)
    compare_episodes(env, own("cartpole-swingup"), 1000)
    with pytest.raises(ResetNeeded):
        env.step(env.action_space.sample())


@pytest.mark.parametrize(
    ("name", "entries", "joint", "angle"),
    [
        ("reacher-easy", [0], "shoulder", 6 * np.pi),
        ("cheetah-run", [1], "rooty", 6 * np.pi),
        ("fish-swim", [], "tail1", 6.0),  # a spring turns it back
    ],
)
def test_full_turns_are_removed_from_counting_angles_only(name, entries, joint, angle):
    wrapped_env, env = (env_of(name, wrap_angles=wrap) for wrap in (True, False))
    others = np.setdiff1d(np.arange(env.observation_space.shape[0]), entries)
    assert same(wrapped_env.reset()[0][others], env.reset()[0][others])
    for one in (wrapped_env, env):
        one.unwrapped._environment.physics.named.data.qpos[joint] += angle
    largest = 0.0
    for action in actions_of(env, 25):
        wrapped, *rest = wrapped_env.step(action)
        observation, *own_rest = env.step(action)
        assert rest == own_rest and same(wrapped[others], observation[others])
        assert np.abs(wrapped[entries]).max(initial=0) <= np.pi + 1e-6
        turns = (observation[entries] - wrapped[entries]) / (2 * np.pi)
        assert np.allclose(turns, np.round(turns), atol=1e-5) and np.all(np.round(turns) >= 1)
        largest = max(largest, observation[[0, 1]].max())
    assert largest > np.pi + 0.1


def test_action_repeat_sums_rewards_up_to_the_horizon():
    with pytest.warns(UserWarning, match="of 10"):
        benchmark = DMControl(["cheetah-run"], action_repeat=3, horizon=10, reward_scale=0.5)
    assert (benchmark.spec.horizon, benchmark.spec.max_return) == (4, 5.0)
    assert benchmark.spec.protocol["frames"] == "10 control steps in 4 env steps"
    env, theirs = benchmark.make_env(0, "eval", 0), own("cheetah-run")
    for episode in range(2):
        theirs.task._random = np.random.RandomState(episode)
        env.reset()
        theirs.reset()
        for number, action in zip((3, 3, 3, 1), actions_of(env, 4), strict=True):
            steps = [theirs.step(action) for _ in range(number)]
            observation, reward, terminated, truncated, _ = env.step(action)
            assert same(observation, flat(steps[-1].observation))
            assert reward == sum(step.reward for step in steps) * 0.5
            assert not terminated and truncated == (number == 1)


def test_a_last_discount_of_zero_terminates_and_ends_the_repeats(monkeypatch):
    env = env_of("cartpole-balance", action_repeat=4)
    env.reset()
    discounts = iter([None, 0.0])
    monkeypatch.setattr(env._task, "get_termination", lambda physics: next(discounts))
    _, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert terminated and not truncated and 1.5 < reward < 2
    env.reset()
    monkeypatch.setattr(env._task, "get_termination", lambda physics: 1.0)
    assert env.step(np.zeros(1, np.float32))[2:4] == (False, True)


@pytest.mark.parametrize("fast", [True, False])
def test_an_unstable_simulation_raises_dm_controls_error(fast):
    from dm_control.rl.control import PhysicsError

    env = env_of("cheetah-run", fast=fast)
    env.reset()
    env.data.qvel[:] = 1e30
    with pytest.raises(PhysicsError, match="mjWARN_BAD"):
        env.step(np.zeros(6, np.float32))


def test_rendered_env_has_dm_controls_textures_cameras_and_rate():
    benchmark = DMControl(["cartpole-swingup", "quadruped-walk"], action_repeat=2)
    assert [benchmark.camera(task) for task in (0, 1)] == [0, 2]
    for task, rate in enumerate((50.0, 25.0)):
        trained = benchmark.make_env(task, "eval", 0)
        drawn = benchmark.make_rendered_env(task, "eval", 0)
        wanted = own(benchmark.task_names[task]).physics.model.ptr.tex_data
        assert np.array_equal(drawn.unwrapped.model.tex_data, wanted) and wanted.any()
        if platform.system() == "Linux":
            assert not trained.unwrapped.model.tex_data.any()
        assert trained.metadata["render_fps"] == pytest.approx(rate)


def test_cheaper_code_is_off_with_a_warning_where_steps_differ(monkeypatch, request):
    step = FastStepper.step

    def altered(self, action):
        reward, discount = step(self, action)
        return np.nextafter(reward, 2.0), discount

    assert DMControl(["pendulum-swingup"]).fast
    monkeypatch.setattr(FastStepper, "step", altered)
    steps_like_upstream.cache_clear()
    request.addfinalizer(steps_like_upstream.cache_clear)
    with pytest.warns(UserWarning, match=f"{np.__version__}"):
        assert not DMControl(["pendulum-swingup"]).fast


def test_dm_controls_modules_and_numpy_stay_as_they_are():
    suite = import_suite()
    for name in ("cartpole", "quadruped"):
        ours = domain(name, fast=True)
        theirs = getattr(suite, name)
        assert ours.Physics is not theirs.Physics and ours.rewards is not theirs.rewards
        assert theirs.np is np and theirs.rewards.tolerance is not tolerance
        assert theirs.Physics.__mro__[1].__module__ == "dm_control.mujoco.engine"
    assert np.hstack.__module__ == "numpy"


DEFINED = [
    (sigmoid, value)
    for sigmoid in SCALES
    for value in (0.0, 0.1, 0.5)
    if value or sigmoid in ("linear", "quadratic")
]


@pytest.mark.parametrize(("sigmoid", "value"), DEFINED)
@np.errstate(invalid="ignore")  # infinite bounds less infinite numbers
def test_tolerances_are_dm_controls(sigmoid, value):
    from dm_control.utils import rewards

    draws = np.random.default_rng(0)
    numbers = [0.0, -0.0, 1.0, np.nan, np.inf, *draws.normal(0, 2, 300).tolist()]
    vectors = [draws.normal(0, 2, size) for size in (1, 1, 1, 2, 5, 21)] + [np.zeros(1)]
    points = [np.array(x) for x in numbers[:20]]
    for bounds in ((0, 0), (0.0, 0.3), (1.5, np.inf), (-1, 1)):
        for margin in (0, 1, 0.7):
            for x in (*numbers, *map(np.float64, numbers), *vectors, *points):
                arguments = (x, bounds, margin, sigmoid, value)
                found, wanted = tolerance(*arguments), rewards.tolerance(*arguments)
                assert type(found) is type(wanted)
                assert same(np.asarray(found), np.asarray(wanted))


def test_tasks_with_one_model_edit_their_own():
    one, other = (load(name, fast=True).physics for name in ("walker-walk", "walker-run"))
    one.model.body_mass[:] = 7.0
    assert not (other.model.body_mass == 7.0).any()
