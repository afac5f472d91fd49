"""Images in a run's folder."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mtrl_lightning.callbacks import ImagesCallback


def test_each_evaluation_adds_an_image(tmp_path, monkeypatch):
    images = [np.full((4, 6, 3), value, np.uint8) for value in (7, 200)]
    session = SimpleNamespace(
        folder=tmp_path,
        counters=SimpleNamespace(env_steps=0),
        algorithm=SimpleNamespace(images=lambda: {"reconstruction": images[0]}),
        loggers=[],
    )
    callback = ImagesCallback()
    callback.session = session
    callback._write()
    session.counters.env_steps = 1200
    session.algorithm.images = lambda: {"reconstruction": images[1]}
    shown = []
    monkeypatch.setattr(
        "mtrl_lightning.callbacks.images.log_image", lambda *given: shown.append(given)
    )
    logger = object()
    session.loggers = [logger]
    callback._write()
    files = sorted((tmp_path / "pictures").iterdir())
    names = ["reconstruction_0000000000.png", "reconstruction_0000001200.png"]
    assert [file.name for file in files] == names
    for file, image in zip(files, images, strict=True):
        assert np.array_equal(np.asarray(Image.open(file)), image)
    assert shown == [(logger, "reconstruction", files[1], 1200)]
    session.algorithm.images = dict
    callback._write()
    assert len(list((tmp_path / "pictures").iterdir())) == 2


def test_an_image_that_cannot_be_written_does_not_end_a_run(tmp_path):
    def broken():
        raise RuntimeError("no decoder")

    callback = ImagesCallback()
    callback.session = SimpleNamespace(
        folder=tmp_path,
        counters=SimpleNamespace(env_steps=0),
        algorithm=SimpleNamespace(images=broken),
        loggers=[],
    )
    message = (
        r"could not be written \(RuntimeError: no decoder\)\. Training continues, and new ones"
    )
    with pytest.warns(UserWarning, match=message):
        callback._write()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback._write()
