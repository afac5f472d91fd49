"""When things happen: rollout, evaluation, logging, checkpoints."""

from mtrl_lightning.callbacks.checkpoint import CheckpointCallback
from mtrl_lightning.callbacks.curves import CurvesCallback
from mtrl_lightning.callbacks.evaluation import EvaluationCallback
from mtrl_lightning.callbacks.images import ImagesCallback
from mtrl_lightning.callbacks.loggers.csv_logger import MetricsCSV
from mtrl_lightning.callbacks.loggers.wandb_logger import EnvStepWandbLogger
from mtrl_lightning.callbacks.metrics import MetricsCallback
from mtrl_lightning.callbacks.options import OptionsCallback
from mtrl_lightning.callbacks.progress import EnvStepProgressBar
from mtrl_lightning.callbacks.replay import ReplayCallback
from mtrl_lightning.callbacks.resets import ResetCallback
from mtrl_lightning.callbacks.rollout import RolloutCallback
from mtrl_lightning.callbacks.signals import InterruptionCallback
from mtrl_lightning.callbacks.video import VideoCallback
from mtrl_lightning.reports.curves import plot_curves
from mtrl_lightning.reports.metrics_file import read_metrics

__all__ = [
    "CheckpointCallback",
    "CurvesCallback",
    "EnvStepProgressBar",
    "EnvStepWandbLogger",
    "EvaluationCallback",
    "ImagesCallback",
    "InterruptionCallback",
    "MetricsCSV",
    "MetricsCallback",
    "OptionsCallback",
    "ReplayCallback",
    "ResetCallback",
    "RolloutCallback",
    "VideoCallback",
    "plot_curves",
    "read_metrics",
]
