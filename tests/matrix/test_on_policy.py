"""PPO with every network and every gradient method, on steps of toy tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import PPO
from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import RolloutBuffer
from mtrl_lightning.rollout import Collector
from tests.helpers.matrix import (
    BENCHMARKS,
    CROSSED,
    GRADIENTS,
    NEEDS_SHARED,
    NETWORKS,
    build,
    parameters_of,
    with_gradient,
)

pytestmark = pytest.mark.slow

SIZES = ["num_steps=8", "num_epochs=1", "num_minibatches=2"]
OF_SAC = ("brc",)
"""A stack that is an experiment with SAC."""


def iteration(model: PPO) -> dict[str, float]:
    """Collect an iteration and learn from it, as a run does; return the metrics."""
    envs = VectorEnv(BENCHMARKS["toy"], list(range(4)), num_workers=0)
    collector = Collector(envs, model)
    buffer = RolloutBuffer(model.spec, list(range(4)), model.collection, model.policy_fields)
    while not buffer.is_full:
        transitions, _ = collector.step("explore")
        buffer.add(transitions)
    envs.close()
    optimizers = model.configure_optimizers()
    model.optimizers = lambda use_pl_optimizer=True: optimizers
    buffer.begin(model.begin_iteration(buffer.collected(), 0.0))
    batch_idx = 0
    while not buffer.is_used_up:
        model.training_step(buffer.next_minibatch(), batch_idx)
        batch_idx += 1
    model.end_iteration(buffer.collected())
    return model.drain_metrics()


def check(model: Any) -> None:
    before = parameters_of(model)
    metrics = iteration(model)
    after = parameters_of(model)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert all(torch.isfinite(value).all() for value in after.values())
    for part in ("actor.", "critic.", "noise."):
        assert any(not torch.equal(before[n], after[n]) for n in before if n.startswith(part))


@pytest.mark.parametrize("network", [name for name in CROSSED if name not in OF_SAC])
def test_it_learns_from_an_iteration(command_line, monkeypatch, network):
    options = [f"--model.init_args.{size}" for size in SIZES]
    of_sac = [option for option in NETWORKS[network] if "task_weighting" in option]
    monkeypatch.setitem(
        NETWORKS, network, [option for option in NETWORKS[network] if option not in of_sac]
    )
    gradient = "-c", "configs/gradient/mean.yaml"
    built = build(command_line, monkeypatch, "toy", network, *gradient, *options, algorithm="mtppo")
    for name in GRADIENTS:
        if network == "separate" and name in NEEDS_SHARED:
            with pytest.raises((ConfigurationError, ValueError), match=r"shares? no"):
                with_gradient(built, name)
        else:
            check(with_gradient(built, name).model)
