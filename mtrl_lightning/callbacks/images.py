"""An algorithm's images after each evaluation, and image logging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.callbacks.rollout import data_of, is_fitting
from mtrl_lightning.runs import replacing

FOLDER = "pictures"
"""Folder of the images in a run folder."""
RGB = 3
"""TensorBoard's code of a color space; viewers use that of the image itself."""


class ImagesCallback(Callback):
    """Write the algorithm's images to ``pictures/`` in the run folder after each evaluation.

    Their names end in the environment steps. They are also logged to W&B and TensorBoard.
    """

    order: ClassVar[int] = 4

    def __init__(self) -> None:
        self._warn_once = WarnOnce()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the images."""
        if not is_evaluation_of_run(trainer) or not trainer.is_global_zero:
            return
        data = data_of(trainer)
        env_steps = data.counters.env_steps
        failure = "the algorithm's images could not be written"
        with self._warn_once(failure, "they are written again at the next evaluation"):
            for name, image in data.algorithm.images().items():
                path = data.folder / FOLDER / f"{name}_{env_steps:010d}.png"
                write_image(path, image)
                for logger in trainer.loggers:
                    log_image(logger, name, path, env_steps)


def is_evaluation_of_run(trainer: Trainer) -> bool:
    """Return whether a validation belongs to a training run that writes files."""
    return is_fitting(trainer) and not trainer.fast_dev_run  # type: ignore[attr-defined]


class WarnOnce:
    """Continue training after errors in code that only visualizes results.

    The first error of each kind is a warning; later ones are ignored.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, failure: str, continuation: str, kind: str = "") -> Iterator[None]:
        """Return a context manager that turns an error into a warning.

        Args:
            failure: beginning of the warning.
            continuation: a clause about the next attempt, after "Training continues, and".
            kind: kind of the errors.
        """
        try:
            yield
        except Exception as error:
            if kind not in self._warned:
                rank_zero_warn(
                    f"{failure} ({type(error).__name__}: {error}). Training continues, and"
                    f" {continuation}; further failures are not reported"
                )
            self._warned.add(kind)


def log_image(logger: Logger, name: str, path: Path, env_steps: int) -> None:
    """Log an image to W&B or TensorBoard; other loggers are ignored.

    Args:
        logger: one of the trainer's loggers.
        name: name of the logged image.
        path: path of the PNG file.
        env_steps: environment steps of the run, the x-axis.
    """
    if isinstance(logger, WandbLogger):
        import wandb

        row = {"env_steps": env_steps, name: wandb.Image(str(path))}
        logger.log_metrics(row, step=env_steps)  # type: ignore[arg-type]  # W&B takes images
    elif isinstance(logger, TensorBoardLogger):
        log_tensorboard_image(logger, name, path.read_bytes(), env_steps)


def log_tensorboard_image(
    logger: TensorBoardLogger, name: str, encoded: bytes, env_steps: int
) -> None:
    """Log an encoded image to TensorBoard.

    Args:
        logger: the TensorBoard logger.
        name: name of the image.
        encoded: content of a PNG or GIF.
        env_steps: environment steps of the run, the x-axis.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(encoded_image_string=encoded, colorspace=RGB)
    value = Summary.Value(tag=name, image=image)
    logger.experiment._get_file_writer().add_summary(Summary(value=[value]), env_steps)


def write_image(path: Path, image: npt.NDArray[np.uint8]) -> None:
    """Write an image ``[H, W, 3]`` as a PNG file, creating its folder if necessary."""
    # imported lazily because only some runs need it
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    with replacing(path) as unfinished:
        Image.fromarray(image).save(unfinished, format="png")
