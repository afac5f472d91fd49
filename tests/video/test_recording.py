"""Video files: what they show, and what ends without one."""

import numpy as np
import pytest
from PIL import Image

from mtrl_lightning import record_videos
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.rollout import Evaluator
from mtrl_lightning.video import VideoFormat, gif
from mtrl_lightning.video.drawing import Mosaic
from mtrl_lightning.video.encoding import write_mp4
from tests.helpers.altered_reach import Halves
from tests.helpers.fakes import Constant, Recorder, Scripted, Seeker, scripted_length
from tests.helpers.video import frames_of

SMALL = VideoFormat(96, 64)


class ScriptedWithImages(Scripted):
    """``Scripted``, whose frame is as bright as the episode's step says."""

    def make_rendered_env(self, task, split, seed):
        env = self.make_env(task, split, seed)
        env.render_mode = "rgb_array"
        env.render = lambda: np.full((64, 96, 3), 30 * env.steps, np.uint8)
        return env


@pytest.mark.slow
def test_a_video_shows_the_episodes_of_an_evaluation(tmp_path):
    benchmark, policy = ToyReach(num_tasks=3, horizon=6), Recorder(Seeker(3))
    recording = record_videos(
        policy, benchmark, tmp_path / "new", num_episodes=2, format=SMALL, num_workers=0
    )
    assert set(policy.modes) == {"exploit"}
    names = ["goal-0.mp4", "goal-1.mp4", "goal-2.mp4", "all_tasks.mp4"]
    assert [path.name for path in recording.files.values()] == names
    assert all(path.parent == tmp_path / "new" for path in recording.files.values())
    evaluation = Evaluator(benchmark, num_episodes=2, num_workers=0).evaluate(Seeker(3))
    returns = [episode.return_ for episode in recording.episodes]
    assert np.reshape(returns, (3, 2)).mean(1) == pytest.approx(evaluation.return_T, rel=1e-12)
    assert [(e.task, e.number, e.length) for e in recording.episodes] == [
        (f"goal-{task}", number, 6) for task in range(3) for number in range(2)
    ]
    # 10 steps a second and 30 frames: 6 steps are 18 places after the first, in each episode
    frames, meta = frames_of(recording.files["goal-1"])
    assert frames.shape == (2 * 19, 64, 96, 3) and meta["fps"] == 30
    joined, _ = frames_of(recording.files["all_tasks"])
    assert joined.shape == (2 * 19, 2 * 64, 2 * 96, 3)
    middle = joined[:, 32:64, 96:192].astype(int)
    assert np.abs(middle - frames[:, 32:].astype(int)).mean() < 3


def test_a_shorter_episode_keeps_its_last_frame(tmp_path):
    benchmark = ScriptedWithImages(2)
    recording = record_videos(
        Constant(), benchmark, tmp_path, first_episode=1, format=SMALL, num_workers=0
    )
    lengths = [scripted_length(task, 1) for task in range(2)]
    assert [episode.length for episode in recording.episodes] == lengths
    assert [episode.number for episode in recording.episodes] == [1, 1]
    joined, _ = frames_of(recording.files["all_tasks"])
    assert len(joined) == max(lengths) + 1
    assert joined[0, :40].max() > 100, "labels, white on black"
    for task, length in enumerate(lengths):
        brightness = joined[:, 50, 96 * task + 48, 0].astype(int)
        expected = 30 * np.minimum(np.arange(len(joined)), length)
        assert np.abs(brightness - expected).max() < 8
        alone, _ = frames_of(recording.files[f"task-{task}"])
        assert len(alone) == length + 1


def test_tasks_side_by_side_fit_on_a_screen():
    mosaic = Mosaic(50, 480, 360)
    assert (mosaic.columns, mosaic.rows, mosaic.cell) == (8, 7, (240, 180))
    joined = mosaic.joined([Image.new("RGB", (240, 180), (number, 0, 0)) for number in range(50)])
    assert joined.size == (8 * 240, 7 * 180)
    assert joined.getpixel((240 + 5, 6 * 180 + 5)) == (49, 0, 0), "the last one, in the last row"


def test_tasks_are_those_of_the_split_and_matched_by_name(tmp_path):
    benchmark = Halves(2, horizon=3)
    policy = Recorder(spec=benchmark.spec._replace(task_names=("goal-1", "goal-0")))
    options = {"format": SMALL, "num_workers": 0}
    for split, task in {None: 1, "train": 0}.items():
        recording = record_videos(policy, benchmark, tmp_path, split=split, **options)
        assert [episode.task for episode in recording.episodes] == [f"goal-{task}"]
        assert policy.tasks[-1].tolist() == [1 - task]


def test_every_task_has_a_file_of_its_own(tmp_path):
    names = ("a/b", "a_b", "A_B")

    class Renamed(ScriptedWithImages):
        @property
        def spec(self):
            return super().spec._replace(task_names=names)

    recording = record_videos(Constant(), Renamed(3), tmp_path, format=SMALL, num_workers=0)
    assert list(recording.files) == [*names, "all_tasks"]
    assert len({path.name.casefold() for path in tmp_path.iterdir()}) == 4


def test_a_gif_has_fewer_and_smaller_images(tmp_path):
    write_mp4(tmp_path / "a.mp4", [Image.new("RGB", (640, 320), (i, i, i)) for i in range(60)], 30)
    (tmp_path / "a.gif").write_bytes(gif(tmp_path / "a.mp4"))
    with Image.open(tmp_path / "a.gif") as image:
        found = image.size, image.n_frames, image.info["duration"]
    assert found == ((320, 160), 20, 100)
