"""Read the frames of a video file."""

import imageio_ffmpeg
import numpy as np


def frames_of(path):
    """Return the frames of a video, ``[N, height, width, 3]``."""
    frames = imageio_ffmpeg.read_frames(str(path))
    meta = next(frames)
    width, height = meta["size"]
    return np.stack([np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in frames]), meta
