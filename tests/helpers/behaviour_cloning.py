"""A second algorithm, to show what one takes: its losses and the order of its updates."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning.algorithms import Algorithm, RewardScale
from mtrl_lightning.gradients import GradientMethod, Mean
from mtrl_lightning.networks import (
    MLP,
    Encoder,
    Identity,
    Network,
    SquashedGaussian,
    zero_padding,
)
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch

LARGEST = 1 - 1e-4
"""Actions are clamped to this magnitude: the density of -1 and 1 is infinite."""


def negative_log_likelihood(policy: SquashedGaussian, action_RnA: Tensor) -> Tensor:
    """Return each task's mean ``-log pi(a)`` of the batch's actions, ``[R]``."""
    action_RnA = action_RnA.clamp(-LARGEST, LARGEST)
    noise_RnA = (action_RnA.atanh() - policy.mean_BA) / policy.log_std_BA.exp()
    normal_RnA = -0.5 * noise_RnA.square() - policy.log_std_BA - 0.5 * math.log(2 * math.pi)
    log_prob_RnA = normal_RnA - (1 - action_RnA.square()).log()
    log_prob_Rn = zero_padding(log_prob_RnA, policy.mask_BA).sum(-1)
    return -log_prob_Rn.mean(1)


class BehaviourCloning(Algorithm):
    """Imitate the actions in the replay.

    Args:
        spec: the tasks.
        actor: network of the policy.
        encoder: maps observations to what the actor sees; trained with it.
        gradient: how the tasks' losses become one gradient.
        reward_scale: has no effect on the loss.
        optimizer: of the actor and the encoder.
        max_grad_norm: global norm to which the gradient is clipped.
        seed: of the weights and of all draws.
    """

    encoder: Encoder
    actor: Network
    gradient: GradientMethod

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, EnvSpec], Network] = MLP,
        encoder: Callable[[EnvSpec], Encoder] = Identity,
        gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        reward_scale: Callable[[EnvSpec], RewardScale] = RewardScale,
        optimizer: OptimizerCallable = lambda p: Adam(p, lr=1e-3),
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(spec, seed)
        self._make_actor = actor
        self._make_encoder = encoder
        self._make_gradient = gradient
        self.add_networks()
        self.add_transform(reward_scale(spec))
        self.actor_update = self.make_update(
            "actor",
            [self.encoder, self.actor],
            optimizer,
            method=self.gradient,
            max_grad_norm=max_grad_norm,
        )

    def make_networks(self) -> dict[str, nn.Module]:
        encoder = self._make_encoder(self.spec)
        sizes = (encoder.out_dim, 2 * self.action_dim, self.spec)
        return {
            "encoder": encoder,
            "actor": self._make_actor(*sizes),
            "gradient": self._make_gradient(self.spec),
        }

    def update(self, batch: TransitionBatch) -> None:
        batch = self.transform(batch)
        self.encoder.observe(batch.observation_RnD, batch.task_Rn)
        self.actor_update(lambda: self.actor_loss(batch))

    def actor_loss(self, batch: TransitionBatch) -> tuple[Tensor, None]:
        policy = self.policy(batch.observation_RnD, batch.task_Rn)
        return negative_log_likelihood(policy, batch.action_RnA), None

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> SquashedGaussian:
        output_B2A = self.actor(self.encoder(observation_BD, task_B), task_B)
        return SquashedGaussian.from_network(output_B2A, -5.0, 2.0, self.action_mask(task_B))
