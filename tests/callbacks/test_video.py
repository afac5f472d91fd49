"""Videos in the course of a run, which change nothing of it and end nothing; and images."""

import signal
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image

from mtrl_lightning import SAC
from mtrl_lightning.callbacks import CurvesCallback, ImagesCallback, VideoCallback, video
from mtrl_lightning.errors import EnvironmentFaultError, Interrupted
from tests.helpers.fitting import fit, rows_of

SMALL = {"width": 64, "height": 48, "num_workers": 0, "tasks": ["goal-1"]}


@pytest.fixture
def wandb_run(tmp_path):
    """Return a mock of a W&B run, and its logger."""
    pytest.importorskip("wandb")
    run = MagicMock(id="r1", sweep_id=None, disabled=False)
    return run, WandbLogger(save_dir=tmp_path, experiment=run)


def logged_to(run):
    return {name for call in run.log.call_args_list for name in call.args[0]}


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.mp4"))


@pytest.mark.slow
def test_a_run_with_videos_is_the_run_without_them(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(tmp_path / "plain", total_steps=200)
    folder = tmp_path / "filmed"
    logger = TensorBoardLogger(folder, name="", version="")
    fit(folder, VideoCallback(every=2, **SMALL), logger=logger, total_steps=200)
    assert rows_of(folder) == rows_of(tmp_path / "plain")
    steps = [120, 200]  # the second of four evaluations, and the last
    assert files_in(folder) == [f"videos/step_{step:012d}/goal-1.mp4" for step in steps]
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    images = events.Images("videos/goal-1")
    assert [image.step for image in images] == steps
    assert images[0].encoded_image_string.startswith(b"GIF89a")


def test_run_that_stops_early_records_its_last_evaluation(tmp_path, wandb_run):
    run, logger = wandb_run
    stop = Callback()
    stop.on_validation_end = lambda trainer, _: setattr(trainer, "should_stop", True)
    fit(tmp_path, VideoCallback(every=5, **SMALL), stop, logger=logger)
    assert files_in(tmp_path) == ["videos/step_000000000062/goal-1.mp4"]
    assert "videos/goal-1" in logged_to(run)


def test_a_video_that_fails_is_one_warning(tmp_path, monkeypatch):
    broken = Mock(side_effect=EnvironmentFaultError("the driver broke"))
    monkeypatch.setattr(video, "record_videos", broken)
    with pytest.warns(UserWarning, match="driver") as caught:
        fit(tmp_path, VideoCallback(**SMALL))
    assert len([one for one in caught if "driver" in str(one.message)]) == 1
    assert rows_of(tmp_path)[-1]["env_steps"] == 120


def test_a_signal_gives_the_recording_up(tmp_path, monkeypatch):
    record = video.record_videos

    def interrupted(*args, on_step, **options):
        signal.raise_signal(signal.SIGTERM)
        return record(*args, on_step=on_step, **options)

    monkeypatch.setattr(video, "record_videos", interrupted)
    with pytest.raises(Interrupted):
        fit(tmp_path, VideoCallback(**SMALL))
    assert rows_of(tmp_path)[-1]["env_steps"] == 62 and files_in(tmp_path) == []


def test_each_evaluation_adds_an_image_also_for_loggers(tmp_path, monkeypatch, wandb_run):
    run, wandb_logger = wandb_run

    def images(algorithm):
        return {"reconstruction": np.full((4, 6, 3), algorithm.counters.env_steps, np.uint8)}

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(SAC, "images", images)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit(tmp_path, ImagesCallback(), CurvesCallback(), logger=[logger, wandb_logger])
    assert "reconstruction" in logged_to(run)
    for env_steps in (62, 120):
        file = tmp_path / "pictures" / f"reconstruction_{env_steps:010d}.png"
        assert (np.asarray(Image.open(file)) == env_steps).all()
    assert len(list((tmp_path / "pictures").iterdir())) == 2
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    shown = events.Images("reconstruction")[1]
    assert (shown.step, shown.encoded_image_string) == (120, file.read_bytes())
    assert [event.value for event in events.Scalars("env_steps")][-1] == 120
