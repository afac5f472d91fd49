"""An algorithm's images after each evaluation, and images in loggers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from mtrl_lightning.callbacks.common import SessionCallback, WarnOnce
from mtrl_lightning.runs import replacing

RGB = 3
"""Number by which TensorBoard's records name colors; viewers use the image's own."""


def log_image(logger: Logger, name: str, path: Path, env_steps: int) -> None:
    """Give an image to W&B or TensorBoard; another logger is passed over.

    Args:
        logger: of the run.
        name: of the image there.
        path: of the PNG.
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
    """Give TensorBoard an image as it is encoded.

    Args:
        logger: TensorBoard's.
        name: of the image.
        encoded: content of a PNG or GIF.
        env_steps: environment steps of the run, the x-axis.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(encoded_image_string=encoded, colorspace=RGB)
    value = Summary.Value(tag=name, image=image)
    logger.experiment._get_file_writer().add_summary(Summary(value=[value]), env_steps)


FOLDER = "pictures"
"""Folder of the images in a run's folder."""


class ImagesCallback(SessionCallback):
    """Write the algorithm's images to ``pictures/`` in the run's folder after each evaluation.

    Their names end in the environment steps. TensorBoard and W&B show them, too. An algorithm
    without images writes none.
    """

    key = "pictures"

    def __init__(self) -> None:
        self._warn_once = WarnOnce()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session."""
        super().setup(trainer, pl_module, stage)
        self.session.after_evaluation.append(self._write)

    @rank_zero_only
    def _write(self) -> None:
        session = self.session
        env_steps = session.counters.env_steps
        failure = "the algorithm's images could not be written"
        with self._warn_once(failure, continuation="new ones are tried at the next evaluation"):
            for name, image in session.algorithm.images().items():
                path = session.folder / FOLDER / f"{name}_{env_steps:010d}.png"
                write_image(path, image)
                for logger in session.loggers:
                    log_image(logger, name, path, env_steps)


def write_image(path: Path, image: npt.NDArray[np.uint8]) -> None:
    """Write an image ``[H, W, 3]`` as a PNG file; its folder is made if it is missing."""
    # imported here because only some runs need it
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    with replacing(path) as unfinished:
        Image.fromarray(image).save(unfinished, format="png")
