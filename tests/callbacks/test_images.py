"""Images in a run's folder and in loggers."""

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from mtrl_lightning import SAC
from mtrl_lightning.callbacks import CurvesCallback, ImagesCallback
from tests.helpers.fitting import fit


def test_each_evaluation_adds_an_image_also_to_tensorboard(tmp_path, monkeypatch):
    def images(algorithm):
        return {"reconstruction": np.full((4, 6, 3), algorithm.counters.env_steps, np.uint8)}

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(SAC, "images", images)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit(tmp_path, ImagesCallback(), CurvesCallback(), logger=logger)
    for env_steps in (62, 120):
        file = tmp_path / "pictures" / f"reconstruction_{env_steps:010d}.png"
        assert (np.asarray(Image.open(file)) == env_steps).all()
    assert len(list((tmp_path / "pictures").iterdir())) == 2
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    shown = events.Images("reconstruction")
    assert [image.step for image in shown] == [62, 120]
    assert shown[1].encoded_image_string == file.read_bytes()
    assert [event.value for event in events.Scalars("env_steps")][-1] == 120
