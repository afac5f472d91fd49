"""A second algorithm on the base's parts: it trains and continues through the command line."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning.algorithms import ReturnRange
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import SquashedGaussian
from tests.helpers.algorithms import changed, copy_of, make_batch, make_spec, small_mlp, train
from tests.helpers.behaviour_cloning import BehaviourCloning, negative_log_likelihood
from tests.helpers.runs import assert_continues_exactly

OPTIONS = [
    "--model=tests.helpers.behaviour_cloning.BehaviourCloning",
    "--model.init_args.actor=mtrl_lightning.networks.MLP",
    "--model.init_args.actor.init_args.width=16",
    "--model.init_args.actor.init_args.output_bound=1.0",
    "--data.batch_size=96",
    "--data.capacity=30000",
    "--rollout.warmup_steps=300",
    "--rollout.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.every=300",
    "--evaluation.num_episodes=1",
    "--metrics.every=150",
    "--checkpoint.every=300",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]


def clone(command_line, *options):
    command_line("fit", *OPTIONS, *options, configs=("base", "env/toy"), small=False)


def test_the_loss_is_the_density_of_the_squashed_gaussian():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, 2)
    mean_RnA, log_std_RnA, noise_RnA = (torch.randn(shape, generator=generator) for _ in range(3))
    policy = SquashedGaussian(0.3 * mean_RnA, 0.3 * log_std_RnA)
    action_RnA, log_prob_Rn = policy.sample(0.5 * noise_RnA)
    expected_R = -log_prob_Rn.mean(1)
    torch.testing.assert_close(negative_log_likelihood(policy, action_RnA), expected_R)


@pytest.mark.slow
def test_it_trains_through_the_command_line_and_its_loss_falls(command_line):
    clone(command_line, "--rollout.total_steps=1500")
    logged = [row["train/actor_loss"] for row in command_line.rows()]
    losses = [float(loss) for loss in logged if loss]
    assert len(losses) > 4 and losses[-1] < 0.5 * losses[0], losses
    assert "train/critic_loss" not in command_line.rows()[0]


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["PCGrad", "FAMO"])
def test_a_continued_run_is_the_same_run(command_line, gradient):
    options = [
        f"--model.init_args.gradient=mtrl_lightning.gradients.{gradient}",
        "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
        "--resets.every=500",
    ]
    run = partial(clone, command_line, *options)
    assert_continues_exactly(command_line, run, 600, 900)


def test_its_networks_are_reset():
    algorithm = train(BehaviourCloning(make_spec(), actor=small_mlp), 3)
    before = copy_of(algorithm)
    algorithm.reset_networks()
    assert {"actor.trunk.0.weight", "actor.trunk.2.weight"} <= changed(algorithm, before)
    assert not algorithm.actor_update.optimizer.state
    train(algorithm, 1)


def test_a_batch_gives_the_step_of_its_mean_loss():
    algorithm, reference = (BehaviourCloning(make_spec(), actor=small_mlp) for _ in range(2))
    train(algorithm, 1)
    optimizer = torch.optim.Adam(reference.actor.parameters(), lr=1e-3)
    reference.actor_loss(make_batch(reference.spec))[0].mean().backward()
    torch.nn.utils.clip_grad_norm_(reference.actor.parameters(), 1.0)
    optimizer.step()
    assert changed(algorithm.actor, copy_of(reference.actor)) == set()


def test_a_transform_that_needs_what_it_does_not_have_is_refused():
    with pytest.raises(ConfigurationError, match="ReturnRange requires temperature_T, target_ent"):
        BehaviourCloning(make_spec(), reward_scale=ReturnRange)
