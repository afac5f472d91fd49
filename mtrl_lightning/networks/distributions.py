"""The distributions of policies: Gaussian, or categorical over discrete actions.

If tasks have different numbers of action dimensions, a mask is false for the padding dimensions of
each row. These are 0 in all actions and do not contribute to log densities and entropies. A
discrete action is a one-hot row; one of several components is their one-hot rows side by side.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``A`` entries of an
action; for discrete actions, the numbers of choices of all components together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
"""Constant of a normal distribution's log density, negated."""
LARGEST = 1 - 1e-4
"""Bound to which actions are clamped before their density is computed, which is infinite at the
bounds of tanh, -1 and 1."""


def zero_padding(value_BA: Tensor, mask_BA: Tensor | None) -> Tensor:
    """Return the values, with 0 where the mask is false; None for no padding."""
    return value_BA if mask_BA is None else torch.where(mask_BA, value_BA, 0.0)


def normal_log_prob(value_BA: Tensor, mean_BA: Tensor, log_std_BA: Tensor) -> Tensor:
    """Return ``log N(value; mean, std)`` of each dimension, ``[B, A]``."""
    log_prob_BA: Tensor = _NormalLogProb.apply(
        *torch.broadcast_tensors(value_BA, mean_BA, log_std_BA)
    )
    return log_prob_BA


class ActionDistribution(Protocol):
    """A policy's distribution over actions between -1 and 1."""

    def mode(self) -> Tensor:
        """Return the deterministic action ``[B, A]``."""
        ...

    def sample(self, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``[B, A]`` and log densities ``[B]`` for standard normal noise."""
        ...


class ClippedGaussian(NamedTuple):
    """A Gaussian distribution whose samples are clipped to [-1, 1] for the environment.

    Densities are those of the samples before clipping.
    """

    mean_BA: Tensor
    log_std_BA: Tensor
    mask_BA: Tensor | None = None
    """False for padding dimensions; None without padding."""

    def mode(self) -> Tensor:
        """Return the deterministic action ``[B, A]``, the clipped mean."""
        return zero_padding(self.mean_BA.clamp(-1, 1), self.mask_BA)

    def draw(self, noise_BA: Tensor) -> Tensor:
        """Return unclipped samples ``[B, A]`` for standard normal noise ``[B, A]``."""
        return zero_padding(self.mean_BA + self.log_std_BA.exp() * noise_BA, self.mask_BA)

    def sample(self, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return clipped actions ``[B, A]`` and log densities ``[B]`` for standard normal noise."""
        sample_BA = self.draw(noise_BA)
        return sample_BA.clamp(-1, 1), self.log_prob(sample_BA)

    def log_prob(self, sample_BA: Tensor) -> Tensor:
        """Return log densities ``[B]`` of unclipped samples ``[B, A]``."""
        log_prob_BA = normal_log_prob(sample_BA, self.mean_BA, self.log_std_BA)
        return zero_padding(log_prob_BA, self.mask_BA).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy ``[B]`` of the unclipped distribution."""
        # H(N) = log s + log(2 pi e) / 2 in each dimension
        entropy_BA = self.log_std_BA + 0.5 * math.log(2 * math.pi * math.e)
        return zero_padding(entropy_BA, self.mask_BA).sum(-1)


class SquashedGaussian(NamedTuple):
    """A Gaussian distribution squashed by tanh: actions lie between -1 and 1.

    Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C.
    """

    mean_BA: Tensor
    log_std_BA: Tensor
    mask_BA: Tensor | None = None
    """False for padding dimensions; None without padding."""

    @classmethod
    def from_network(
        cls,
        output_BA2: Tensor,
        log_std_min: float,
        log_std_max: float,
        mask_BA: Tensor | None = None,
    ) -> SquashedGaussian:
        """Split a network's output ``[B, 2A]`` into mean and clamped log std, in float32."""
        mean_BA, log_std_BA = output_BA2.float().chunk(2, dim=-1)
        # a clamp whose backward is a single kernel, with gradient 0 at the bounds
        return cls(mean_BA, F.hardtanh(log_std_BA, log_std_min, log_std_max), mask_BA)

    def mode(self) -> Tensor:
        """Return the deterministic action ``[B, A]``, tanh of the mean."""
        return zero_padding(self.mean_BA.tanh(), self.mask_BA)

    def sample(self, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``[B, A]`` and log densities ``[B]`` for standard normal noise ``[B, A]``.

        The noise gets no gradient. ``a = tanh(u)`` with ``u = mean + std noise``, and
        ``log pi(a) = sum_A [log N(u; mean, std) - log(1 - tanh(u)^2)]``.
        """
        action_BA, log_prob_BA = _SquashedSample.apply(self.mean_BA, self.log_std_BA, noise_BA)
        log_prob_B = zero_padding(log_prob_BA, self.mask_BA).sum(-1)
        return zero_padding(action_BA, self.mask_BA), log_prob_B

    def log_prob(self, action_BA: Tensor) -> Tensor:
        """Return log densities ``[B]`` of actions ``[B, A]``, which are clamped to ``LARGEST``."""
        action_BA = action_BA.clamp(-LARGEST, LARGEST)
        normal_BA = normal_log_prob(action_BA.atanh(), self.mean_BA, self.log_std_BA)
        # a = tanh(u): log pi(a) = log N(u; mean, std) - log(1 - a^2)
        log_prob_BA = normal_BA - (1 - action_BA.square()).log()
        return zero_padding(log_prob_BA, self.mask_BA).sum(-1)

    def log_ratio(self, other: SquashedGaussian, noise_BA: Tensor) -> Tensor:
        """Return ``log pi(a) - log other(a)`` of the actions sampled from this noise, ``[B]``.

        The tanh term of both densities depends only on the action and cancels. Hence the ratio is
        that of the Gaussians at ``u``, even if ``a = tanh(u)`` is rounded to 1.
        """
        u_BA = self.mean_BA + self.log_std_BA.exp() * noise_BA
        # the noise with which the other distribution gives u: (u - m0) / s0
        other_noise_BA = (u_BA - other.mean_BA) * (-other.log_std_BA).exp()
        # -log(2 pi) / 2 cancels, too
        log_prob_BA = -0.5 * noise_BA.square() - self.log_std_BA
        other_log_prob_BA = -0.5 * other_noise_BA.square() - other.log_std_BA
        return zero_padding(log_prob_BA - other_log_prob_BA, self.mask_BA).sum(-1)

    def kl(self, other: SquashedGaussian) -> Tensor:
        """Return ``KL(self || other)``, ``[B]``.

        ``sum_A [log(s0 / s) + (s^2 + (m - m0)^2) / (2 s0^2) - 1/2]`` with the other's mean ``m0``
        and standard deviation ``s0``. This is the divergence of the Gaussians, which the invertible
        tanh does not change.
        """
        log_std_ratio_BA = self.log_std_BA - other.log_std_BA
        # (m - m0) / s0 and s^2 / s0^2
        shift_BA = (self.mean_BA - other.mean_BA) * (-other.log_std_BA).exp()
        variance_ratio_BA = (2 * log_std_ratio_BA).exp()
        kl_BA = 0.5 * (variance_ratio_BA + shift_BA.square() - 1) - log_std_ratio_BA
        return zero_padding(kl_BA, self.mask_BA).sum(-1)


class OneHotCategorical(NamedTuple):
    """Independent categorical distributions over the choices of each component of an action.

    Choices that are not the row's task's own have the probability 0, exactly.
    """

    logits_BA: Tensor
    choices: tuple[int, ...]
    """Number of choices of each component."""
    mask_BA: Tensor | None = None
    """Which choices are the row's task's own; None for all."""

    def log_probs(self) -> Tensor:
        """Return the log probability of each choice, ``[B, A]``, 0 where the mask is false."""
        logits_BA = masked(self.logits_BA.float(), self.mask_BA)
        parts = [F.log_softmax(part, -1) for part in logits_BA.split(self.choices, -1)]
        return zero_padding(torch.cat(parts, -1), self.mask_BA)

    def probs(self) -> Tensor:
        """Return the probability of each choice, ``[B, A]``."""
        return zero_padding(self.log_probs().exp(), self.mask_BA)

    def mode(self) -> Tensor:
        """Return the most probable action, ``[B, A]``."""
        return one_hot(masked(self.logits_BA, self.mask_BA), self.choices)

    def draw(self, noise_BA: Tensor) -> Tensor:
        """Return sampled actions ``[B, A]`` for standard normal noise ``[B, A]``.

        The largest ``logit + g`` is a sample for Gumbel noise ``g = -log(-log u)``, where ``u`` is
        uniform: the noise's cumulative probability.
        """
        gumbel_BA = -(-torch.special.log_ndtr(noise_BA)).log()
        return one_hot(masked(self.logits_BA + gumbel_BA, self.mask_BA), self.choices)

    def sample(self, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``[B, A]`` and log probabilities ``[B]`` for standard normal noise."""
        action_BA = self.draw(noise_BA)
        return action_BA, self.log_prob(action_BA)

    def log_prob(self, action_BA: Tensor) -> Tensor:
        """Return the log probabilities ``[B]`` of actions ``[B, A]``."""
        return (action_BA * self.log_probs()).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy ``[B]``."""
        log_prob_BA = self.log_probs()
        return -(zero_padding(log_prob_BA.exp(), self.mask_BA) * log_prob_BA).sum(-1)

    def kl(self, other: OneHotCategorical) -> Tensor:
        """Return ``KL(self || other)``, ``[B]``."""
        return (self.probs() * (self.log_probs() - other.log_probs())).sum(-1)

    def log_ratio(self, other: OneHotCategorical, noise_BA: Tensor) -> Tensor:
        """Return the expectation of ``log pi(a) - log other(a)``, ``[B]``, without the noise."""
        return self.kl(other)


def masked(score_BA: Tensor, mask_BA: Tensor | None) -> Tensor:
    """Return the scores, and the smallest number where the mask is false."""
    if mask_BA is None:
        return score_BA
    return torch.where(mask_BA, score_BA, torch.finfo(score_BA.dtype).min)


def one_hot(score_BA: Tensor, choices: Sequence[int]) -> Tensor:
    """Return 1 at the largest score of each component, and 0 elsewhere, ``[B, A]``."""
    parts = score_BA.split(tuple(choices), -1)
    hot = [F.one_hot(part.argmax(-1), part.shape[-1]) for part in parts]
    return torch.cat(hot, -1).to(score_BA.dtype)


class _NormalLogProb(torch.autograd.Function):
    """``log N(x; m, s) = -z^2 / 2 - log s - log(2 pi) / 2`` with ``z = (x - m) / s``.

    The manual backward, ``z / s`` for ``m`` and ``z^2 - 1`` for ``log s``, launches a third of the
    kernels that autograd would.
    """

    @staticmethod
    def forward(ctx: Any, value_BA: Tensor, mean_BA: Tensor, log_std_BA: Tensor) -> Tensor:
        std_BA = log_std_BA.exp()
        z_BA = (value_BA - mean_BA) / std_BA
        ctx.save_for_backward(z_BA, std_BA)
        return -HALF_LOG_2PI - torch.addcmul(log_std_BA, z_BA, z_BA, value=0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BA: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        z_BA, std_BA = ctx.saved_tensors
        # d/dm = z / s = -d/dx, and d/dlog s = z^2 - 1
        gradient_z_BA = gradient_BA * z_BA
        mean_gradient_BA = gradient_z_BA / std_BA
        value_gradient_BA = -mean_gradient_BA if ctx.needs_input_grad[0] else None
        return value_gradient_BA, mean_gradient_BA, gradient_z_BA * z_BA - gradient_BA


class _SquashedSample(torch.autograd.Function):
    """Actions ``a = tanh(u)`` for ``u = m + s noise``, and their log densities by dimension.

    ``log(1 - tanh(u)^2) = 2 (log 2 + u - softplus(2u))`` does not underflow for large ``|u|``. Its
    derivative is ``-2 tanh(u)``. The manual backward launches a third of the kernels of autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, mean_BA: Tensor, log_std_BA: Tensor, noise_BA: Tensor
    ) -> tuple[Tensor, Tensor]:
        deviation_BA = log_std_BA.exp() * noise_BA
        u_BA = mean_BA + deviation_BA
        action_BA = u_BA.tanh()
        ctx.save_for_backward(action_BA, deviation_BA)
        # -log pi = noise^2 / 2 + log s + log(2 pi) / 2 + 2 (log 2 + u - softplus(2u))
        cost_BA = torch.addcmul(log_std_BA, noise_BA, noise_BA, value=0.5)
        cost_BA = torch.add(cost_BA, u_BA, alpha=2)
        # softplus(u, beta=2) = softplus(2u) / 2
        cost_BA = torch.sub(cost_BA, F.softplus(u_BA, beta=2), alpha=4)
        return action_BA, -(HALF_LOG_2PI + 2 * math.log(2)) - cost_BA

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, action_gradient_BA: Tensor, log_prob_gradient_BA: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        action_BA, deviation_BA = ctx.saved_tensors
        # through tanh, and d log pi / du = 2 tanh(u)
        through_tanh_BA = torch.ops.aten.tanh_backward(action_gradient_BA, action_BA)
        u_gradient_BA = torch.addcmul(through_tanh_BA, log_prob_gradient_BA, action_BA, value=2)
        # u = m + exp(log s) noise: du/dm = 1 and du/dlog s = s noise; log pi itself has -log s
        log_std_gradient_BA = u_gradient_BA * deviation_BA - log_prob_gradient_BA
        return u_gradient_BA, log_std_gradient_BA, None
