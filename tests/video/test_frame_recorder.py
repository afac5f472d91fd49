"""What is drawn of an environment, and with which library."""

import gymnasium as gym
import numpy as np
import pytest

from mtrl_lightning.envs import GymnasiumTasks, MetaWorld, Pixels, ToyReach
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
    render_mode = "rgb_array"

    def __init__(self, frame, render_fps=80):
        super().__init__(ToyReach(horizon=7).make_env(0, "train", 0))
        self.render = lambda: frame
        self.metadata = {"render_fps": render_fps}


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


def recorded(frame, num_steps, render_fps=80):
    return frames_of(FrameRecorder(Drawing(Drawn(frame, render_fps), None), True, SMALL), num_steps)


@pytest.mark.parametrize(
    ("steps_per_second", "steps"),
    [
        (80, [0, 3, 6, 7]),  # 30 frames of 80 steps a second, and the last step
        (10, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7]),
        (None, list(range(8))),
    ],
)
def test_frames_are_taken_in_simulated_time(steps_per_second, steps):
    frames = recorded(np.zeros((48, 64, 3), np.uint8), 7, steps_per_second)
    assert [frame.step for frame in frames] == steps


def test_a_frame_is_fitted_into_the_format_without_distortion():
    (frame,) = recorded(np.full((48, 48, 3), (200, 100, 50), np.uint8), 0)
    fitted = image_of(frame)
    assert fitted.shape == (48, 64, 3)
    assert np.abs(fitted[:, 8:56] - (200, 100, 50)).max() < 10
    assert fitted[:, :4].max() < 10 and fitted[:, -4:].max() < 10


def test_labels_are_those_of_the_episode_so_far():
    env = WithFrameRecorder(ToyReach(horizon=4), SMALL).make_env(0, "eval", 0)
    env.reset(seed=3)
    steps = [env.step(np.array([0.5, 0.5], np.float32)) for _ in range(4)]
    rewards = [step[1] for step in steps]
    successes = [step[4]["success"] for step in steps]
    frames = env.take_frames()[::3]  # 10 steps and 30 frames a second
    assert env.take_frames() == []
    assert [p.return_ for p in frames] == pytest.approx([0, *np.cumsum(rewards)])
    assert [p.success for p in frames] == [False, *np.logical_or.accumulate(successes)]


def test_the_toy_draws_the_point_and_its_goal():
    image = first_image(with_info(ToyReach(), ["success"]), VideoFormat(128, 128))
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
    cheetah = Pixels(GymnasiumTasks(["HalfCheetah-v5"], 5), size=16).make_env(0, "train", 0)
    assert cheetah.reset(seed=0)[0].std() > 20, "by its first camera"


def test_the_renderer_is_one_that_works(monkeypatch):
    monkeypatch.setattr(opengl, "can_render", lambda name: name != "egl")
    monkeypatch.setattr(opengl, "_find_renderer", opengl._find_renderer.__wrapped__)
    for chosen, found in (("", "osmesa"), ("glfw", "glfw")):
        monkeypatch.setenv("MUJOCO_GL", chosen)
        assert opengl.find_renderer() == found
