"""Video files: MP4 and GIF by imageio, with the ffmpeg of ``imageio-ffmpeg``, and Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mtrl_lightning.errors import import_optional
from mtrl_lightning.runs import replacing

QUALITY = 7
"""Of imageio-ffmpeg's 0 to 10: labels stay sharp; a second of 480 x 360 takes some 40 kB."""
GIF_WIDTH = 320
"""Pixels of the longer side that a GIF is scaled down to, since its files are large."""
GIF_FPS = 10
"""Frames per second of a GIF."""


def import_encoder() -> Any:
    """Return the module ``imageio.v2``, which encodes by ``imageio_ffmpeg``."""
    import_optional("imageio_ffmpeg", '"mtrl_lightning[video]"')
    return import_optional("imageio.v2", '"mtrl_lightning[video]"')


def write_mp4(path: Path, images: Iterable[Image.Image], fps: int) -> None:
    """Write a video in H.264, which every browser plays.

    Args:
        path: of the file, which has this name only when it is complete.
        images: images of the same size, whose width and height are even; at least one.
        fps: frames per second.
    """
    with (
        replacing(path) as unfinished,
        import_encoder().get_writer(
            unfinished,
            fps=fps,
            quality=QUALITY,
            codec="libx264",
            macro_block_size=2,
            output_params=["-movflags", "+faststart"],  # players start before the end of the file
        ) as writer,
    ):
        for image in images:
            writer.append_data(np.asarray(image))


def gif(mp4: Path) -> bytes:
    """Return a video as a GIF, smaller and with fewer frames, as TensorBoard shows it."""
    with import_encoder().get_reader(mp4, output_params=["-vf", f"fps={GIF_FPS}"]) as reader:
        images = [Image.fromarray(frame) for frame in reader]
    for image in images:
        image.thumbnail((GIF_WIDTH, GIF_WIDTH))
    content = io.BytesIO()
    first, *others = images
    first.save(
        content, "GIF", save_all=True, append_images=others, duration=1000 // GIF_FPS, loop=0
    )
    return content.getvalue()
