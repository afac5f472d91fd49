"""Operations of networks with a gradient method, for each algorithm besides SAC."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.replay import RolloutBuffer
from mtrl_lightning.rollout import Collector
from mtrl_lightning.updates.update import without_gradients
from tests.helpers.command_line import config_args
from tests.helpers.matrix import (
    BENCHMARKS,
    NETWORKS,
    PRECISIONS,
    batches,
    build,
    check_learns,
    check_precisions,
    check_update,
    in_precision,
    parameters_with_gradient,
    trained,
    update,
)

pytestmark = pytest.mark.slow

PAIRS = {
    # with statistics or hooks of their own, or without shared parameters
    "all": [("paco", "gradnorm"), ("separate", "famo"), ("standardize", "cagrad")],
    "bc": [("care", "nash_mtl"), ("mixture_clusters", "pcgrad"), ("moore", "mean")],
    "mttd3": [("film", "fairgrad"), ("mixture_top_k", "aligned_mtl"), ("mlp_residual", "pcgrad")],
    "mtppo": [
        ("language", "cagrad_fast"),
        ("multi_head_mtrl", "pcgrad"),
        ("soft_modularization", "nash_mtl"),
    ],
}
EQUAL = "--model.init_args.task_weighting=mtrl_lightning.algorithms.EqualWeights"
SIZES = ["num_steps=8", "num_epochs=1", "num_minibatches=2"]


def each_pair(algorithm):
    return pytest.mark.parametrize(("network", "gradient"), PAIRS["all"] + PAIRS[algorithm])


@pytest.fixture
def build_toy(command_line, monkeypatch):
    """Build an algorithm without the options that it does not have."""

    def built(algorithm, network, gradient, *options, unknown=()):
        own = [option for option in NETWORKS[network] if not any(u in option for u in unknown)]
        monkeypatch.setitem(NETWORKS, network, own)
        more = [*config_args(f"gradient/{gradient}"), *options]
        return build(command_line, monkeypatch, "toy", network, *more, algorithm=algorithm)

    return built


@each_pair("bc")
def test_behaviour_cloning_learns(build_toy, network, gradient):
    unknown = (".critic.", ".task_weighting=")
    built = build_toy("bc", network, gradient, "--data.demonstrations=unused", unknown=unknown)
    check_learns(built.model, ("actor.",), partial(update, built, "toy"))


@each_pair("mttd3")
def test_each_loss_of_td3_trains_its_own_networks(build_toy, network, gradient):
    built = build_toy("mttd3", network, gradient, EQUAL)
    model = built.model
    _, (batch, _), _ = batches("toy")
    target = model.critic_target(batch, torch.randn_like(batch.action_RnA))
    model.critic_loss(batch, target)[0].sum().backward()
    own = trained(model.critic, "critic.") | trained(model.encoder, "encoder.")
    assert parameters_with_gradient(model) <= own
    model.zero_grad()
    with without_gradients(model.actor_update._frozen):
        model.actor_loss(batch)[0].sum().backward()
    assert set() < parameters_with_gradient(model) <= trained(model.actor, "actor.")
    model.zero_grad()
    check_update(built, "toy", gradient)


def iteration(model):
    """Collect an iteration and learn from it, as a run does; return the metrics."""
    envs = VectorEnv(BENCHMARKS["toy"], list(range(4)), num_workers=0)
    collector = Collector(envs, model)
    buffer = RolloutBuffer(model.spec, list(range(4)), model.collection, model.policy_fields)
    while not buffer.is_full:
        buffer.add(collector.step("explore")[0])
    envs.close()
    optimizers = model.configure_optimizers()
    model.optimizers = lambda use_pl_optimizer=True: optimizers
    buffer.begin(model.begin_iteration(buffer.collected(), 0.0))
    while not buffer.is_used_up:
        model.training_step(buffer.next_minibatch(), 0)
    model.end_iteration(buffer.collected())
    return model.drain_metrics()


@each_pair("mtppo")
def test_ppo_learns_from_an_iteration(build_toy, network, gradient):
    options = [f"--model.init_args.{size}" for size in SIZES]
    model = build_toy("mtppo", network, gradient, *options, unknown=("task_weighting",)).model
    check_learns(model, ("actor.", "critic.", "noise."), partial(iteration, model))


def test_distral_learns_in_both_precisions(command_line, monkeypatch):
    more = config_args("gradient/pcgrad")
    built = build(command_line, monkeypatch, "metaworld", "multi_head", *more, algorithm="distral")
    ends = []
    for precision in PRECISIONS:
        built = in_precision(built, precision)
        tasks = [f"actor.members.{name}." for name in built.model.spec.task_names]
        parts = ("critic.members.1.", "distilled.", *tasks)
        learned = check_learns(built.model, parts, partial(update, built, "metaworld"))
        assert "train/distilled_weight_max" in learned.metrics
        ends.append(learned.step_P)
    check_precisions(ends)
