"""Multi-task soft actor-critic as a plain PyTorch loop, as in CleanRL: one file, no Lightning.

The algorithm is that of ``algorithms/sac.py`` with multi-head networks, written as one would write
it without thinking of speed, so that what the framework costs and what its shortcuts gain can be
measured. With the same weights, batch and noise both give the same losses, which a test holds.

Shapes: ``T`` tasks, ``B = T * n`` batch, ``D`` observation with the task's one-hot, ``A`` action,
``E`` environments.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sizes(NamedTuple):
    """Sizes of the networks and of the batch."""

    observation_dim: int
    """Without the one-hot."""
    action_dim: int
    num_tasks: int
    batch_size: int
    width: int = 400
    depth: int = 3


class Hyperparameters(NamedTuple):
    """Of the algorithm; the defaults are those of ``experiment/mtmhsac``."""

    learning_rate: float = 3e-4
    """Of actor, critics and temperatures."""
    epsilon: float = 1e-5
    """Adam's."""
    discount: float = 0.99
    tau: float = 0.005
    """Share of the critics in their targets at each update."""
    temperature: float = 1.0
    """Of each task, before the first update."""


class MultiHeadMLP(nn.Module):
    """Shared hidden layers and one output layer per task.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer.
        depth: number of hidden layers.
    """

    def __init__(self, in_dim: int, out_dim: int, num_tasks: int, width: int, depth: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        self.out_dim = out_dim
        layers: list[nn.Module] = []
        for i in range(depth):
            layers += [nn.Linear(in_dim if i == 0 else width, width), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.Linear(width, num_tasks * out_dim)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        y_BTO = self.heads(self.trunk(x_BD)).view(-1, self.num_tasks, self.out_dim)
        return y_BTO[torch.arange(len(task_B), device=task_B.device), task_B]


class PlainSAC:
    """Networks, optimizers and one update.

    Args:
        sizes: of the networks.
        device: where they are.
        bf16: whether matrix products are made in bfloat16.
        seed: of the noise.
        hyperparameters: of the algorithm.
    """

    max_norm = 1.0

    def __init__(
        self,
        sizes: Sizes,
        device: str = "cpu",
        bf16: bool = False,
        seed: int = 0,
        hyperparameters: Hyperparameters | None = None,
    ) -> None:
        chosen = hyperparameters or Hyperparameters()
        adam = partial(torch.optim.Adam, lr=chosen.learning_rate, eps=chosen.epsilon)
        self.discount = chosen.discount
        self.tau = chosen.tau
        D = sizes.observation_dim + sizes.num_tasks
        A = sizes.action_dim
        T = sizes.num_tasks
        shape = (T, sizes.width, sizes.depth)
        self.num_tasks = T
        self.target_entropy = -float(A)
        self.device = device
        self._bf16 = bf16
        self.actor = MultiHeadMLP(D, 2 * A, *shape).to(device)
        self.qf1, self.qf2 = (MultiHeadMLP(D + A, 1, *shape).to(device) for _ in range(2))
        self.qf1_target = copy.deepcopy(self.qf1)
        self.qf2_target = copy.deepcopy(self.qf2)
        self.log_alpha_T = torch.full(
            (T,), math.log(chosen.temperature), requires_grad=True, device=device
        )
        self.q_optimizer = adam([*self.qf1.parameters(), *self.qf2.parameters()])
        self.actor_optimizer = adam(self.actor.parameters())
        self.alpha_optimizer = adam([self.log_alpha_T])
        self.generator = torch.Generator(device).manual_seed(seed)

    def sample_action(self, x_BD: Tensor, task_B: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions ``[B, A]`` and return them with their log densities ``[B]``."""
        mean_BA, log_std_BA = self.actor(x_BD, task_B).float().chunk(2, dim=-1)
        log_std_BA = log_std_BA.clamp(-20, 2)
        noise_BA = torch.randn(mean_BA.shape, generator=self.generator, device=self.device)
        u_BA = mean_BA + log_std_BA.exp() * noise_BA
        normal_BA = -0.5 * noise_BA.square() - log_std_BA - 0.5 * math.log(2 * math.pi)
        squash_BA = 2 * (math.log(2) - u_BA - F.softplus(-2 * u_BA))
        return torch.tanh(u_BA), (normal_BA - squash_BA).sum(-1)

    @torch.no_grad()
    def act(self, observation_ED: npt.NDArray, task_E: Tensor) -> npt.NDArray[np.float32]:
        """Sample actions ``[E, A]`` for observations that have the one-hot already."""
        x_ED = torch.as_tensor(observation_ED, dtype=torch.float32, device=self.device)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._bf16):
            return self.sample_action(x_ED, task_E)[0].cpu().numpy()

    @torch.no_grad()
    def act_best(self, observation_ED: npt.NDArray, task_E: Tensor) -> npt.NDArray[np.float32]:
        """Return the actions ``[E, A]`` without noise, for observations with the one-hot."""
        x_ED = torch.as_tensor(observation_ED, dtype=torch.float32, device=self.device)
        mean_EA, _ = self.actor(x_ED, task_E).float().chunk(2, dim=-1)
        return torch.tanh(mean_EA).cpu().numpy()

    def update(self, batch: PlainBatch) -> dict[str, Tensor]:
        """Make one update of critics, actor, temperatures and targets; return the losses."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._bf16):
            return {**self._update_critic(batch), **self._update_actor(batch)}

    def _update_critic(self, batch: PlainBatch) -> dict[str, Tensor]:
        task_B = batch.task_B
        with torch.no_grad():
            alpha_B = self.log_alpha_T.exp()[task_B]
            next_action_BA, next_log_prob_B = self.sample_action(batch.next_observation_BD, task_B)
            next_x = torch.cat([batch.next_observation_BD, next_action_BA], 1)
            next_q1_B = self.qf1_target(next_x, task_B).float().squeeze(-1)
            next_q2_B = self.qf2_target(next_x, task_B).float().squeeze(-1)
            next_value_B = torch.min(next_q1_B, next_q2_B) - alpha_B * next_log_prob_B
            target_B = batch.reward_B + self.discount * (~batch.terminated_B).float() * next_value_B
        x = torch.cat([batch.observation_BD, batch.action_BA], 1)
        q1_B = self.qf1(x, task_B).float().squeeze(-1)
        q2_B = self.qf2(x, task_B).float().squeeze(-1)
        loss = F.mse_loss(q1_B, target_B) + F.mse_loss(q2_B, target_B)
        self.q_optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            [*self.qf1.parameters(), *self.qf2.parameters()], self.max_norm
        )
        self.q_optimizer.step()
        return {"critic_loss": loss.detach(), "critic_grad_norm": norm}

    def _update_actor(self, batch: PlainBatch) -> dict[str, Tensor]:
        task_B = batch.task_B
        action_BA, log_prob_B = self.sample_action(batch.observation_BD, task_B)
        x = torch.cat([batch.observation_BD, action_BA], 1)
        q_B = torch.min(
            self.qf1(x, task_B).float().squeeze(-1), self.qf2(x, task_B).float().squeeze(-1)
        )
        loss = (self.log_alpha_T.detach().exp()[task_B] * log_prob_B - q_B).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.actor.parameters(), self.max_norm)
        self.actor_optimizer.step()

        alpha_loss = (
            -self.log_alpha_T[task_B] * (log_prob_B.detach() + self.target_entropy)
        ).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        for source, target in ((self.qf1, self.qf1_target), (self.qf2, self.qf2_target)):
            for parameter, copied in zip(source.parameters(), target.parameters(), strict=True):
                copied.data.copy_(self.tau * parameter.data + (1 - self.tau) * copied.data)
        return {
            "actor_loss": loss.detach(),
            "actor_grad_norm": norm,
            "temperature_loss": alpha_loss.detach(),
        }


class PlainBatch(NamedTuple):
    """A batch with the one-hot among the observations, ``B`` rows of all tasks."""

    observation_BD: Tensor
    action_BA: Tensor
    reward_B: Tensor
    next_observation_BD: Tensor
    terminated_B: Tensor
    task_B: Tensor


class PlainReplay:
    """A ring of transitions for each environment, in NumPy.

    Args:
        num_envs: environments, ``E``.
        observation_dim: with the one-hot, ``D``.
        action_dim: ``A``.
        capacity: transitions over all environments.
        seed: of the sampling.
        envs_per_task: environments of each task, which follow one another.
    """

    def __init__(
        self,
        num_envs: int,
        observation_dim: int,
        action_dim: int,
        capacity: int,
        seed: int = 0,
        envs_per_task: int = 1,
    ) -> None:
        self._rows = capacity // num_envs
        shape = (self._rows, num_envs)
        self._rings = (
            np.zeros((*shape, observation_dim), np.float32),
            np.zeros((*shape, action_dim), np.float32),
            np.zeros(shape, np.float32),
            np.zeros((*shape, observation_dim), np.float32),
            np.zeros(shape, np.bool_),
        )
        self._envs_per_task = envs_per_task
        self._num_tasks = num_envs // envs_per_task
        self._added = 0
        self._generator = np.random.default_rng(seed)

    def add(self, *fields: npt.NDArray) -> None:
        """Store observation, action, reward, next observation, termination of each environment."""
        row = self._added % self._rows
        for ring, field in zip(self._rings, fields, strict=True):
            ring[row] = field
        self._added += 1

    def sample(self, batch_size: int, device: str = "cpu") -> PlainBatch:
        """Sample the same number of transitions of every task."""
        n = batch_size // self._num_tasks
        task = np.repeat(np.arange(self._num_tasks), n)
        row = self._generator.integers(0, min(self._added, self._rows), len(task))
        copy_B = self._generator.integers(0, self._envs_per_task, len(task))
        env = task * self._envs_per_task + copy_B
        columns = (*(ring[row, env] for ring in self._rings), task)
        tensors = (torch.as_tensor(column, device=device) for column in columns)
        return PlainBatch(*tensors)  # type: ignore[arg-type]
