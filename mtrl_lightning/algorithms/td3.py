"""Multi-task TD3: a deterministic policy, clipped double Q-learning and smoothed target actions.

Shapes: ``R`` trained tasks, ``n`` rows of a task in a batch, ``B`` rows of any tasks or ``R, n``,
``D`` observation, ``A`` action, ``Q`` critics, ``O`` outputs of a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtrl_lightning.algorithms import losses
from mtrl_lightning.algorithms.actor_critic import ActorCritic
from mtrl_lightning.algorithms.losses import CriticTarget
from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import ActionDistribution, ClippedGaussian, zero_padding
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.targets import frozen_copy


class TD3(ActorCritic):
    """Multi-task twin delayed deterministic policy gradient (Fujimoto et al. 2018).

    arXiv 1802.09477, with exploration as in FastTD3 (Seo et al. 2025, arXiv 2505.22642): every
    environment has its own standard deviation. Here they are evenly spaced over a task's
    environments, while FastTD3 samples one per episode. The critics bootstrap from the minimum of
    the target critics (clipped double Q), or with ``value`` ``Scalar(reduction="mean")`` from their
    mean.

    Args:
        spec: the tasks; filled in from the data.
        exploration_std_min: smallest standard deviation of the exploration noise, at least 0; 0.1
            in TD3, 0.001 in FastTD3.
        exploration_std_max: largest standard deviation of the exploration noise; 0.1 in TD3, 0.4 in
            FastTD3. A task with a single environment uses the mean of both.
        target_std: standard deviation of the noise on the target policy's actions, at least 0; 0.2
            in TD3, 0.001 in FastTD3.
        target_clip: largest magnitude of that noise, at least 0; 0.5 in both papers.
        actor_every: critic updates per actor update, at least 1; 2 in both papers.
        target_every: critic updates per target update, at least 1; 2 in TD3, 1 in FastTD3.
        options: arguments of ``ActorCritic`` and ``Algorithm``.
    """

    outputs_per_action = 1

    def __init__(
        self,
        spec: EnvSpec,
        *,
        exploration_std_min: float = 0.1,
        exploration_std_max: float = 0.1,
        target_std: float = 0.2,
        target_clip: float = 0.5,
        actor_every: int = 2,
        target_every: int = 2,
        **options: Any,
    ) -> None:
        at_least(0, finite=True, exploration_std_min=exploration_std_min)
        at_least(exploration_std_min, finite=True, exploration_std_max=exploration_std_max)
        at_least(0, finite=True, target_std=target_std, target_clip=target_clip)
        if spec.is_discrete:
            raise ConfigurationError(
                "TD3 takes continuous actions, and these are discrete: choose SAC, PPO or"
                " BehaviourCloning"
            )
        super().__init__(spec, actor_every=actor_every, target_every=target_every, **options)
        self.task_weighting.check(None)
        self._exploration_std = (exploration_std_min, exploration_std_max)
        self._target_std = target_std
        self._target_clip = target_clip
        self._std_E = torch.zeros(0)
        """Standard deviation in each of this process' training environments, empty if none."""
        self.target_actor = frozen_copy(self.actor)
        self.targets.add(self.actor, self.target_actor, self.tau)

    def begin_exploring(self, tasks: Sequence[int], envs: Sequence[int]) -> None:
        """Space the standard deviations over each task's environments of all processes."""
        self._std_E = spread_over_environments(torch.tensor(tasks), *self._exploration_std)[envs]

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> ClippedGaussian:
        """Return a Gaussian of the deterministic actions and the exploration noise."""
        output_BA = self.actor(self.encoder.shared_features(observation_BD, task_B), task_B)
        action_BA = self.squashed(output_BA, task_B)
        if task_B.numel() == len(self._std_E):  # a step of the training environments
            self._std_E = self._std_E.to(task_B.device)
            std_B = self._std_E.view(task_B.shape)
        else:
            std_B = spread_over_environments(task_B, *self._exploration_std)
        log_std_BA = std_B.log()[..., None].expand_as(action_BA)
        return ClippedGaussian(action_BA, log_std_BA, self.action_mask(task_B))

    def explore(
        self, policy: ActionDistribution, noise_BA: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``clip(pi(s) + std eps, -1, 1)``, ``[B, A]``."""
        assert isinstance(policy, ClippedGaussian)
        return policy.draw(noise_BA).clamp(-1, 1), {}

    def squashed(self, output_BA: Tensor, task_B: Tensor) -> Tensor:
        """Return the actions ``tanh`` of the actor's outputs, 0 in padding, ``[B, A]``."""
        return zero_padding(output_BA.float().tanh(), self.action_mask(task_B))

    @torch.no_grad()
    def critic_target(self, batch: TransitionBatch, noise_RnA: Tensor) -> CriticTarget:
        """Return the target critics' outputs for the target policy's smoothed next actions."""
        shared_RnF = self.target_encoder.shared_features(batch.next_observation_RnD, batch.task_Rn)
        action_RnA = self.squashed(self.target_actor(shared_RnF, batch.task_Rn), batch.task_Rn)
        # target policy smoothing: a' = clip(pi'(s') + clip(std noise, -c, c), -1, 1)
        smoothed_RnA = losses.smoothed_action(
            action_RnA, noise_RnA, self._target_std, self._target_clip
        )
        next_action_RnA = zero_padding(smoothed_RnA, self.action_mask(batch.task_Rn))
        output_QRnO = self.target_outputs(batch, next_action_RnA)
        # a deterministic policy has no entropy, so the actions have no cost
        return CriticTarget(output_QRnO, torch.zeros_like(batch.reward_Rn))

    def actor_loss(self, batch: TransitionBatch) -> tuple[Tensor, None]:
        """Return each task's actor loss ``[R]``, from the first critic."""
        output_RnA, z_RnZ = self.actor_outputs(batch)
        action_RnA = self.squashed(output_RnA, batch.task_Rn)
        output_QRnO = self.critic_outputs_of(z_RnZ, action_RnA, batch.task_Rn)
        # the gradient is that of the first critic, not of the minimum
        q_1Rn = self.value.q(output_QRnO[:1])
        return losses.deterministic_actor_loss(q_1Rn[0]), None

    def update_policy(self, batch: TransitionBatch) -> None:
        """Update the actor, from a transformed batch."""
        self.actor_update(lambda: self._actor_loss(batch))


def spread_over_environments(task_B: Tensor, low: float, high: float) -> Tensor:
    """Return a number for each environment, evenly spaced from low to high in each task, ``[B]``.

    A task with a single environment gets the mean of both.

    Args:
        task_B: the environments' tasks.
        low: value of each task's first environment.
        high: value of each task's last environment.
    """
    task_E = task_B.flatten()
    is_same_EE = task_E[:, None] == task_E
    index_E = is_same_EE.long().tril(-1).sum(1)
    last_E = is_same_EE.sum(1) - 1
    fraction_E = torch.where(last_E > 0, index_E / last_E.clamp(min=1), 0.5)
    return (low + (high - low) * fraction_E).view(task_B.shape)
