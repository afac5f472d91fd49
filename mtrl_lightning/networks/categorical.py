"""The distribution of policies over discrete actions.

A discrete action is a one-hot row; one of several components is their one-hot rows side by side.

Shapes: ``B`` rows of any tasks ``[B]`` or of a learning batch ``[R, n]``, ``A`` entries of an
action, the numbers of choices of all components together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrl_lightning.networks.gaussian import zero_padding


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
