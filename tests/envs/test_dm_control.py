"""Tasks of the DeepMind Control Suite beside dm_control's own, equal in every bit."""

import os
import platform
import subprocess
import sys

import numpy as np
import psutil
import pytest

pytest.importorskip("dm_control")

from gymnasium.error import ResetNeeded

from mtrl_lightning.envs import DMControl
from mtrl_lightning.envs.benchmarks import dm_control_domains
from mtrl_lightning.envs.benchmarks.dm_control import steps_like_upstream
from mtrl_lightning.envs.benchmarks.dm_control_domains import domain, import_suite, load
from mtrl_lightning.envs.benchmarks.dm_control_env import FastStepper
from mtrl_lightning.envs.benchmarks.padding import Padded
from mtrl_lightning.envs.fast.arithmetic import SCALES
from mtrl_lightning.envs.fast.dm_control_fast import (
    NamedField,
    tolerance,
)
from tests.helpers.command_line import ROOT
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


def compare_steps(env, theirs, actions):
    """Step both with the same actions; ours has an action repeat of 1."""
    spec = theirs.action_spec()
    for action in actions:
        scaled = spec.minimum + (spec.maximum - spec.minimum) / 2 * (action.astype(np.float64) + 1)
        observation, reward, terminated, truncated, _ = env.step(action)
        step = theirs.step(scaled)
        assert same(observation, flat(step.observation)) and reward == step.reward
        assert not terminated and truncated == step.last()


# ---- What it is ----


def test_sizes_horizon_and_protocol():
    spec = DMControl("BENCHMARKING").spec
    assert list(spec.task_names) == BENCHMARKING
    for name in DM_CONTROL_TASKS[:3]:
        task, theirs = BENCHMARKING.index(name), own(name)
        assert spec.observation_sizes[task] == len(flat(theirs.reset().observation))
        assert spec.action_sizes[task] == theirs.action_spec().shape[0]
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
    monkeypatch.setattr(DMControl, "_make_spec", lambda self: None)
    small = DMControl("DMC19").task_names
    large = DMControl("DMC21").task_names
    assert len(small) == 19 and set(small) < set(BENCHMARKING)
    assert large == (*small, "quadruped-walk", "quadruped-run")
    assert DMControl("walker-walk").task_names == ("walker-walk",)


# ---- Steps ----


@pytest.mark.parametrize("name", slow_unless(DM_CONTROL_TASKS, ALL))
def test_every_task_gives_dm_controls_own_numbers(name):
    env = env_of(name, "eval", action_repeat=1)
    theirs = own(name)
    assert 999 < theirs._step_limit <= 1000
    actions = actions_of(env, 25)
    for episode in range(2):
        theirs.task._random = np.random.RandomState(episode)
        assert same(env.reset()[0], flat(theirs.reset().observation))
        compare_steps(env, theirs, actions)


TURNING = {
    "reacher-easy": (0, "shoulder"),
    "hopper-stand": (1, "rooty"),
    "cheetah-run": (1, "rooty"),
}
"""The entry of the observation that counts full turns, and the joint that makes them."""


@pytest.mark.parametrize("name", [*TURNING, "acrobot-swingup", "finger-spin", "fish-swim"])
def test_full_turns_are_removed_from_counting_angles_only(name):
    wrapped_env = env_of(name, wrap_angles=True)
    env = env_of(name)
    entry, joint = TURNING.get(name, (None, None))
    entries = [] if entry is None else [entry]
    others = np.setdiff1d(np.arange(env.observation_space.shape[0]), entries)
    assert same(wrapped_env.reset()[0][others], env.reset()[0][others])
    if joint is not None:
        for one in (wrapped_env, env):
            one.unwrapped._environment.physics.named.data.qpos[joint] += 6 * np.pi  # three turns

    for action in actions_of(env, 25):
        wrapped, *rest = wrapped_env.step(action)
        observation, *own_rest = env.step(action)

        assert rest == own_rest
        assert same(wrapped[others], observation[others])
        assert np.abs(wrapped[entries]).max(initial=0) <= np.pi + 1e-6
        turns = (observation[entries] - wrapped[entries]) / (2 * np.pi)
        assert np.allclose(turns, np.round(turns), atol=1e-5)
        assert np.all(np.round(turns) >= 1)


def test_a_joint_that_a_spring_turns_back_keeps_its_angle():
    envs = [env_of("fish-swim", action_repeat=1, wrap_angles=wrap) for wrap in (True, False)]
    observations = []
    for env in envs:
        env.reset()
        env.unwrapped._environment.physics.named.data.qpos["tail1"] = 4.0
        observations.append(env.step(np.zeros(env.action_space.shape, np.float32))[0])

    assert observations[1][0] > np.pi + 0.1
    assert same(*observations)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cartpole-swingup", "reacher-easy", "finger-turn_hard"])
def test_whole_episodes_are_equal_and_end_by_truncation(name):
    env = env_of(name, "eval", action_repeat=1)
    theirs = own(name)
    for episode in range(2):
        theirs.task._random = np.random.RandomState(episode)
        assert same(env.reset()[0], flat(theirs.reset().observation))
        compare_steps(env, theirs, actions_of(env, 1000, seed=episode))
        with pytest.raises(ResetNeeded):
            env.step(env.action_space.sample())


def test_action_repeat_sums_rewards_up_to_the_horizon():
    with pytest.warns(UserWarning, match="of 10"):
        benchmark = DMControl(["cheetah-run"], action_repeat=3, horizon=10, reward_scale=0.5)
    assert (benchmark.spec.horizon, benchmark.spec.max_return) == (4, 5.0)
    assert benchmark.spec.protocol["frames"] == "10 control steps in 4 env steps"
    env = benchmark.make_env(0, "eval", 0)
    theirs = own("cheetah-run")
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


def test_an_unstable_simulation_raises_dm_controls_error():
    from dm_control.rl.control import PhysicsError

    for fast in (True, False):
        env = env_of("cheetah-run", fast=fast)
        env.reset()
        env.data.qvel[:] = 1e30
        with pytest.raises(PhysicsError, match="mjWARN_BAD"):
            env.step(np.zeros(6, np.float32))


# ---- Seeds ----


def test_a_test_episode_is_dm_controls_with_this_number():
    env = env_of("reacher-easy", "eval", seed=7)
    wanted = [
        flat(import_suite().load("reacher", "easy", {"random": k}).reset().observation)
        for k in range(4)
    ]
    assert all(same(env.reset()[0], start) for start in wanted)
    assert same(env.reset(seed=2)[0], wanted[2]) and same(env.reset()[0], wanted[3])


# ---- Bodies of different sizes, worker processes ----


def test_equal_sizes_are_not_padded():
    benchmark = DMControl(["walker-walk", "walker-run"])
    assert benchmark.spec.observation_sizes == benchmark.spec.action_sizes == ()
    assert not isinstance(benchmark.make_env(1, "train", 0), Padded)


# ---- Memory and pictures ----


@pytest.mark.skipif(platform.system() != "Linux", reason="pages are returned to Linux")
def test_a_further_environment_takes_two_mebibytes_at_most():
    benchmark = DMControl(["walker-walk"])
    envs = [benchmark.make_env(0, "train", 0)]
    before = psutil.Process().memory_full_info().uss
    envs += [benchmark.make_env(0, "train", seed) for seed in range(20)]
    taken = psutil.Process().memory_full_info().uss - before
    assert taken < 20 * 2 * 2**20 < 20 * envs[0].unwrapped.model.nbuffer


def test_rendered_env_has_dm_controls_textures():
    benchmark = DMControl(["walker-walk"])
    trained = benchmark.make_env(0, "eval", 0)
    drawn = benchmark.make_rendered_env(0, "eval", 0)
    wanted = own("walker-walk").physics.model.ptr.tex_data
    assert np.array_equal(drawn.unwrapped.model.tex_data, wanted)
    if platform.system() == "Linux":
        assert not trained.unwrapped.model.tex_data.any() and wanted.any()


# ---- What cannot be ----


def test_cheaper_code_is_off_with_a_warning_where_steps_differ(monkeypatch):
    step = FastStepper.step

    def altered(self, action):
        reward, discount = step(self, action)
        return np.nextafter(reward, 2.0), discount

    monkeypatch.setattr(FastStepper, "step", altered)
    steps_like_upstream.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"{np.__version__}"):
            assert not DMControl(["pendulum-swingup"]).fast
    finally:
        steps_like_upstream.cache_clear()
    monkeypatch.undo()
    assert DMControl(["pendulum-swingup"]).fast


# ---- The import ----

QUIET = """
import os, sys
from mtrl_lightning.envs import DMControl
assert not any(name.startswith(("dm_control", "mujoco")) for name in sys.modules)
DMControl(["quadruped-escape"]).make_env(0, "train", 0).reset()
assert "MUJOCO_GL" not in os.environ and "torch" not in sys.modules
"""


def run(**environment):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")
    }
    return subprocess.run(
        [sys.executable, "-c", QUIET],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_display_the_import_prints_nothing():
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- The parts of the cheaper code ----


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


def test_names_are_converted_as_dm_control_does():
    physics = load("manipulator-bring_ball", fast=True).physics
    their_fields = {"qpos": physics._named.data.qpos, "xpos": physics._named.data.xpos}
    places = {
        "qpos": ["arm_root", ["finger", "thumb"], 2, [1, 3], slice(2), slice(None, None, 2)],
        "xpos": [
            ("hand", "x"),
            ("hand", ["x", "z"]),
            (["hand", "ball"], "z"),
            (slice(1, None), ["x", "z"]),
            "ball",
            1,
            (1, 2),
            [1, 2],
            np.array([1, 2]),
            (np.array([["hand"], ["ball"]]), ["x", "z"]),
        ],
    }
    for name, keys in places.items():
        field = getattr(physics.named.data, name)
        assert isinstance(field, NamedField)
        for key in (*keys, *keys):  # the second time from what was kept
            found, wanted = field[key], their_fields[name][key]
            assert same(np.asarray(found), np.asarray(wanted))
            assert np.shares_memory(found, field._array) == np.shares_memory(wanted, field._array)
    physics.named.data.qpos["arm_root"] = 0.25
    assert physics.data.qpos[0] == 0.25 and physics.named.data.qpos.shape == (11,)


def test_tasks_with_one_model_share_only_its_compilation():
    one, other = (load(name, fast=True).physics for name in ("walker-walk", "walker-run"))
    assert dm_control_domains._compiled.cache_info().hits >= 1
    one.model.body_mass[:] = 7.0
    assert not (other.model.body_mass == 7.0).any()


def test_videos_know_frame_rate_and_camera():
    benchmark = DMControl(["cartpole-swingup", "quadruped-walk"], action_repeat=2)
    assert [benchmark.camera(task) for task in (0, 1)] == [0, 2]
    steps_per_second = [
        benchmark.make_env(task, "eval", 0).metadata["render_fps"] for task in (0, 1)
    ]
    assert steps_per_second == pytest.approx([50.0, 25.0])
