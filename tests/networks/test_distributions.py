"""Distributions of actions against PyTorch's, and the standard deviations of Gaussian ones."""

import math

import pytest
import torch
from torch.distributions import Categorical as Reference
from torch.distributions import Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform
from torch.optim import SGD

from mtrl_lightning.networks import (
    ClippedGaussian,
    OneHotCategorical,
    SquashedGaussian,
    StateDependentStd,
    StateIndependentStd,
)
from tests.helpers.networks import gradients_of, uniform
from tests.helpers.specs import spec_of


def policy_and_normal(kind, seed=1):
    """Return a policy of 500 rows, and the normal distribution of its mean and deviation."""
    mean_BA = 2 * uniform(500, 3, seed=seed).double()
    log_std_BA = uniform(500, 3, seed=seed + 1).double() - 0.5
    return kind(mean_BA, log_std_BA), Normal(mean_BA, log_std_BA.exp())


def noise_of(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def assert_equal(found, wanted, tolerance=1e-10):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def sample_of(mean, log_std, noise):
    u = mean + log_std.exp() * noise.detach()
    log_prob = Normal(mean, log_std.exp()).log_prob(u)
    log_prob = log_prob - TanhTransform().log_abs_det_jacobian(u, u.tanh())
    return u.tanh(), log_prob.sum(-1)


def squashed_density(mean, log_std, action):
    normal = Normal(mean, log_std.exp())
    return ((normal.log_prob(action.atanh()) - (1 - action**2).log()).sum(-1),)


@pytest.mark.parametrize(
    ("method", "formula"),
    [
        (lambda mean, std, noise: SquashedGaussian(mean, std).sample(noise), sample_of),
        (lambda mean, std, a: (SquashedGaussian(mean, std).log_prob(a),), squashed_density),
        (
            lambda mean, std, a: (ClippedGaussian(mean, std).log_prob(a),),
            lambda mean, std, a: (Normal(mean, std.exp()).log_prob(a).sum(-1),),
        ),
    ],
    ids=["sample", "squashed", "clipped"],
)
def test_samples_densities_and_gradients_equal_autograd(method, formula):
    results = []
    for function in (method, formula):
        parameters = uniform(500, 9, seed=1).double().requires_grad_()
        outputs = function(*(parameters * torch.tensor([1.0] * 6 + [0.5] * 3)).chunk(3, -1))
        weighted = [(uniform(*out.shape, seed=2) * out).sum() for out in outputs]
        results.append((*outputs, *gradients_of(sum(weighted), [parameters])))
    assert_equal(*results, 1e-9)


@pytest.mark.parametrize("mean", [-1e4, -20.0, 20.0, 1e4])
def test_densities_and_gradients_stay_finite_where_tanh_is_one(mean):
    mean_BA = torch.full((1, 2), mean, requires_grad=True)
    log_std_BA = torch.zeros(1, 2, requires_grad=True)
    action, log_prob = SquashedGaussian(mean_BA, log_std_BA).sample(torch.tensor([[0.5, -0.5]]))
    assert action.abs().tolist() == [[1.0, 1.0]]
    # log(1 - tanh(u)^2) is 2 log 2 - 2 |u| there
    normal = -0.125 - 0.5 * math.log(2 * math.pi)
    wanted = sum(normal - 2 * math.log(2) + 2 * abs(u) for u in (mean + 0.5, mean - 0.5))
    assert log_prob.item() == pytest.approx(wanted, rel=1e-5)
    log_prob.sum().backward()
    assert mean_BA.grad.isfinite().all() and log_std_BA.grad.isfinite().all()


def test_output_is_split_and_clamped_in_single_precision():
    output_BA2 = torch.tensor([[1.0, 2.0, -30.0, 7.0], [3.0, 0.5, -5.0, 1.5]])
    policy = SquashedGaussian.from_network(output_BA2.bfloat16(), -20.0, 2.0)
    assert policy.mean_BA.tolist() == [[1, 2], [3, 0.5]]
    assert policy.log_std_BA.tolist() == [[-20, 2], [-5, 1.5]]
    assert policy.mean_BA.dtype == policy.log_std_BA.dtype == torch.float32


@pytest.mark.parametrize("kind", [SquashedGaussian, ClippedGaussian])
def test_masked_dimensions_do_not_count_and_groups_equal_rows(kind):
    mask_R1A = torch.tensor([[[True, True]], [[True, False]]])
    parts = [uniform(2, 3, 2, seed=seed) for seed in range(4)]

    def numbers(parts, mask):
        mean, log_std, noise, other_mean = parts
        policy, other = kind(mean, log_std, mask), kind(other_mean, log_std, mask)
        found = [*policy.sample(noise), policy.mode(), policy.log_prob(0.5 * noise)]
        if kind is SquashedGaussian:
            return [*found, policy.kl(other), policy.log_ratio(other, noise)]
        return [*found, policy.draw(noise), policy.entropy()]

    found = numbers(parts, mask_R1A)
    rows = [x_RnA.flatten(0, 1) for x_RnA in parts]
    for number, wanted in zip(
        found, numbers(rows, mask_R1A.expand(2, 3, 2).flatten(0, 1)), strict=True
    ):
        torch.testing.assert_close(number.flatten(0, 1), wanted, rtol=1e-6, atol=1e-6)
    alone = numbers([x_RnA[1, :, :1] for x_RnA in parts], None)
    for number, wanted in zip(found, alone, strict=True):
        has_actions = number.ndim == 3
        torch.testing.assert_close(number[1, :, :1] if has_actions else number[1], wanted)
        assert not has_actions or not number[1, :, 1:].any()


def test_divergence_and_ratio_of_two_policies():
    policy, normal = policy_and_normal(SquashedGaussian)
    other, other_normal = policy_and_normal(SquashedGaussian, seed=4)
    assert_equal(policy.mode(), policy.mean_BA.tanh())
    assert_equal(policy.kl(other), kl_divergence(normal, other_normal).sum(-1))
    noise_BA = noise_of(500, 3)
    action_BA, log_prob_B = policy.sample(noise_BA)
    reference = TransformedDistribution(other_normal, TanhTransform())
    moderate = action_BA.abs().amax(-1) < 0.999
    wanted_B = log_prob_B - reference.log_prob(action_BA.clamp(-0.999, 0.999)).sum(-1)
    assert_equal(policy.log_ratio(other, noise_BA)[moderate], wanted_B[moderate], 1e-7)
    far, near = (SquashedGaussian(torch.tensor([[m]]), torch.zeros(1, 1)) for m in (50.0, 48.0))
    # tanh is 1 at u = 50.5: (2.5^2 - 0.5^2) / 2
    assert far.log_ratio(near, torch.tensor([[0.5]])).item() == pytest.approx(3.0)


def test_a_clipped_gaussian_is_normal_until_it_is_clipped():
    policy, normal = policy_and_normal(ClippedGaussian)
    noise_BA = noise_of(500, 3)
    sample_BA = policy.draw(noise_BA)
    assert_equal(sample_BA, policy.mean_BA + policy.log_std_BA.exp() * noise_BA)
    action_BA, log_prob_B = policy.sample(noise_BA)
    assert_equal(action_BA, sample_BA.clamp(-1, 1))
    assert_equal(policy.mode(), policy.mean_BA.clamp(-1, 1))
    assert_equal(log_prob_B, normal.log_prob(sample_BA).sum(-1))
    assert_equal(policy.entropy(), normal.entropy().sum(-1))


CHOICES = (3, 2)


def logits(rows, seed=0):
    return torch.randn(rows, sum(CHOICES), generator=torch.Generator().manual_seed(seed))


def references(logits_BA):
    return [Reference(logits=part) for part in logits_BA.split(CHOICES, -1)]


def test_probabilities_entropies_and_divergences_are_pytorchs():
    policy, other = OneHotCategorical(logits(7), CHOICES), OneHotCategorical(logits(7, 1), CHOICES)
    parts, other_parts = references(policy.logits_BA), references(other.logits_BA)
    torch.testing.assert_close(policy.probs(), torch.cat([part.probs for part in parts], -1))
    torch.testing.assert_close(policy.entropy(), sum(part.entropy() for part in parts))
    expected = sum(map(kl_divergence, parts, other_parts))
    torch.testing.assert_close(policy.kl(other), expected)
    torch.testing.assert_close(policy.log_ratio(other, logits(7, 2)), expected)
    action_BA, log_prob_B = policy.sample(logits(7, 3))
    indices = [part.argmax(-1) for part in action_BA.split(CHOICES, -1)]
    expected = sum(part.log_prob(index) for part, index in zip(parts, indices, strict=True))
    torch.testing.assert_close(log_prob_B, expected)
    assert torch.equal(action_BA.sum(-1), torch.full((7,), 2.0))


def test_samples_have_the_probabilities():
    policy = OneHotCategorical(logits(1).expand(40_000, -1), CHOICES)
    frequency_A = policy.draw(torch.randn(40_000, 5, generator=torch.Generator().manual_seed(1)))
    # five standard deviations of a frequency
    torch.testing.assert_close(frequency_A.mean(0), policy.probs()[0], atol=0.0125, rtol=0)
    mode_A = policy.mode()[0]
    assert mode_A[:3].argmax() == policy.probs()[0, :3].argmax()


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_choices_of_other_tasks_are_never_taken(scale):
    logits_BA = (scale * torch.tensor([[0.3, -1.0, 2.0], [0.3, -1.0, 2.0]])).requires_grad_()
    mask_BA = torch.tensor([[True, True, False], [True, True, True]])
    policy = OneHotCategorical(logits_BA, (3,), mask_BA)
    own = Reference(logits=logits_BA[0, :2])
    probs_BA = policy.probs()
    entropy_B = policy.entropy()
    assert probs_BA[0, 2] == 0
    torch.testing.assert_close(probs_BA[0, :2], own.probs)
    torch.testing.assert_close(entropy_B[0], own.entropy())
    action_BA, log_prob_B = policy.sample(torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]]))
    assert action_BA.argmax(-1)[0] != 2 and policy.mode().argmax(-1).tolist() == [0, 2]
    (entropy_B.sum() + log_prob_B.sum() + probs_BA.square().sum()).backward()
    assert logits_BA.grad[0, 2] == 0 and logits_BA.grad.isfinite().all()


SPEC = spec_of(3, action_dim=2)
TASK_B = torch.tensor([2, 0, 0, 1])
each_kind = pytest.mark.parametrize("kind", [StateIndependentStd, StateDependentStd])


def make(kind, log_std_TA=None, **options):
    made = kind(SPEC, **options)
    if log_std_TA is not None:
        made.load_state_dict({"log_std_TA": torch.as_tensor(log_std_TA)})
    return made


def test_state_dependent_deviations_stay_in_their_bounds():
    made = make(
        StateDependentStd, [[-1.0, -1.0], [-1.0, -1.0], [-0.5, 0.25]], minimum=-2.0, maximum=0.5
    )
    output_BO = torch.tensor(
        [[1.0, 2.0, 0.125, 0.125], [3.0, 4.0, 0.5, -5.0], [5.0, 6.0, -1.0, 1.5], [0.0] * 4]
    )
    policy = made.distribution(output_BO, TASK_B)
    assert policy.mean_BA.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert policy.log_std_BA.tolist() == [[-0.375, 0.375], [-0.5, -2], [-2, 0.5], [-1, -1]]


@each_kind
def test_groups_have_the_distributions_of_rows_in_float32(kind):
    made = make(kind, 0.3 * uniform(3, 2))
    output_RnO = uniform(2, 3, 2 * made.outputs_per_action).bfloat16()
    task_Rn = torch.tensor([[0] * 3, [2] * 3])
    policy = made.distribution(output_RnO, task_Rn)
    rows = made.distribution(output_RnO.flatten(0, 1), task_Rn.flatten())
    for found, wanted in zip(policy[:2], rows[:2], strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found.expand(2, 3, -1).flatten(0, 1), wanted)


@each_kind
def test_step_beyond_a_bound_is_clipped_and_can_return(kind):
    made = make(kind, initial=-1.0, minimum=-2.0, maximum=0.5)
    assert (made.log_std_TA == -1).all()
    optimizer = SGD(made.parameters(), lr=1.0)
    push_T1 = torch.tensor([[10.0], [-10.0], [0.1]])

    def push(sign):
        optimizer.zero_grad()
        (sign * push_T1 * made.log_std_TA).sum().backward()
        optimizer.step()
        made.after_step(None, None, None)

    push(1)
    assert made.log_std_TA[:2].tolist() == [[-2, -2], [0.5, 0.5]]
    assert made.log_std_TA[2].tolist() == pytest.approx([-1.1, -1.1])
    push(-0.01)
    # a clamp in the forward pass would leave no gradient at a bound, or beyond it
    assert made.log_std_TA[0].tolist() == pytest.approx([-1.9, -1.9])
    assert made.log_std_TA[1].tolist() == pytest.approx([0.4, 0.4])
