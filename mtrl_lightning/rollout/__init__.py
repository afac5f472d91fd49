"""Rollouts: collect transitions and episodes with a policy, independent of any learner."""

from mtrl_lightning.rollout.action_transforms import (
    ActionNoise,
    ActionTransform,
    TransformedPolicy,
)
from mtrl_lightning.rollout.collector import Collector
from mtrl_lightning.rollout.episodes import EpisodeWindows, RunningEpisodes
from mtrl_lightning.rollout.evaluator import Evaluation, Evaluator
from mtrl_lightning.rollout.exploration import CorrelatedNoise
from mtrl_lightning.rollout.extras import EndAfterSuccess, Extra, StartMidway
from mtrl_lightning.rollout.listeners import EpisodeListener
from mtrl_lightning.rollout.pausing import PauseSolved
from mtrl_lightning.rollout.reuse import PolicyReuse
from mtrl_lightning.rollout.sample import Sample

__all__ = [
    "ActionNoise",
    "ActionTransform",
    "Collector",
    "CorrelatedNoise",
    "EndAfterSuccess",
    "EpisodeListener",
    "EpisodeWindows",
    "Evaluation",
    "Evaluator",
    "Extra",
    "PauseSolved",
    "PolicyReuse",
    "RunningEpisodes",
    "Sample",
    "StartMidway",
    "TransformedPolicy",
]
