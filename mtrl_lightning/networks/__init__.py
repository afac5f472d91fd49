"""Neural networks, one architecture per file. Nothing here imports Lightning."""

from mtrl_lightning.networks.conditioning import (
    Embedding,
    NoConditioning,
    OneHot,
    TaskConditioning,
    TaskEncoder,
)
from mtrl_lightning.networks.distributions import (
    ActionDistribution,
    ClippedGaussian,
    OneHotCategorical,
    SquashedGaussian,
    zero_padding,
)
from mtrl_lightning.networks.encoder import AppendTask, Encoder, Identity
from mtrl_lightning.networks.experts import Experts
from mtrl_lightning.networks.exploration import PolicyStd, StateDependentStd, StateIndependentStd
from mtrl_lightning.networks.film import FiLM
from mtrl_lightning.networks.language import Language
from mtrl_lightning.networks.mixture import (
    CARE,
    Assignment,
    Attention,
    Clusters,
    MixtureOfEncoders,
    OneHotGate,
    TopKGate,
    UniformGate,
)
from mtrl_lightning.networks.mlp import MLP, Ensemble
from mtrl_lightning.networks.mlp_encoder import MLPEncoder
from mtrl_lightning.networks.moore import MOORE
from mtrl_lightning.networks.multi_head import MultiHead
from mtrl_lightning.networks.multi_input import MultiInput
from mtrl_lightning.networks.network import HasTaskAxes, Network, TaskAxis, TaskModule
from mtrl_lightning.networks.one_per_task import OneForAll, OnePerTask
from mtrl_lightning.networks.paco import PaCo
from mtrl_lightning.networks.pixel_encoder import PixelEncoder, is_image
from mtrl_lightning.networks.projection import (
    ProjectedEncoder,
    ProjectedNetwork,
    Projection,
)
from mtrl_lightning.networks.separate import Separate
from mtrl_lightning.networks.soft_modularization import SoftModularization
from mtrl_lightning.networks.standardize import Standardize

__all__ = [
    "CARE",
    "MLP",
    "MOORE",
    "ActionDistribution",
    "AppendTask",
    "Assignment",
    "Attention",
    "ClippedGaussian",
    "Clusters",
    "Embedding",
    "Encoder",
    "Ensemble",
    "Experts",
    "FiLM",
    "HasTaskAxes",
    "Identity",
    "Language",
    "MLPEncoder",
    "MixtureOfEncoders",
    "MultiHead",
    "MultiInput",
    "Network",
    "NoConditioning",
    "OneForAll",
    "OneHot",
    "OneHotCategorical",
    "OneHotGate",
    "OnePerTask",
    "PaCo",
    "PixelEncoder",
    "PolicyStd",
    "ProjectedEncoder",
    "ProjectedNetwork",
    "Projection",
    "Separate",
    "SoftModularization",
    "SquashedGaussian",
    "Standardize",
    "StateDependentStd",
    "StateIndependentStd",
    "TaskAxis",
    "TaskConditioning",
    "TaskEncoder",
    "TaskModule",
    "TopKGate",
    "UniformGate",
    "is_image",
    "zero_padding",
]
