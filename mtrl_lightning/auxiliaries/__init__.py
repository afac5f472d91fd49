"""Auxiliary losses for representation learning."""

from mtrl_lightning.auxiliaries.auxiliary import Auxiliary, LossInputs
from mtrl_lightning.auxiliaries.hip_bmdp import HiPBMDP
from mtrl_lightning.auxiliaries.latent_dynamics import LatentDynamics
from mtrl_lightning.auxiliaries.reconstruction import Reconstruction
from mtrl_lightning.auxiliaries.transitions import (
    Deterministic,
    Gaussians,
    Probabilistic,
    TransitionEnsemble,
    TransitionModel,
)

__all__ = [
    "Auxiliary",
    "Deterministic",
    "Gaussians",
    "HiPBMDP",
    "LatentDynamics",
    "LossInputs",
    "Probabilistic",
    "Reconstruction",
    "TransitionEnsemble",
    "TransitionModel",
]
