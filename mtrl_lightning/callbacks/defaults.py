"""The callbacks that every run needs."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from mtrl_lightning.callbacks.curves import CurvesCallback
from mtrl_lightning.callbacks.evaluation import EvaluationCallback
from mtrl_lightning.callbacks.images import ImagesCallback
from mtrl_lightning.callbacks.metrics import MetricsCallback
from mtrl_lightning.callbacks.progress import EnvStepProgressBar
from mtrl_lightning.callbacks.rollout import RolloutCallback
from mtrl_lightning.callbacks.signals import SignalCallback, StopCallback

NEEDED: tuple[type[Callback], ...] = (
    RolloutCallback,
    EvaluationCallback,
    MetricsCallback,
    CurvesCallback,
    ImagesCallback,
    SignalCallback,
    StopCallback,
)


def missing_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the required callbacks that the trainer does not have yet.

    ``EnvStepProgressBar`` replaces Lightning's progress bars, which count updates without a total.
    """
    present: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    missing = [kind() for kind in NEEDED if not any(isinstance(one, kind) for one in present)]
    bar = trainer.progress_bar_callback
    if type(bar) in (RichProgressBar, TQDMProgressBar):
        trainer.callbacks = [one for one in present if one is not bar]  # type: ignore[attr-defined]
        missing.append(EnvStepProgressBar())
    return missing
