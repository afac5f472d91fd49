"""Video files: MP4 by the ffmpeg that ``imageio-ffmpeg`` brings, GIF by Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mtrl_lightning.errors import import_optional

QUALITY = 7
"""Of imageio-ffmpeg's 0 to 10: labels stay sharp; a second of 480 x 360 takes some 40 kB."""
GIF_WIDTH = 320
"""Pixels of the longer side that a GIF is scaled down to, since its files are large."""
GIF_FPS = 10
"""Frames per second of a GIF."""


def check_encoder() -> Any:
    """Return the module of the encoder.

    Raises:
        ConfigurationError: if it is not installed.
    """
    return import_optional("imageio_ffmpeg", '"mtrl_lightning[video]"')


def write_mp4(path: Path, images: Iterable[Image.Image], fps: int) -> None:
    """Write a video, H.264 as every browser plays it.

    Args:
        path: of the file, which has this name only when it is complete.
        images: images of the same size, whose width and height are even; at least one.
        fps: frames per second.

    Raises:
        ConfigurationError: if the encoder is not installed.
        OSError: if it cannot write the file.
    """
    encoder = check_encoder()
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    try:
        num_frames = _encode(encoder, unfinished, images, fps)
        if _num_frames(encoder, unfinished) != num_frames:  # ffmpeg's own errors do not arrive
            raise OSError(f"the video {path} was not written completely: is the disk full?")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _encode(encoder: Any, path: Path, images: Iterable[Image.Image], fps: int) -> int:
    """Write images to a file, and return how many they were."""
    writer: Any = None
    num_frames = 0
    try:
        for image in images:
            if writer is None:
                writer = encoder.write_frames(
                    str(path),
                    image.size,
                    fps=fps,
                    quality=QUALITY,
                    codec="libx264",
                    macro_block_size=2,
                    # players begin before the whole file is there
                    output_params=["-movflags", "+faststart"],
                )
                writer.send(None)
            writer.send(np.ascontiguousarray(image))
            num_frames += 1
    finally:
        if writer is not None:
            writer.close()
    return num_frames


def _num_frames(encoder: Any, path: Path) -> int:
    try:
        return encoder.count_frames_and_secs(str(path))[0]
    except RuntimeError:
        return 0


def gif(mp4: Path) -> bytes:
    """Return a video as a GIF, smaller and with fewer frames, as TensorBoard shows it."""
    frames = check_encoder().read_frames(str(mp4), output_params=["-vf", f"fps={GIF_FPS}"])
    size = next(frames)["size"]
    images = [Image.frombytes("RGB", size, frame) for frame in frames]
    for image in images:
        image.thumbnail((GIF_WIDTH, GIF_WIDTH))
    content = io.BytesIO()
    first, *others = images
    first.save(
        content, "GIF", save_all=True, append_images=others, duration=1000 // GIF_FPS, loop=0
    )
    return content.getvalue()
