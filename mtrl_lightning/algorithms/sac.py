"""Multi-task soft actor-critic.

Shapes: ``T`` tasks, ``R`` trained tasks, ``n`` rows of a task in a batch, ``B`` rows of any tasks
or ``R, n``, ``D`` observation, ``Z`` features, ``A`` action, ``Q`` critics, ``O`` outputs of a
critic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Adam

from mtrl_lightning.algorithms import losses
from mtrl_lightning.algorithms.actor_critic import ActorCritic
from mtrl_lightning.algorithms.losses import CriticTarget
from mtrl_lightning.checks import increasing
from mtrl_lightning.networks import OneHotCategorical, SquashedGaussian
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.update import Update
from mtrl_lightning.updates.weighting import Temperature

Policy: TypeAlias = SquashedGaussian | OneHotCategorical
DISCRETE_ENTROPY = 0.98
"""Target of the entropy of discrete actions, as a fraction of the largest (Christodoulou 2019)."""


class SAC(ActorCritic):
    """Multi-task soft actor-critic; the defaults are MetaWorld+'s (McLean et al. 2025).

    Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905); with
    discrete actions, Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings" (arXiv
    1910.07207). The value of an action of several components is the sum of theirs.

    Args:
        spec: the tasks; filled in from the data.
        temperature: weight of the entropy, learned or fixed.
        target_entropy: target entropy of every task; None for minus the number of the task's own
            action dimensions, or, for discrete actions, 0.98 of the largest entropy.
        log_std_min: lower clamp of the policy's log standard deviation.
        log_std_max: upper clamp of the policy's log standard deviation.
        temperature_optimizer: optimizer of the temperature.
        options: arguments of ``ActorCritic`` and ``Algorithm``.
    """

    outputs_per_action = 2
    target_entropy_T: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        temperature: Callable[[EnvSpec], Temperature] = Temperature,
        target_entropy: float | None = None,
        log_std_min: float = -20.0,
        log_std_max: float = 2.0,
        temperature_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        **options: Any,
    ) -> None:
        increasing(log_std_min=log_std_min, log_std_max=log_std_max)
        super().__init__(spec, **options)
        self._log_std_min = log_std_min
        self._log_std_max = log_std_max
        self.temperature = temperature(spec)
        self.task_weighting.check(self.temperature)
        if target_entropy is None and spec.is_discrete:
            own_TA = torch.from_numpy(spec.action_mask_TA)
            parts = own_TA.split(spec.action_choices, 1)
            uniform_T = torch.stack([part.sum(1).log() for part in parts]).sum(0)
            target_entropy_T = DISCRETE_ENTROPY * uniform_T
        elif target_entropy is None:
            target_entropy_T = -torch.from_numpy(spec.action_mask_TA.sum(1)).float()
        else:
            target_entropy_T = torch.full((spec.num_tasks,), float(target_entropy))
        self.register_buffer("target_entropy_T", target_entropy_T, persistent=False)
        self.transforms.quantities["temperature_T"] = self.temperature.values
        self.transforms.quantities["target_entropy_T"] = lambda: self.target_entropy_T
        self.temperature_update: Update | None = None
        if self.temperature.is_learned:
            self.temperature_update = self.make_update(
                "temperature", [self.temperature], temperature_optimizer
            )

    def update_policy(self, batch: TransitionBatch) -> None:
        """Update the actor and then the temperature, from a transformed batch."""
        noise_RnA = self.generators.normal_like("learn", batch.action_RnA)
        # the temperature loss uses the log densities from before the actor's step
        log_prob_Rn = self.actor_update(lambda: self._actor_loss(batch, noise_RnA))
        if self.temperature_update is not None:
            self.temperature_update(lambda: self.temperature_loss(log_prob_Rn, batch.task_Rn))
        self.mean_metrics.add({"entropy": -log_prob_Rn.mean()})

    @torch.no_grad()
    def critic_target(self, batch: TransitionBatch, noise_RnA: Tensor) -> CriticTarget:
        """Return the bootstrap of the critics' loss, for the policy's next actions."""
        # a' = tanh(mu + std noise) of the current policy at s'
        policy = self.policy(batch.next_observation_RnD, batch.task_Rn)
        action_RnA, log_prob_Rn = evaluated_actions(policy, noise_RnA)
        cost_Rn = self.action_cost(
            policy, noise_RnA, log_prob_Rn, batch.next_observation_RnD, batch.task_Rn
        )
        # soft value of s': Q'(s', a') - alpha log pi(a' | s')
        return CriticTarget(self.target_outputs(batch, action_RnA), cost_Rn)

    def action_cost(
        self,
        policy: Policy,
        noise_RnA: Tensor,
        log_prob_Rn: Tensor,
        observation_RnD: Tensor,
        task_Rn: Tensor,
    ) -> Tensor:
        """Return the cost of the policy's actions, ``alpha log pi``, ``[R, n]``.

        The critics' targets and the actor loss subtract it from the Q values.

        Args:
            policy: distribution over actions for the observations.
            noise_RnA: noise from which the actions were sampled.
            log_prob_Rn: log densities of the actions.
            observation_RnD: observations.
            task_Rn: tasks.
        """
        with torch.no_grad():
            # alpha is constant here: it has its own loss
            alpha_R1 = self.temperature(task_Rn[:, :1]).exp()
        return alpha_R1 * log_prob_Rn

    def actor_loss(self, batch: TransitionBatch, noise_RnA: Tensor) -> tuple[Tensor, Tensor]:
        """Return each task's actor loss ``[R]``, and the actions' log densities ``[R, n]``."""
        output_Rn2A, z_RnZ = self.actor_outputs(batch)
        policy = self.distribution(output_Rn2A, batch.task_Rn)
        # reparameterized: the gradient flows through the action
        action_RnA, log_prob_Rn = evaluated_actions(policy, noise_RnA)
        cost_Rn = self.action_cost(
            policy, noise_RnA, log_prob_Rn, batch.observation_RnD, batch.task_Rn
        )
        q_QRn = self.value.q(self.critic_outputs_of(z_RnZ, action_RnA, batch.task_Rn))
        return losses.actor_loss(cost_Rn, q_QRn), log_prob_Rn.detach()

    def temperature_loss(self, log_prob_Rn: Tensor, task_Rn: Tensor) -> tuple[Tensor, None]:
        """Return each task's temperature loss ``[R]``."""
        log_alpha_Rn = self.temperature(task_Rn)
        target_entropy_R1 = task_values(self.target_entropy_T, task_Rn[:, :1])
        loss_R = losses.temperature_loss(log_alpha_Rn, log_prob_Rn, target_entropy_R1)
        return loss_R, None

    def log_temperatures(self) -> Tensor:
        """Return the trained tasks' log temperatures ``[R]``."""
        return self.temperature(self._task_R)

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> Policy:
        """Return the distribution over actions."""
        output_B2A = self.actor(self.encoder.shared_features(observation_BD, task_B), task_B)
        return self.distribution(output_B2A, task_B)

    def distribution(self, output_BO: Tensor, task_B: Tensor) -> Policy:
        """Return the Gaussian whose mean and log std are the actor's outputs, squashed by tanh.

        For discrete actions, the outputs are logits.
        """
        if self.spec.is_discrete:
            return OneHotCategorical(output_BO, self.spec.action_choices, self.action_mask(task_B))
        return SquashedGaussian.from_network(
            output_BO, self._log_std_min, self._log_std_max, self.action_mask(task_B)
        )

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics since the last call, and the current temperatures."""
        metrics = super().drain_metrics()
        if not metrics or not self.temperature.is_learned:
            return metrics
        alphas = self.temperature.values().tolist()
        for task in self.spec.train_tasks:
            metrics[f"train/temperature/{self.spec.task_names[task]}"] = alphas[task]
        return metrics


def evaluated_actions(policy: Policy, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the critics evaluate: sampled actions ``[B, A]`` and log densities ``[B]``.

    Of discrete actions, these are the probabilities and the expected log probability: expectations
    over the policy take the place of samples (Christodoulou 2019).
    """
    if isinstance(policy, OneHotCategorical):
        return policy.probs(), -policy.entropy()
    return policy.sample(noise_BA)
