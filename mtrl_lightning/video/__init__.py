"""Videos of a policy: run, render, label and encode test episodes."""

from mtrl_lightning.envs.render.frame_recorder import VideoFormat
from mtrl_lightning.video.encoding import gif
from mtrl_lightning.video.recording import (
    RecordedEpisode,
    Recording,
    check_recording,
    record_videos,
)

__all__ = [
    "RecordedEpisode",
    "Recording",
    "VideoFormat",
    "check_recording",
    "gif",
    "record_videos",
]
