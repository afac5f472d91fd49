"""What is drawn of an environment, and with which library."""

import gymnasium as gym
import numpy as np
import pytest

from mtrl_lightning.envs import GymnasiumTasks, MetaWorld, ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import with_info
from mtrl_lightning.envs.render import opengl
from mtrl_lightning.envs.render.frame_recorder import (
    FrameRecorder,
    VideoFormat,
    WithFrameRecorder,
    decompressed,
)
from mtrl_lightning.envs.render.renderer import Drawing
from tests.helpers.command_line import skip_without_renderer

SMALL = VideoFormat(64, 48)


class Drawn(gym.Wrapper):
    """An environment whose frame is given."""

    render_mode = "rgb_array"

    def __init__(self, frame, render_fps=80):
        super().__init__(ToyReach(horizon=7).make_env(0, "train", 0))
        self.frame = frame
        self.metadata = {"render_fps": render_fps}

    def render(self):
        return self.frame


def frames_of(env, num_steps):
    env.reset(seed=0)
    for _ in range(num_steps):
        env.step(np.zeros(env.action_space.shape, np.float32))
    return env.take_frames()


def image_of(frame):
    return np.asarray(decompressed(frame.jpeg)).astype(int)


def first_image(benchmark, format):
    env = WithFrameRecorder(benchmark, format).make_env(0, "eval", 0)
    (frame,) = frames_of(env, 0)
    env.close()
    return image_of(frame)


def framed(env):
    return FrameRecorder(Drawing(env, None), True, SMALL)


@pytest.mark.parametrize(
    ("steps_per_second", "steps"),
    [
        (80, [0, 3, 6, 7]),  # 30 frames of 80 steps a second, and the last step
        (10, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7]),
        (None, list(range(8))),
    ],
)
def test_frames_are_taken_in_simulated_time(steps_per_second, steps):
    env = framed(Drawn(np.zeros((48, 64, 3), np.uint8), steps_per_second))
    assert [frame.step for frame in frames_of(env, 7)] == steps
    assert env.take_frames() == []


def test_a_frame_is_fitted_into_the_format_without_distortion():
    image = np.full((48, 48, 3), (200, 100, 50), np.uint8)
    (frame,) = frames_of(framed(Drawn(image)), 0)
    fitted = image_of(frame)
    assert fitted.shape == (48, 64, 3)
    assert np.abs(fitted[:, 8:56] - image[:, :48]).max() < 10
    assert fitted[:, :4].max() < 10 and fitted[:, -4:].max() < 10


def test_labels_are_those_of_the_episode_so_far():
    env = WithFrameRecorder(ToyReach(horizon=4), SMALL).make_env(0, "eval", 0)
    env.reset(seed=3)
    steps = [env.step(np.array([0.5, 0.5], np.float32)) for _ in range(4)]
    rewards = [step[1] for step in steps]
    successes = [step[4]["success"] for step in steps]
    frames = env.take_frames()[::3]  # 10 steps and 30 frames a second
    assert [p.return_ for p in frames] == pytest.approx([0, *np.cumsum(rewards)])
    assert [p.success for p in frames] == [False, *np.logical_or.accumulate(successes)]


@pytest.mark.parametrize("benchmark", [ToyReach(), with_info(ToyReach(), ["success"])])
def test_the_toy_draws_the_point_and_its_goal(benchmark):
    image = first_image(benchmark, VideoFormat(128, 128))
    goal_row, goal_column = 64, round(64 * 1.7)
    assert image[goal_row, goal_column, 1] > image[goal_row, goal_column, 0] + 50
    assert (image[..., 2] > image[..., 0] + 80).sum() > 10


def test_metaworld_is_drawn_upright():
    skip_without_renderer()
    image = first_image(MetaWorld(["reach"]), VideoFormat(160, 120))
    above, below = image[:15], image[-15:]
    assert above.std(axis=(0, 1)).max() < 3, "the grey of nothing"
    assert below.std(axis=(0, 1)).max() > 20, "floor, table and the robot's foot"
    red = image[..., 0] - image[..., 1:].max(axis=-1) > 60
    assert red[:, :80].sum() > 5 * red[:, 80:].sum(), "the arm stands on the left: no mirror image"


def test_a_gymnasium_simulation_is_drawn():
    skip_without_renderer()
    format = VideoFormat(96, 64)

    def own():  # takes no render mode
        return gym.make("InvertedPendulum-v5")

    for pole in ("InvertedPendulum-v5", own):
        image = first_image(GymnasiumTasks({"pole": pole}, horizon=5), format)
        assert image.shape == (64, 96, 3) and image.std() > 5


@pytest.fixture
def installed(monkeypatch):
    """Set which renderers work, and forget what was found before."""
    working = set()
    opengl._find_renderer.cache_clear()
    monkeypatch.setattr(opengl, "can_render", lambda name: name in working)
    monkeypatch.setattr(opengl.sys, "platform", "linux")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    yield working
    opengl._find_renderer.cache_clear()


def test_the_renderer_is_one_that_works(installed, monkeypatch):
    installed |= {"osmesa", "glfw"}
    assert opengl.find_renderer() == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert opengl.find_renderer() == "glfw", "what was chosen is taken"
