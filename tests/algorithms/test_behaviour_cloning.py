"""Behaviour cloning: its losses, its policies, and a run through the command line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from mtrl_lightning.algorithms.bc import squared_errors
from mtrl_lightning.networks import (
    ClippedGaussian,
    SquashedGaussian,
    StateDependentStd,
    StateIndependentStd,
)
from tests.helpers.algorithms import changed, copy_of, make_batch, make_bc, make_spec, train
from tests.helpers.demonstrations import write_demonstrations

POLICIES = {"squashed": None, "clipped": StateIndependentStd, "dependent": StateDependentStd}


def test_density_at_the_bounds_is_finite_and_has_a_gradient():
    mean_BA = torch.zeros(1, 2, requires_grad=True)
    log_prob_B = SquashedGaussian(mean_BA, torch.zeros(1, 2)).log_prob(torch.tensor([[1.0, -1.0]]))
    log_prob_B.sum().backward()
    assert log_prob_B.isfinite().all()
    assert mean_BA.grad[0, 0] > 1 and mean_BA.grad[0, 1] < -1


def test_squared_error_leaves_padded_dimensions_out():
    mean_BA = torch.tensor([[0.5, 9.0, -2.0]])
    action_BA = torch.tensor([[0.1, 0.0, 0.4]])
    numbers = (mean_BA, torch.zeros(1, 3), torch.tensor([True, False, True]))
    # also beyond the bounds: (0.5 - 0.1)^2 + (-2 - 0.4)^2
    clipped = ClippedGaussian(*numbers)
    torch.testing.assert_close(squared_errors(clipped, action_BA), torch.tensor([0.16 + 5.76]))
    expected = (np.tanh(0.5) - 0.1) ** 2 + (np.tanh(-2) - 0.4) ** 2
    error_B = squared_errors(SquashedGaussian(*numbers), action_BA)
    assert error_B.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("noise", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("loss", ["mse", "log_prob"])
def test_a_tasks_loss_is_the_mean_over_its_own_rows(loss, noise):
    algorithm = make_bc(make_spec(4, train_tasks=(0, 1, 3)), loss=loss, noise=noise)
    batch = make_batch(algorithm.spec)
    loss_R, error = algorithm.actor_loss(batch)
    policy = algorithm.policy(batch.observation_RnD, batch.task_Rn)
    error_Rn = squared_errors(policy, batch.action_RnA)
    density = Normal(policy.mean_BA, policy.log_std_BA.exp().expand_as(policy.mean_BA))
    if noise is None:
        density = TransformedDistribution(density, TanhTransform())
    log_prob_Rn = density.log_prob(batch.action_RnA).sum(-1)
    expected_Rn = error_Rn if loss == "mse" else -log_prob_Rn
    torch.testing.assert_close(loss_R, expected_Rn.mean(1))
    torch.testing.assert_close(error, error_Rn.mean())
    # the noise of the demonstrator is not imitated
    chosen_RnA = 0.5 * batch.action_RnA
    found_R, _ = algorithm.actor_loss(batch._replace(extra={"policy_action": chosen_RnA}))
    wanted_R, _ = algorithm.actor_loss(batch._replace(action_RnA=chosen_RnA))
    assert torch.equal(found_R, wanted_R) and not torch.equal(found_R, loss_R)


def test_a_batch_gives_the_step_of_its_mean_loss():
    algorithm, reference = make_bc(), make_bc()
    train(algorithm, 1)
    optimizer = torch.optim.Adam(reference.actor.parameters(), lr=1e-3, eps=1e-5)
    reference.actor_loss(make_batch(reference.spec))[0].mean().backward()
    torch.nn.utils.clip_grad_norm_(reference.actor.parameters(), 1.0)
    optimizer.step()
    found, wanted = (dict(one.actor.named_parameters()) for one in (algorithm, reference))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("loss", ["mse", "log_prob"])
def test_standard_deviations_are_trained_by_densities_alone(loss):
    algorithm = make_bc(noise=StateIndependentStd, loss=loss)
    before = copy_of(algorithm)
    train(algorithm, 2)
    assert ("noise.log_std_TA" in changed(algorithm, before)) is (loss == "log_prob")


@pytest.mark.slow
def test_it_trains_through_the_command_line_and_its_loss_falls(command_line, tmp_path):
    demonstrations = write_demonstrations(tmp_path / "expert")
    command_line(
        "fit",
        f"--data.demonstrations={demonstrations}",
        "--data.total_steps=1500",
        "--data.batch_size=96",
        "--model.init_args.actor.init_args.width=16",
        "--model.init_args.actor.init_args.output_bound=1.0",
        "--evaluation.num_workers=0",
        "--evaluation.every=300",
        "--evaluation.num_episodes=1",
        "--metrics.every=150",
        "--checkpoint.every_n_env_steps=300",
        "--trainer.enable_progress_bar=false",
        "--trainer.accelerator=cpu",
        configs=("base", "env/toy", "algorithm/bc", "network/mlp"),
        small=False,
    )
    rows = command_line.rows()
    losses = [float(row["train/actor_loss"]) for row in rows if "train/actor_loss" in row]
    assert len(losses) > 4 and losses[-1] < 0.5 * losses[0], losses
    assert not any("train/critic_loss" in row for row in rows)
    assert [float(row["eval/success"]) for row in rows if "eval/success" in row][-1] == 1.0
