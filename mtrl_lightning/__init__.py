"""Multi-task reinforcement learning on PyTorch Lightning.

Public names, as in ``from mtrl_lightning import SAC, MetaWorld, train``, are imported lazily on
first access, so that environment workers start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtrl_lightning.algorithms import (
        PPO,
        SAC,
        TD3,
        Algorithm,
        BehaviourCloning,
        Distral,
        Temperature,
    )
    from mtrl_lightning.callbacks import plot_curves, read_metrics
    from mtrl_lightning.data import DemonstrationData, ReplayData, RolloutData
    from mtrl_lightning.envs import (
        Benchmark,
        DMControl,
        GymnasiumTasks,
        MetaWorld,
        ToyConflict,
        ToyReach,
        VectorEnv,
    )
    from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
    from mtrl_lightning.policy import LoadedPolicy, load_policy
    from mtrl_lightning.rollout import Collector, EpisodeListener, Evaluator
    from mtrl_lightning.spec import EnvSpec
    from mtrl_lightning.training import Run, evaluate, train
    from mtrl_lightning.video import record_videos

__version__ = "0.1.0.dev0"

_NAMES = {
    "algorithms": "Algorithm BehaviourCloning Distral PPO SAC TD3 Temperature",
    "callbacks": "plot_curves read_metrics",
    "data": "DemonstrationData ReplayData RolloutData",
    "envs": "Benchmark DMControl GymnasiumTasks MetaWorld ToyConflict ToyReach VectorEnv",
    "errors": "ConfigurationError EnvironmentFaultError",
    "policy": "LoadedPolicy load_policy",
    "rollout": "Collector EpisodeListener Evaluator",
    "spec": "EnvSpec",
    "training": "Run evaluate train",
    "video": "record_videos",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module of the package that defines each public name."""

__all__ = [
    "PPO",
    "SAC",
    "TD3",
    "Algorithm",
    "BehaviourCloning",
    "Benchmark",
    "Collector",
    "ConfigurationError",
    "DMControl",
    "DemonstrationData",
    "Distral",
    "EnvSpec",
    "EnvironmentFaultError",
    "EpisodeListener",
    "Evaluator",
    "GymnasiumTasks",
    "LoadedPolicy",
    "MetaWorld",
    "ReplayData",
    "RolloutData",
    "Run",
    "Temperature",
    "ToyConflict",
    "ToyReach",
    "VectorEnv",
    "evaluate",
    "load_policy",
    "plot_curves",
    "read_metrics",
    "record_videos",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first access."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mtrl_lightning' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mtrl_lightning.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted({*globals(), *__all__})
