"""Lightning callbacks: rollouts, evaluation, logging, checkpoints, resets, videos."""

from mtrl_lightning.callbacks.checkpoint import BestCheckpoint, EnvStepCheckpoint
from mtrl_lightning.callbacks.curves import CurvesCallback
from mtrl_lightning.callbacks.defaults import missing_callbacks
from mtrl_lightning.callbacks.evaluation import EvaluationCallback
from mtrl_lightning.callbacks.images import ImagesCallback
from mtrl_lightning.callbacks.metrics import MetricsCallback
from mtrl_lightning.callbacks.metrics_file import MetricsFile, log_row
from mtrl_lightning.callbacks.progress import EnvStepProgressBar
from mtrl_lightning.callbacks.resets import ResetCallback
from mtrl_lightning.callbacks.rollout import RolloutCallback
from mtrl_lightning.callbacks.signals import SignalCallback
from mtrl_lightning.callbacks.video import VideoCallback
from mtrl_lightning.compare.charts import plot_curves
from mtrl_lightning.compare.record import read_metrics

__all__ = [
    "BestCheckpoint",
    "CurvesCallback",
    "EnvStepCheckpoint",
    "EnvStepProgressBar",
    "EvaluationCallback",
    "ImagesCallback",
    "MetricsCallback",
    "MetricsFile",
    "ResetCallback",
    "RolloutCallback",
    "SignalCallback",
    "VideoCallback",
    "log_row",
    "missing_callbacks",
    "plot_curves",
    "read_metrics",
]
