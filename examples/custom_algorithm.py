"""A custom algorithm: multi-task DDPG (Lillicrap et al. 2016, arXiv 1509.02971).

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or ``R, n``, ``D``
observation, ``A`` action.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning import Algorithm, EnvSpec, ToyReach, train
from mtrl_lightning.gradients import GradientMethod, Mean
from mtrl_lightning.networks import MLP, Network, zero_padding
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.targets import PolyakAverage, frozen_copy


class NoisyAction(NamedTuple):
    """A deterministic action, with Gaussian noise when the policy explores."""

    action_BA: Tensor
    noise_std: float

    def mode(self) -> Tensor:
        """Return the action without noise, ``[B, A]``."""
        return self.action_BA

    def sample(self, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return noisy actions for standard normal noise, and zeros as unused log densities."""
        action_BA = (self.action_BA + self.noise_std * noise_BA).clamp(-1.0, 1.0)
        return action_BA, action_BA.new_zeros(action_BA.shape[:-1])


class DDPG(Algorithm):
    """Multi-task deep deterministic policy gradient.

    Args:
        spec: the tasks; filled in from the data.
        actor: network of the policy, ``(in_dim, out_dim, spec) -> Network``.
        critic: network of the Q function, likewise.
        gradient: gradient method of the actor and of the critic.
        discount: gamma, between 0 and 1.
        tau: Polyak factor of the target networks, above 0 and at most 1.
        noise_std: standard deviation of the exploration noise.
        optimizer: optimizer of the actor and of the critic.
        seed: of the weights and of all random numbers.
    """

    actor: Network
    critic: Network
    actor_gradient: GradientMethod
    critic_gradient: GradientMethod

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, EnvSpec], Network] = MLP,
        critic: Callable[[int, int, EnvSpec], Network] = MLP,
        gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        discount: float = 0.99,
        tau: float = 0.005,
        noise_std: float = 0.2,
        optimizer: OptimizerCallable = lambda p: Adam(p, lr=1e-3),
        seed: int = 0,
    ) -> None:
        super().__init__(spec, seed)
        self.discount = discount
        self.noise_std = noise_std
        self._make_actor = actor
        self._make_critic = critic
        self._make_gradient = gradient
        self.add_networks()
        self.target_actor = frozen_copy(self.actor)
        self.target_critic = frozen_copy(self.critic)
        self.targets = PolyakAverage(
            [self.actor, self.critic], [self.target_actor, self.target_critic], tau
        )
        self.critic_update = self.make_update(
            "critic", [self.critic], optimizer, method=self.critic_gradient
        )
        self.actor_update = self.make_update(
            "actor",
            [self.actor],
            optimizer,
            method=self.actor_gradient,
            frozen=list(self.critic.parameters()),
        )

    def make_networks(self) -> dict[str, nn.Module]:
        """Build the networks and gradient methods that a reset reinitializes."""
        (observation_dim,) = self.spec.observation_space.shape
        return {
            "actor": self._make_actor(observation_dim, self.action_dim, self.spec),
            "critic": self._make_critic(observation_dim + self.action_dim, 1, self.spec),
            "actor_gradient": self._make_gradient(self.spec),
            "critic_gradient": self._make_gradient(self.spec),
        }

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> NoisyAction:
        """Return the policy's actions."""
        return NoisyAction(self.action(self.actor, observation_BD, task_B), self.noise_std)

    def action(self, actor: Network, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return an actor's actions, ``[B, A]``; dimensions that the task does not have are 0."""
        action_BA = actor(observation_BD, task_B).float().tanh()
        return zero_padding(action_BA, self.action_mask(task_B))

    def update(self, batch: TransitionBatch) -> None:
        """Update the critic, the actor and the targets."""
        batch = self.transforms(batch)
        target_Rn = self.critic_target(batch)
        self.critic_update(lambda: self.critic_loss(batch, target_Rn))
        self.actor_update(lambda: self.actor_loss(batch))
        self.targets.step()

    @torch.no_grad()
    def critic_target(self, batch: TransitionBatch) -> Tensor:
        """Return ``r + discount (1 - terminated) Q'(s', mu'(s'))``, ``[R, n]``."""
        next_RnD = batch.next_observation_RnD
        next_action_RnA = self.action(self.target_actor, next_RnD, batch.task_Rn)
        next_q_Rn = self.q(self.target_critic, next_RnD, next_action_RnA, batch.task_Rn)
        return batch.reward_Rn + self.discount * torch.where(batch.terminated_Rn, 0.0, next_q_Rn)

    def critic_loss(self, batch: TransitionBatch, target_Rn: Tensor) -> tuple[Tensor, None]:
        """Return each task's ``mean (Q(s, a) - y)^2``, ``[R]``."""
        q_Rn = self.q(self.critic, batch.observation_RnD, batch.action_RnA, batch.task_Rn)
        return (q_Rn - target_Rn).square().mean(1), None

    def actor_loss(self, batch: TransitionBatch) -> tuple[Tensor, None]:
        """Return each task's ``mean -Q(s, mu(s))``, ``[R]``."""
        action_RnA = self.policy(batch.observation_RnD, batch.task_Rn).mode()
        q_Rn = self.q(self.critic, batch.observation_RnD, action_RnA, batch.task_Rn)
        return (-q_Rn).mean(1), None

    def q(
        self, critic: Network, observation_RnD: Tensor, action_RnA: Tensor, task_Rn: Tensor
    ) -> Tensor:
        """Return the Q values, ``[R, n]``."""
        x_RnD = torch.cat([observation_RnD, action_RnA], dim=-1)
        return critic(x_RnD, task_Rn).float().squeeze(-1)


if __name__ == "__main__":
    small = partial(MLP, width=64, depth=2)
    agent = partial(DDPG, actor=small, critic=small)
    run = train(
        ToyReach(), agent, total_steps=6_000, data={"batch_size": 96}, num_workers=0, name="ddpg"
    )
    print(run.evaluation["eval/success"])
