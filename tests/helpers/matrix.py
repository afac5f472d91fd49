"""SAC of every network on tasks that conflict, and batches of real steps."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from mtrl_lightning.algorithms import SAC, Categorical, TemperatureWeights
from mtrl_lightning.demonstrations import UniformPolicy
from mtrl_lightning.envs import ToyConflict, VectorEnv
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.rollout import Collector
from mtrl_lightning.transitions import TransitionBatch, Transitions
from tests.helpers.algorithms import NAMES, STACKS
from tests.helpers.gradients import METHODS

BENCHMARK = ToyConflict(num_tasks=3, horizon=5)
SPEC = BENCHMARK.spec._replace(task_names=NAMES)
NETWORKS: dict[str, dict[str, Any]] = {
    **STACKS,
    "soft modularization": {
        **STACKS["soft modularization"],
        "task_weighting": TemperatureWeights,
    },
    "categorical": {**STACKS["mlp, residual"], "value": partial(Categorical, num_bins=11)},
}


def make(network: str, gradient: str = "mean") -> SAC:
    """Return SAC with this network, and the gradient method for actor and critics."""
    method = METHODS[gradient]
    return SAC(SPEC, **NETWORKS[network], actor_gradient=method, critic_gradient=method)


@cache
def batches() -> tuple[list[TransitionBatch], list[Transitions]]:
    """Return two batches of real transitions, and the vector steps that they are from."""
    envs = VectorEnv(BENCHMARK, list(range(3)), num_workers=0)
    collector = Collector(envs, UniformPolicy(BENCHMARK.spec))
    buffer = ReplayBuffer(BENCHMARK.spec, 120)
    steps = []
    for _ in range(12):
        transitions, _ = collector.step("random")
        buffer.add(transitions)
        steps.append(transitions)
    envs.close()
    return [buffer.sample(24) for _ in range(2)], steps
