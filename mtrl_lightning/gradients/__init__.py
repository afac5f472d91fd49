"""Gradient methods, one per file: combine the tasks' losses into one gradient."""

from mtrl_lightning.gradients.aligned_mtl import AlignedMTL
from mtrl_lightning.gradients.cagrad import CAGrad
from mtrl_lightning.gradients.fairgrad import FairGrad
from mtrl_lightning.gradients.famo import FAMO
from mtrl_lightning.gradients.gradnorm import GradNorm
from mtrl_lightning.gradients.method import (
    GradientMethod,
    Mean,
    TaskParameters,
    per_task_forward,
)
from mtrl_lightning.gradients.nash_mtl import NashMTL
from mtrl_lightning.gradients.pcgrad import PCGrad

__all__ = [
    "FAMO",
    "AlignedMTL",
    "CAGrad",
    "FairGrad",
    "GradNorm",
    "GradientMethod",
    "Mean",
    "NashMTL",
    "PCGrad",
    "TaskParameters",
    "per_task_forward",
]
