"""Gymnasium tasks with discrete actions, from stepping to files."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.wrappers import FrameStackObservation, TimeLimit, TransformObservation

from mtrl_lightning import PPO, SAC, train
from mtrl_lightning.demonstrations import UniformPolicy, collect, open_data_sets, write_data_sets
from mtrl_lightning.envs import GymnasiumTasks, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.policy import export_policy, load_exported, observations_of
from mtrl_lightning.networks import MLP, PixelEncoder, Standardize
from mtrl_lightning.policy import LoadedPolicy

CLASSIC = ["CartPole-v1", "Acrobot-v1"]
REGISTERED = "mtrl_lightning.envs.benchmarks.registered"
SMALL = partial(MLP, width=8, depth=1, output_bound=0.5)
ONE_BATCH = {"num_epochs": 1, "num_minibatches": 1}


class Echo(gym.Env):
    """An environment whose observation is the last action."""

    def __init__(self, action_space, size):
        self.action_space = action_space
        self.observation_space = Box(-10.0, 10.0, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.float32(action).reshape(self.observation_space.shape), 0.0, False, False, {}


def echo(action_space, size=1):
    return lambda: TimeLimit(Echo(action_space, size), 5)


def test_steps_take_the_index_of_the_largest_entry():
    benchmark = GymnasiumTasks(CLASSIC)
    assert benchmark.spec.action_choices == (3,) and benchmark.spec.action_sizes == (2, 3)
    rng = np.random.default_rng(0)
    for task, name in enumerate(CLASSIC):
        ours, theirs = benchmark.make_env(task, "train", 0), gym.make(name)
        ours.reset(seed=5)
        theirs.reset(seed=5)
        for _ in range(20):
            score_A = rng.uniform(-1, 1, 3).astype(np.float32)
            index = score_A[: benchmark.spec.action_sizes[task]].argmax()
            observation_D, reward, *ends, _ = ours.step(score_A)
            expected_D, expected, *expected_ends, _ = theirs.step(index)
            np.testing.assert_array_equal(observation_D[: len(expected_D)], expected_D)
            assert (reward, ends) == (expected, expected_ends)
            if any(ends):
                break


def test_minigrid_is_learned_from_the_agents_view(tmp_path):
    pytest.importorskip("minigrid")
    name = "MiniGrid-DoorKey-5x5-v0"
    view = f"{REGISTERED}:MiniGridView-v0"
    benchmark = GymnasiumTasks({"door": {"id": view, "kwargs": {"name": name}}}, horizon=288)
    ours = benchmark.make_env(0, "eval", 0)
    theirs = gym.make(name)
    observation_D, _ = ours.reset(seed=3)
    observation, _ = theirs.reset(seed=3)
    for action in (0, 2, 1, 2):
        np.testing.assert_array_equal(observation_D, observation["image"].ravel())
        observation_D, *_ = ours.step(np.eye(7)[action])
        observation, *_ = theirs.step(action)
    algorithm = partial(PPO, actor=SMALL, critic=SMALL, encoder=Standardize, num_steps=5)
    run = train(benchmark, partial(algorithm, **ONE_BATCH), total_steps=10, root=tmp_path)
    seen = run.algorithm.encoder
    assert (seen.count, seen.mean_D.max() > 1) == (2, True)


def atari(name):
    """Return the last four grey screens of a game, at half their size."""
    env = gym.make(f"ale_py:ALE/{name}-v5", obs_type="grayscale")
    env = TransformObservation(env, lambda screen: screen[::2, ::2], Box(0, 255, (105, 80), "u1"))
    return FrameStackObservation(TimeLimit(env, 200), 4)


@pytest.mark.slow
def test_three_atari_games_are_trained_for_2000_steps(tmp_path):
    pytest.importorskip("ale_py")
    games = ("Pong", "Breakout", "Freeway")
    benchmark = GymnasiumTasks({name: partial(atari, name) for name in games})
    assert benchmark.spec.observation_space.shape == (1, 4, 105, 80)
    assert benchmark.spec.action_sizes == (6, 4, 3)
    encoder = partial(PixelEncoder, channels=8, strides=(4, 4))
    algorithm = partial(PPO, actor=SMALL, critic=SMALL, encoder=encoder, num_steps=100)
    run = train(
        benchmark,
        partial(algorithm, **ONE_BATCH),
        total_steps=2_000,
        root=tmp_path,
        evaluation={"num_episodes": 1, "num_workers": 0},
        num_workers=0,
    )
    assert all(f"eval/return/{game}" in run.evaluation for game in games)


@pytest.mark.parametrize("length", [0.5, 1.0])
def test_poles_of_another_length_are_cartpole_with_that_length(length):
    ours = gym.make(f"{REGISTERED}:CartPoleLength-v0", length=length)
    theirs = gym.make("CartPole-v1")
    theirs.unwrapped.length = length
    theirs.unwrapped.polemass_length = length * theirs.unwrapped.masspole
    assert ours.spec.max_episode_steps == theirs.spec.max_episode_steps
    ours.reset(seed=1)
    theirs.reset(seed=1)
    for action in (0, 1, 1, 0, 1):
        np.testing.assert_array_equal(ours.step(action)[0], theirs.step(action)[0])


def test_components_and_starts_are_those_of_the_space():
    space = MultiDiscrete([3, 2], start=[1, 5])
    benchmark = GymnasiumTasks({"several": echo(space, 2)})
    assert benchmark.spec.action_choices == (3, 2)
    envs = VectorEnv(benchmark, [0], num_workers=0)
    envs.reset()
    observation_ED, *_ = envs.step(np.float32([[0, 0, 1, 1, 0]]))
    assert observation_ED.tolist() == [[3, 5]]
    shifted = GymnasiumTasks({"shifted": echo(Discrete(3, start=-1))}).make_env(0, "train", 0)
    shifted.reset()
    assert shifted.step(np.float32([1, 0, 0]))[0].tolist() == [-1]


@pytest.mark.parametrize("other", [Box(-1, 1, (2,)), MultiDiscrete([2, 2])], ids=["box", "multi"])
def test_one_agent_has_actions_of_one_kind(other):
    with pytest.raises(ConfigurationError, match="kinds"):
        GymnasiumTasks({"discrete": echo(Discrete(2)), "other": echo(other)})


@pytest.mark.parametrize("tasks", [CLASSIC, {"several": echo(MultiDiscrete([3, 2]), 2)}])
def test_minari_data_sets_have_the_indices(tmp_path, tasks):
    minari = pytest.importorskip("minari")
    benchmark = GymnasiumTasks(tasks)
    collected = collect(UniformPolicy(benchmark.spec), benchmark, 2, num_workers=0)
    write_data_sets(tmp_path / "data", benchmark.spec, collected.episodes, {})
    for task, data in open_data_sets(tmp_path / "data").items():
        index = benchmark.spec.task_names.index(task)
        own = benchmark.make_env(index, "train", 0).unwrapped.action_space
        (path,) = (tmp_path / "data").glob(f"{task[:4]}*/data")
        assert minari.MinariDataset(path).action_space == own
        for read, written in zip(data.episodes(), collected.episodes[task], strict=True):
            size = read.actions.shape[1]
            np.testing.assert_array_equal(read.actions, written.actions[:, :size])
            assert not written.actions[:, size:].any()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch.export"])
@pytest.mark.parametrize("tasks", [CLASSIC, {"several": echo(MultiDiscrete([3, 2]), 2)}])
def test_exported_policies_return_the_indices(tmp_path, format, tasks):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    spec = GymnasiumTasks(tasks).spec
    policy = LoadedPolicy(SAC(spec, actor=SMALL, critic=SMALL))
    file, _ = export_policy(policy, format, tmp_path, num_observations=40)
    observation_ED, task_E = observations_of(spec, 40)
    index = load_exported(file, format)(observation_ED, task_E)
    parts = np.split(policy.act(observation_ED, task_E), np.cumsum(spec.action_choices)[:-1], 1)
    expected = np.stack([part.argmax(1) for part in parts], 1)
    np.testing.assert_array_equal(index.reshape(expected.shape), expected)
    assert len(np.unique(index)) > 1
