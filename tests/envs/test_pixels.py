"""Images as observations: stacks, states, and what cannot be drawn."""

import numpy as np
import pytest
from gymnasium.wrappers import TransformObservation

from mtrl_lightning.envs import DMControl, Pixels, ToyReach, VectorEnv, WithWrappers
from mtrl_lightning.envs.render.frame_recorder import VideoFormat, WithFrameRecorder, decompressed
from mtrl_lightning.errors import EnvironmentFaultError
from tests.helpers.command_line import skip_without_renderer


@pytest.fixture(scope="module")
def suite():
    """Two tasks of dm_control of different sizes, drawn at 16 x 16 pixels."""
    pytest.importorskip("dm_control")
    skip_without_renderer()
    return Pixels(DMControl(["cheetah-run", "cartpole-swingup"], horizon=20), size=16)


def test_observations_stack_frames_and_repeat_the_first():
    benchmark = Pixels(ToyReach(2, horizon=5), size=32, frame_stack=3)
    env = benchmark.make_env(1, "train", seed=0)

    def assert_drawn(frame):
        # each of the 32 pixels of a side is the mean of 4 of the image's 128, rounded twice
        image = env.unwrapped.render().astype(float).reshape(32, 4, 32, 4, 3).mean((1, 3))
        assert np.abs(frame - image.transpose(2, 0, 1)).max() <= 1

    observation, _ = env.reset(seed=4)
    assert observation in env.observation_space == benchmark.spec.observation_space
    frames = [observation[0]] * 3
    for action in np.random.default_rng(0).uniform(-1, 1, (5, 2)):
        assert np.array_equal(observation, np.stack(frames[-3:]))
        assert_drawn(frames[-1])
        observation, *_ = env.step(action)
        frames.append(observation[-1])
        assert not np.array_equal(frames[-1], frames[-2])
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
    factor = [1.0]

    def spoiled(env):
        return TransformObservation(env, lambda state: state * factor[0], None)

    benchmark = Pixels(WithWrappers(ToyReach(1, horizon=9), [spoiled]), size=8)
    envs = VectorEnv(benchmark, [0], num_workers=0)
    envs.reset(seed=0)
    factor[0] = np.nan
    for call in (lambda: envs.step(np.zeros((1, 2), np.float32)), envs.reset):
        with pytest.raises(EnvironmentFaultError, match="state"):
            call()
