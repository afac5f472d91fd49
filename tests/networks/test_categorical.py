"""The distribution of discrete actions against PyTorch's, and its padding."""

import pytest
import torch
from torch.distributions import Categorical as Reference
from torch.distributions import kl_divergence

from mtrl_lightning.networks import OneHotCategorical

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
    probs_BA, entropy_B = policy.probs(), policy.entropy()
    assert probs_BA[0, 2] == 0
    torch.testing.assert_close(probs_BA[0, :2], own.probs)
    torch.testing.assert_close(entropy_B[0], own.entropy())
    action_BA, log_prob_B = policy.sample(torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]]))
    assert action_BA.argmax(-1)[0] != 2 and policy.mode().argmax(-1).tolist() == [0, 2]
    (entropy_B.sum() + log_prob_B.sum() + probs_BA.square().sum()).backward()
    assert logits_BA.grad[0, 2] == 0 and logits_BA.grad.isfinite().all()
