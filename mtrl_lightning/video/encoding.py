"""Video files: MP4 with imageio and the ffmpeg of ``imageio-ffmpeg``, GIF with Pillow."""

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
"""Quality from 0 to 10 (imageio-ffmpeg): labels stay sharp; 1 s of 480 x 360 takes about 40 kB."""
GIF_WIDTH = 320
"""Longer side in pixels to which GIFs are scaled down, because their files are large."""
GIF_FPS = 10
"""Frames per second of a GIF."""


def import_encoder() -> Any:
    """Import ``imageio.v2``, which encodes with ``imageio_ffmpeg``."""
    import_optional("imageio_ffmpeg", "video")
    return import_optional("imageio.v2", "video")


def write_mp4(path: Path, images: Iterable[Image.Image], fps: int) -> None:
    """Write a video in H.264, which all browsers support.

    Args:
        path: path of the file, which only appears when it is complete.
        images: images of the same size, with even width and height; at least one.
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
            output_params=["-movflags", "+faststart"],  # playback can start before the full load
        ) as writer,
    ):
        for image in images:
            writer.append_data(np.asarray(image))


def gif(mp4: Path) -> bytes:
    """Convert a video to a GIF, scaled down and with fewer frames, for TensorBoard."""
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
