"""Neural networks: one architecture a file. Nothing here imports Lightning."""

from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.encoder import Encoder, Identity, Standardize
from mtrl_lightning.networks.ensemble import Ensemble
from mtrl_lightning.networks.gaussian import SquashedGaussian
from mtrl_lightning.networks.mlp import MLP
from mtrl_lightning.networks.multi_head import MultiHead
from mtrl_lightning.networks.network import Network

__all__ = [
    "MLP",
    "Encoder",
    "Ensemble",
    "Identity",
    "MultiHead",
    "Network",
    "OneHot",
    "SquashedGaussian",
    "Standardize",
    "TaskConditioning",
]
