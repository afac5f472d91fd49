"""The loss of behaviour cloning against PyTorch's distributions."""

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from mtrl_lightning.networks import SquashedGaussian, StateDependentStd, StateIndependentStd
from tests.helpers.algorithms import make_batch, make_bc, make_spec

POLICIES = {"squashed": None, "clipped": StateIndependentStd, "dependent": StateDependentStd}


def test_density_at_the_bounds_is_finite_and_has_a_gradient():
    mean_BA = torch.zeros(1, 2, requires_grad=True)
    log_prob_B = SquashedGaussian(mean_BA, torch.zeros(1, 2)).log_prob(torch.tensor([[1.0, -1.0]]))
    log_prob_B.sum().backward()
    assert log_prob_B.isfinite().all()
    assert mean_BA.grad[0, 0] > 1 and mean_BA.grad[0, 1] < -1


@pytest.mark.parametrize("noise", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("loss", ["mse", "log_prob"])
def test_a_tasks_loss_is_the_mean_over_its_own_rows(loss, noise):
    algorithm = make_bc(make_spec(4, train_tasks=(0, 1, 3)), loss=loss, noise=noise)
    batch = make_batch(algorithm.spec)
    loss_R, error = algorithm.actor_loss(batch)
    policy = algorithm.policy(batch.observation_RnD, batch.task_Rn)
    # also beyond the bounds of a clipped Gaussian
    mean_RnA = policy.mean_BA.tanh() if noise is None else policy.mean_BA
    error_Rn = (mean_RnA - batch.action_RnA).square().sum(-1)
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
