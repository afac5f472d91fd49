"""The squashed and the clipped Gaussian against torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from mtrl_lightning.networks import ClippedGaussian, SquashedGaussian
from tests.helpers.networks import uniform


def test_actions_and_densities_equal_a_transformed_normal():
    mean, log_std = 2 * uniform(500, 3, seed=1).double(), uniform(500, 3, seed=2).double() - 0.5
    noise = torch.randn(500, 3, generator=torch.Generator().manual_seed(3)).double()
    action, log_prob = SquashedGaussian(mean, log_std).sample(noise)
    u = mean + log_std.exp() * noise
    reference = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
    torch.testing.assert_close(action, u.tanh(), rtol=1e-12, atol=1e-12)
    pairs = TanhTransform(cache_size=1)
    assert torch.equal(pairs(u), action)  # fills the cache, so that the inverse is exact
    wanted = (Normal(mean, log_std.exp()).log_prob(u) - pairs.log_abs_det_jacobian(u, action)).sum(
        -1
    )
    torch.testing.assert_close(log_prob, wanted, rtol=1e-10, atol=1e-10)
    moderate = (u.abs() < 4).all(-1)
    assert moderate.sum() > 400
    inverted = reference.log_prob(action)[moderate].sum(-1)  # inverts tanh, which costs digits
    torch.testing.assert_close(log_prob[moderate], inverted, rtol=1e-7, atol=1e-7)


def test_gradients_of_samples_equal_automatic_differentiation():
    inputs = uniform(500, 6, seed=1).double().chunk(2, -1)
    noise, action_weight, density_weight = uniform(500, 9, seed=2).double().chunk(3, -1)

    def gradients(sample):
        mean, log_std = (x.clone().requires_grad_() for x in inputs)
        action, log_prob = sample(mean, log_std)
        total = (action_weight * action).sum() + (density_weight[:, 0] * log_prob).sum()
        return torch.autograd.grad(total, (mean, log_std))

    def formula(mean, log_std):
        u = mean + log_std.exp() * noise
        log_prob = Normal(mean, log_std.exp()).log_prob(u)
        log_prob = log_prob - TanhTransform().log_abs_det_jacobian(u, u.tanh())
        return u.tanh(), log_prob.sum(-1)

    found = gradients(lambda mean, log_std: SquashedGaussian(mean, log_std).sample(noise))
    torch.testing.assert_close(found, gradients(formula), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [ClippedGaussian, SquashedGaussian])
def test_densities_equal_automatic_differentiation(kind):
    inputs = uniform(500, 9, seed=1).double().chunk(3, -1)

    def gradients(log_prob):
        action, mean, log_std = (x.clone().requires_grad_() for x in inputs)
        value = 0.5 * action
        return torch.autograd.grad(log_prob(value, mean, log_std).sum(), (action, mean, log_std))

    def formula(value, mean, log_std):
        if kind is ClippedGaussian:
            return Normal(mean, log_std.exp()).log_prob(value)
        return Normal(mean, log_std.exp()).log_prob(value.atanh()) - (1 - value**2).log()

    value, mean, log_std = inputs
    found_B = kind(mean, log_std).log_prob(0.5 * value)
    torch.testing.assert_close(found_B, formula(0.5 * value, mean, log_std).sum(-1))
    found = gradients(lambda value, mean, log_std: kind(mean, log_std).log_prob(value))
    torch.testing.assert_close(found, gradients(formula), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mean", [-1e4, -50.0, -20.0, 20.0, 50.0, 1e4])
def test_densities_and_gradients_stay_finite_where_tanh_is_one(mean):
    mean_BA = torch.full((1, 2), mean, requires_grad=True)
    log_std_BA = torch.zeros(1, 2, requires_grad=True)
    action, log_prob = SquashedGaussian(mean_BA, log_std_BA).sample(torch.tensor([[0.5, -0.5]]))
    assert action.abs().tolist() == [[1.0, 1.0]]
    # log(1 - tanh(u)^2) is 2 log 2 - 2 |u| there
    u = mean + 0.5, mean - 0.5
    wanted = sum(
        -0.125 - 0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 2 * abs(value) for value in u
    )
    assert log_prob.item() == pytest.approx(wanted, rel=1e-5)
    log_prob.sum().backward()
    assert mean_BA.grad.isfinite().all()
    assert log_std_BA.grad.isfinite().all()


def test_the_mode_is_tanh_of_the_mean():
    policy = SquashedGaussian(torch.tensor([[0.0, 0.5, -3.0]]), torch.zeros(1, 3))
    assert policy.mode().tolist()[0] == pytest.approx([0, math.tanh(0.5), math.tanh(-3)], rel=1e-6)


def test_output_is_split_into_means_and_clamped_deviations():
    policy = SquashedGaussian.from_network(
        torch.tensor([[1.0, 2.0, -30.0, 7.0], [3.0, 4.0, -5.0, 1.5]]), -20.0, 2.0
    )
    assert policy.mean_BA.tolist() == [[1, 2], [3, 4]]
    assert policy.log_std_BA.tolist() == [[-20, 2], [-5, 1.5]]


@pytest.mark.parametrize("kind", [SquashedGaussian, ClippedGaussian])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_of_rows_have_the_numbers_of_the_rows(kind, masked):
    mask_R1A = torch.tensor([[[True, True]], [[True, False]]]) if masked else None
    mean, log_std, noise, other_mean = (uniform(2, 3, 2, seed=seed) for seed in range(4))

    def numbers(*parts):
        mean, log_std, noise, other_mean, mask = parts
        policy, other = kind(mean, log_std, mask), kind(other_mean, log_std, mask)
        found = [*policy.sample(noise), policy.mode()]
        if kind is SquashedGaussian:
            return [*found, policy.kl(other), policy.log_ratio(other, noise)]
        return [*found, policy.log_prob(noise), policy.entropy()]

    found = numbers(mean, log_std, noise, other_mean, mask_R1A)
    mask_BA = mask_R1A.expand(2, 3, 2).flatten(0, 1) if masked else None
    rows = [x_RnA.flatten(0, 1) for x_RnA in (mean, log_std, noise, other_mean)]
    for number, wanted in zip(found, numbers(*rows, mask_BA), strict=True):
        assert number.shape[:2] == (2, 3)
        torch.testing.assert_close(number.flatten(0, 1), wanted, rtol=1e-6, atol=1e-6)


def test_half_precision_is_left_behind_at_once():
    output = torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)
    policy = SquashedGaussian.from_network(output, -20.0, 2.0)
    action, log_prob = policy.sample(torch.tensor([[1.0]]))
    results = (policy.mean_BA, policy.log_std_BA, action, log_prob, policy.mode())
    assert {value.dtype for value in results} == {torch.float32}
    exact, _ = SquashedGaussian(torch.tensor([[0.5]]), torch.tensor([[0.25]])).sample(
        torch.tensor([[1.0]])
    )
    assert torch.equal(action, exact)


# ---- two squashed Gaussians ----


def two_policies():
    made = []
    for seed in (1, 4):
        mean = uniform(300, 3, seed=seed).double()
        log_std = uniform(300, 3, seed=seed + 1).double() - 0.5
        made.append(SquashedGaussian(mean, log_std))
    return made


def normals(policy):
    return Normal(policy.mean_BA, policy.log_std_BA.exp())


def test_the_divergence_is_that_of_the_normal_distributions():
    policy, other = two_policies()
    wanted = torch.distributions.kl_divergence(normals(policy), normals(other)).sum(-1)
    torch.testing.assert_close(policy.kl(other), wanted, rtol=1e-12, atol=1e-12)
    assert policy.kl(policy).abs().max() < 1e-12


def test_mean_ratio_of_squashed_densities_is_the_divergence():
    policy, other = (SquashedGaussian(p.mean_BA[:1], p.log_std_BA[:1]) for p in two_policies())
    count = 200_000
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(3)).double()
    policies = [
        SquashedGaussian(p.mean_BA.expand(count, 3), p.log_std_BA.expand(count, 3))
        for p in (policy, other)
    ]
    action, log_prob = policies[0].sample(noise)
    reference = TransformedDistribution(normals(policies[1]), TanhTransform())
    ratio = log_prob - reference.log_prob(action.clamp(-1 + 1e-12, 1 - 1e-12)).sum(-1)
    error = 5 * ratio.std().item() / math.sqrt(count)
    assert ratio.mean().item() == pytest.approx(policy.kl(other).item(), abs=error)
    moderate = action.abs().amax(-1) < 0.999
    torch.testing.assert_close(
        policies[0].log_ratio(policies[1], noise)[moderate], ratio[moderate], rtol=1e-7, atol=1e-7
    )


def test_ratio_is_finite_where_tanh_is_one():
    mask_BA = torch.tensor([[True, False]])
    policy = SquashedGaussian(torch.tensor([[50.0, 1.0]]), torch.zeros(1, 2), mask_BA)
    other = SquashedGaussian(torch.tensor([[48.0, 7.0]]), torch.zeros(1, 2), mask_BA)
    # u = 50.5: (2.5^2 - 0.5^2) / 2
    assert policy.log_ratio(other, torch.tensor([[0.5, 3.0]])).item() == pytest.approx(3.0)
    assert policy.kl(other).item() == pytest.approx(2.0)


# ---- the clipped Gaussian ----


def clipped(dtype=torch.float64):
    mean = 2 * uniform(500, 3, seed=1).to(dtype)
    log_std = uniform(500, 3, seed=2).to(dtype) - 0.5
    noise = torch.randn(500, 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    return ClippedGaussian(mean, log_std), Normal(mean, log_std.exp()), noise


def test_densities_and_entropies_equal_a_normal_distribution():
    policy, reference, noise = clipped()
    for sample in (policy.draw(noise), policy.mode(), 3 * noise):
        wanted = reference.log_prob(sample).sum(-1)
        torch.testing.assert_close(policy.log_prob(sample), wanted, rtol=1e-12, atol=1e-12)
    wanted = reference.entropy().sum(-1)
    torch.testing.assert_close(policy.entropy(), wanted, rtol=1e-12, atol=1e-12)


def test_a_clipped_gaussian_by_hand():
    policy = ClippedGaussian(torch.tensor([[0.5, -3.0]]), torch.tensor([[math.log(2), 0.0]]))
    noise = torch.tensor([[0.5, -1.0]])
    # 0.5 + 2 * 0.5 = 1.5, -3 - 1 = -4
    assert policy.draw(noise).tolist()[0] == pytest.approx([1.5, -4])
    action, log_prob = policy.sample(noise)
    assert action.tolist() == [[1, -1]]
    wanted = -0.5 * (0.5**2 + 1) - math.log(2) - math.log(2 * math.pi)
    assert log_prob.item() == pytest.approx(wanted, rel=1e-6)
    assert policy.mode().tolist() == [[0.5, -1]]
    assert policy.entropy().item() == pytest.approx(math.log(2 * math.pi * math.e * 2), rel=1e-6)
