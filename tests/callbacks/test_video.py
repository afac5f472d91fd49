"""Videos in the course of a run change nothing of it, and end nothing."""

import signal
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from mtrl_lightning import SAC, read_metrics
from mtrl_lightning.callbacks import VideoCallback, video
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import EnvironmentFaultError, Interrupted
from mtrl_lightning.networks import MLP
from tests.helpers.command_line import short_train

narrow = partial(MLP, width=8)
SMALL = {"width": 64, "height": 48, "num_workers": 0}


def trained(root, *callbacks, **options):
    return short_train(
        ToyReach(num_tasks=2, horizon=5),
        partial(SAC, actor=narrow, critic=narrow),
        total_steps=48,
        root=str(root),
        evaluation={"every": 12},
        metrics={"every": 24},
        checkpoint={"every": 48},
        callbacks=callbacks,
        num_workers=0,
        **options,
    )


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.mp4"))


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


@pytest.mark.slow
def test_a_run_with_videos_is_the_run_without_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain = trained(tmp_path / "plain")
    logger = TensorBoardLogger(tmp_path / "logged", name="", version="")
    callback = VideoCallback(every=3, tasks=["goal-1"], **SMALL)
    filmed = trained(tmp_path / "filmed", callback, loggers=[logger])
    metrics = [read_metrics(run.folder) for run in (plain, filmed)]
    with_times = [{n: v for n, v in one.items() if not n.startswith("time/")} for one in metrics]
    assert with_times[0] == with_times[1] and len(with_times[0]["eval/return"][0]) == 4
    saved = [load_checkpoint(run.checkpoint) for run in (plain, filmed)]
    state = saved[1]["callbacks"].pop("video")
    callback.load_state_dict(state)
    assert state == callback.state_dict() == {"evaluations": 4}
    for one in saved:
        one["callbacks"]["metrics"].pop("metrics_csv")  # a checksum with the times in it
        one["callbacks"].pop("options", None)
    assert equal(saved[0], saved[1])
    expected = ["videos/step_000000000036/goal-1.mp4", "videos/step_000000000048/goal-1.mp4"]
    assert files_in(filmed.folder) == expected, "the third evaluation, and the last"
    events = EventAccumulator(str(tmp_path / "logged"))
    events.Reload()
    images = events.Images("videos/goal-1")
    assert [image.step for image in images] == [36, 48]
    assert images[0].encoded_image_string.startswith(b"GIF89a")


def test_a_video_that_fails_is_one_warning(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise EnvironmentFaultError("the driver broke")

    monkeypatch.setattr(video, "record_videos", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trained(tmp_path, VideoCallback(**SMALL))
    told = [str(warning.message) for warning in caught if "no video" in str(warning.message)]
    assert len(told) == 1
    assert "after 12 env steps (EnvironmentFaultError: the driver broke)" in told[0]
    assert told[0].endswith(
        "). Training continues, and a video is tried at the next evaluation; there is no further"
        " warning"
    )
    assert read_metrics(run.folder)["eval/return"][0] == [12, 24, 36, 48]


def test_a_logger_that_takes_no_video_is_named_and_the_videos_are_there(tmp_path, monkeypatch):
    def fail(logger, files, env_steps):
        raise OSError("the network is down")

    monkeypatch.setattr(video, "_log", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trained(tmp_path, VideoCallback(every=2, tasks=["goal-1"], **SMALL))
    texts = [str(warning.message) for warning in caught if "video" in str(warning.message)]
    assert len(texts) == 1
    expected = "MetricsCSV could not take the videos of 24 env steps (OSError: the network is down)"
    assert texts[0].startswith(expected)
    assert texts[0].endswith(
        f"). They are in {run.folder / 'videos'}. Training continues, and the next ones are given"
        " to it, too; there is no further warning"
    )
    assert len(files_in(run.folder)) == 2


class StopAfter(Callback):
    """End a run early: at an evaluation, as ``EarlyStopping`` does, or between two."""

    def __init__(self, env_steps, at_evaluation):
        self.env_steps = env_steps
        self.at_evaluation = at_evaluation

    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop |= self.at_evaluation and self.is_reached(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.should_stop |= not self.at_evaluation and self.is_reached(pl_module)

    def is_reached(self, algorithm):
        return algorithm.counters.env_steps >= self.env_steps


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True], ids=["after_others", "before_others"])
@pytest.mark.parametrize(("env_steps", "at_evaluation"), [(24, True), (30, False)])
def test_a_run_that_stops_early_has_a_video_of_its_last_evaluation(
    tmp_path, env_steps, at_evaluation, is_first, monkeypatch
):
    if is_first:

        @staticmethod
        def first(callbacks):
            return sorted(callbacks, key=lambda callback: not isinstance(callback, VideoCallback))

        connector = "lightning.pytorch.trainer.connectors.callback_connector._CallbackConnector"
        monkeypatch.setattr(f"{connector}._reorder_callbacks", first)
    stop = StopAfter(env_steps, at_evaluation)
    run = trained(tmp_path, VideoCallback(every=5, tasks=["goal-1"], **SMALL), stop)
    evaluated_at = int(read_metrics(run.folder)["eval/return"][0][-1])
    assert env_steps <= evaluated_at < 48
    assert files_in(run.folder) == [f"videos/step_{evaluated_at:012d}/goal-1.mp4"]


def test_an_interruption_gives_the_recording_up_and_the_run_ends_at_its_own_check(
    tmp_path, monkeypatch
):
    record = video.record_videos

    def interrupted(*args, on_step, **options):
        signal.raise_signal(signal.SIGTERM)
        return record(*args, on_step=on_step, **options)

    monkeypatch.setattr(video, "record_videos", interrupted)
    with pytest.raises(Interrupted):
        trained(tmp_path, VideoCallback(**SMALL))
    folder = tmp_path / "run" / "version_0"
    assert files_in(folder) == []
    assert read_metrics(folder)["eval/return"][0] == [12], "the evaluation is complete"
    monkeypatch.setattr(video, "record_videos", record)
    resumed = trained(tmp_path, VideoCallback(**SMALL), ckpt_path=str(folder))
    assert read_metrics(folder)["eval/return"][0] == [12, 24, 36, 48]
    assert len(files_in(resumed.folder)) == 3 * 3, "three evaluations of two tasks, and both"
