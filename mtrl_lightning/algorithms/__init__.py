"""LightningModules that learn from a ``TransitionBatch``; they import no environments."""

from mtrl_lightning.algorithms.actor_critic import ActorCritic
from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.bc import BehaviourCloning
from mtrl_lightning.algorithms.distral import Distral
from mtrl_lightning.algorithms.losses import Categorical, Scalar, Value
from mtrl_lightning.algorithms.on_policy import OnPolicyAlgorithm
from mtrl_lightning.algorithms.ppo import PPO
from mtrl_lightning.algorithms.sac import SAC
from mtrl_lightning.algorithms.td3 import TD3
from mtrl_lightning.updates.augmentation import RandomShift
from mtrl_lightning.updates.learning_rate import LearningRate, LinearRate
from mtrl_lightning.updates.popart import PopArt, ReturnScale
from mtrl_lightning.updates.reward_scale import MeanReward, NormalizeReward, ReturnRange
from mtrl_lightning.updates.transforms import RewardScale, Transform
from mtrl_lightning.updates.update import Update
from mtrl_lightning.updates.weighting import (
    EqualWeights,
    FixedTemperature,
    ManualWeights,
    TaskWeighting,
    Temperature,
    TemperatureWeights,
)

__all__ = [
    "PPO",
    "SAC",
    "TD3",
    "ActorCritic",
    "Algorithm",
    "BehaviourCloning",
    "Categorical",
    "Distral",
    "EqualWeights",
    "FixedTemperature",
    "LearningRate",
    "LinearRate",
    "ManualWeights",
    "MeanReward",
    "NormalizeReward",
    "OnPolicyAlgorithm",
    "PopArt",
    "RandomShift",
    "ReturnRange",
    "ReturnScale",
    "RewardScale",
    "Scalar",
    "TaskWeighting",
    "Temperature",
    "TemperatureWeights",
    "Transform",
    "Update",
    "Value",
]
