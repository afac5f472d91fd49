"""Pictures in the loggers that show some."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

RGB = 3
"""Number by which TensorBoard's records name colors; viewers use the picture's own."""


def log_picture(logger: Logger, name: str, path: Path, env_steps: int) -> None:
    """Give a picture to W&B or TensorBoard; another logger is passed over.

    Args:
        logger: of the run.
        name: of the picture there.
        path: of the PNG.
        env_steps: environment steps of the run, the x-axis.
    """
    if isinstance(logger, WandbLogger):
        import wandb

        row = {"env_steps": env_steps, name: wandb.Image(str(path))}
        logger.log_metrics(row, step=env_steps)  # type: ignore[arg-type]  # W&B takes pictures
    elif isinstance(logger, TensorBoardLogger):
        log_tensorboard_image(logger, name, path.read_bytes(), env_steps)


def log_tensorboard_image(
    logger: TensorBoardLogger, name: str, encoded: bytes, env_steps: int
) -> None:
    """Give TensorBoard a picture as it is encoded.

    Args:
        logger: TensorBoard's.
        name: of the picture.
        encoded: content of a PNG or GIF.
        env_steps: environment steps of the run, the x-axis.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(encoded_image_string=encoded, colorspace=RGB)
    value = Summary.Value(tag=name, image=image)
    logger.experiment._get_file_writer().add_summary(Summary(value=[value]), env_steps)
