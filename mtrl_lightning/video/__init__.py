"""Videos of a policy: test episodes are run, rendered, labelled and encoded."""

from mtrl_lightning.envs.render.frame_recorder import VideoFormat
from mtrl_lightning.video.encoding import check_encoder, gif
from mtrl_lightning.video.recording import (
    RecordedEpisode,
    Recording,
    check_drawing,
    chosen_split,
    chosen_tasks,
    record_videos,
)

__all__ = [
    "RecordedEpisode",
    "Recording",
    "VideoFormat",
    "check_drawing",
    "check_encoder",
    "chosen_split",
    "chosen_tasks",
    "gif",
    "record_videos",
]
