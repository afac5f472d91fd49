"""PPO with every operation of networks and a gradient method each, on steps of toy tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import PPO
from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.replay import RolloutBuffer
from mtrl_lightning.rollout import Collector
from tests.helpers.command_line import config_args
from tests.helpers.matrix import (
    BENCHMARKS,
    NETWORKS,
    PAIRS,
    build,
    parameters_of,
)

pytestmark = pytest.mark.slow

SIZES = ["num_steps=8", "num_epochs=1", "num_minibatches=2"]


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


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_it_learns_from_an_iteration(command_line, monkeypatch, network, gradient):
    options = [f"--model.init_args.{size}" for size in SIZES]
    on_policy = [option for option in NETWORKS[network] if "task_weighting" not in option]
    monkeypatch.setitem(NETWORKS, network, on_policy)
    more = config_args(f"gradient/{gradient}")
    built = build(command_line, monkeypatch, "toy", network, *more, *options, algorithm="mtppo")
    check(built.model)
