"""Images as observations: stacks, states, and what cannot be drawn."""

import numpy as np
import pytest

from mtrl_lightning.envs import DMControl, Pixels, ToyReach, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import WithInfo
from mtrl_lightning.envs.benchmarks.wrappers import WithWrappers, with_layers_of
from mtrl_lightning.envs.render import pixels
from mtrl_lightning.envs.render.frame_recorder import VideoFormat, WithFrameRecorder, decompressed
from mtrl_lightning.envs.render.renderer import SimulationRenderer
from mtrl_lightning.errors import EnvironmentFaultError
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.fakes import Drift

TASKS = ["cheetah-run", "cartpole-swingup"]


@pytest.fixture(scope="module")
def suite():
    """Two tasks of dm_control of different sizes, drawn at 16 x 16 pixels."""
    pytest.importorskip("dm_control")
    skip_without_renderer()
    return Pixels(DMControl(TASKS, horizon=20), size=16)


def actions_of(benchmark, num_envs, steps):
    generator = np.random.default_rng(0)
    shape = (steps, num_envs, *benchmark.spec.action_space.shape)
    return generator.uniform(-1, 1, shape).astype(np.float32)


def test_observations_stack_frames_and_repeat_the_first():
    benchmark = Pixels(ToyReach(2, horizon=5), size=32, frame_stack=3)
    env = benchmark.make_env(1, "train", seed=0)
    observation, _ = env.reset(seed=4)
    assert observation.shape == (3, 3, 32, 32) and observation.dtype == np.uint8
    assert env.observation_space == benchmark.spec.observation_space
    # each of the 32 pixels of a side is the mean of 4 of the image's 128, rounded twice
    whole = env.unwrapped.render().astype(float).reshape(32, 4, 32, 4, 3).mean((1, 3))
    assert np.abs(observation[0] - whole.transpose(2, 0, 1)).max() <= 1
    frames = [observation[0]] * 3
    for action in actions_of(benchmark, 1, 5)[:, 0]:
        frames.append(env.step(action)[0][-1])
        following = env.unwrapped.render()
        assert np.array_equal(env._stack, np.stack(frames[-3:]))
        assert not np.array_equal(frames[-1], frames[-2])
        assert np.array_equal(pixels._scaled(following, 32).transpose(2, 0, 1), frames[-1])
    again, _ = env.reset(seed=5)
    assert np.array_equal(again[0], again[2]) and not np.array_equal(again[0], frames[-1])


def test_spec_has_images_and_names_the_drawing(suite):
    states = suite.benchmark.spec
    spec = suite.spec
    assert spec.observation_space.shape == (3, 3, 16, 16) and spec.frame_stack == 3
    assert spec.observation_sizes == () and spec.action_sizes == states.action_sizes == (6, 1)
    assert (spec.horizon, spec.max_return) == (states.horizon, states.max_return)
    drawn = {"pixels": "16 x 16", "frame_stack": 3, "drawn": "plain"}
    assert spec.protocol == {**states.protocol, **drawn}
    papers = Pixels(suite.benchmark, 16, 1, "side", True, True, True)
    assert papers.spec.protocol["drawn"] == "shadows reflections multisampling"
    assert papers.spec.protocol["camera"] == "side"


def test_step_draws_one_image_and_keeps_the_model(suite, monkeypatch):
    drawn = []
    draw = SimulationRenderer.__call__
    monkeypatch.setattr(
        SimulationRenderer, "__call__", lambda self: drawn.append(self) or draw(self)
    )
    env = Pixels(DMControl(TASKS[:1], horizon=20, action_repeat=5), 16).make_env(0, "train", 0)
    model = env.unwrapped.model
    quality = model.vis.quality
    former = DMControl(TASKS[:1]).make_env(0, "train", 0).unwrapped.model.vis
    assert quality.shadowsize == former.quality.shadowsize > 0
    assert quality.offsamples == former.quality.offsamples > 0
    assert model.vis.global_.offwidth == former.global_.offwidth
    drawn.clear()
    env.reset(seed=0)
    ended = False
    while not ended:
        *_, ended, _ = env.step(np.ones(6, np.float32))
    assert len(drawn) == 1 + 4
    env.close()


@pytest.mark.slow
def test_frames_are_equal_in_workers_and_resume_in_mid_episode(suite):
    """With an episode that ends after the state was taken, so that a stack begins there."""
    actions = actions_of(suite, 2, 16)

    def steps(envs, first, end):
        found = []
        for action_EA in actions[first:end]:
            envs.send(action_EA)
            result = envs.receive()
            found += [result.observation_ED, result.next_observation_ED, result.reward_E]
        return found

    envs = VectorEnv(suite, [0, 1], seed=3, num_workers=0)
    envs.reset(seed=7)
    before = steps(envs, 0, 6)
    state = envs.get_state()
    after = steps(envs, 6, 16)
    envs.close()
    for num_workers in (0, 1):
        others = VectorEnv(suite, [0, 1], seed=99, num_workers=num_workers)
        others.reset(seed=7)
        for found, wanted in zip(steps(others, 0, 6), before, strict=True):
            assert np.array_equal(found, wanted)
        others.reset(seed=8)
        others.set_state(state)
        for found, wanted in zip(steps(others, 6, 16), after, strict=True):
            assert np.array_equal(found, wanted)
        others.close()


def test_videos_are_the_same_with_and_without_observed_images(suite):
    format = VideoFormat(48, 32)
    images = []
    for benchmark in (suite.benchmark, suite):
        env = WithFrameRecorder(benchmark, format).make_env(0, "eval", seed=0)
        env.reset(seed=0)
        for _ in range(2):
            env.step(np.ones(6, np.float32))
        images.append([np.asarray(decompressed(one.jpeg)) for one in env.take_frames()])
        env.close()
    assert len(images[0]) == len(images[1]) > 1
    assert all(np.array_equal(a, b) for a, b in zip(*images, strict=True))


def test_nonfinite_state_behind_an_image_is_a_fault():
    benchmark = Pixels(ToyReach(1, horizon=9), size=8)
    envs = VectorEnv(benchmark, [0], num_workers=0)
    envs.reset(seed=0)
    envs.step(np.zeros((1, 2), np.float32))
    (env,) = envs._groups[0]._group._envs
    env.unwrapped._position = np.array([np.nan, 0.0])
    with pytest.raises(EnvironmentFaultError, match="state"):
        envs.step(np.zeros((1, 2), np.float32))
    envs.close()


def test_a_benchmark_that_replaces_another_is_drawn_as_that_one():
    former = Pixels(WithWrappers(ToyReach(1, horizon=9), [Drift]), size=8)
    changed = with_layers_of(former, ToyReach(1, horizon=7))
    assert isinstance(changed, Pixels) and changed.size == 8 and changed.spec.horizon == 7
    assert "Drift" in changed.spec.protocol["wrappers"]
    drawn = Pixels(ToyReach(1, horizon=7), size=12)
    assert with_layers_of(former, drawn).size == 12
    logged = with_layers_of(former, WithInfo(drawn, ["distance"]))
    assert isinstance(logged, WithInfo) and logged.keys == ("distance",)
    assert logged.benchmark.size == 12 and not isinstance(logged.benchmark.benchmark, Pixels)
    assert "Drift" in logged.spec.protocol["wrappers"]
