"""Two tasks with one observation and one action, whose update can be written down.

``B`` are the rows of the batch, two of each task.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributions import Normal
from torch.optim import SGD

from mtrl_lightning.networks import Encoder, Network, TaskAxis
from mtrl_lightning.transitions import TransitionBatch
from tests.helpers.algorithms import attach, make_spec

BATCH = TransitionBatch(
    observation_RnD=torch.tensor([[[0.5], [-1.0]], [[2.0], [0.3]]]),
    action_RnA=torch.tensor([[[0.1], [-0.4]], [[0.9], [0.6]]]),
    reward_Rn=torch.tensor([[1.0, -0.5], [2.0, 0.25]]),
    next_observation_RnD=torch.tensor([[[0.7], [-0.8]], [[1.5], [-0.2]]]),
    terminated_Rn=torch.tensor([[False, True], [False, False]]),
    task_Rn=torch.tensor([[0, 0], [1, 1]]),
)
LEARNING_RATE, DISCOUNT, TAU, ENCODER_TAU = 0.1, 0.9, 0.25, 0.5
M, S, C, K = [0.2, -0.6], [-0.5, 0.1], 0.3, 1.5
TARGET_K = 0.8
CRITICS = [[0.4, -0.8, 0.1], [0.3, 1.2, -0.2]]
TARGET_CRITICS = [[0.7, -0.3, 0.5], [-0.2, 0.9, 1.1]]


class HandActor(Network):
    """Outputs ``M[task] + C z`` and, if there are two, ``S[task]``."""

    def __init__(self, in_dim, out_dim, spec) -> None:
        super().__init__()
        self.m, self.c = nn.Parameter(torch.tensor(M)), nn.Parameter(torch.tensor(C))
        self.s = nn.Parameter(torch.tensor(S)) if out_dim == 2 else None

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        outputs = [self.m[task_B] + self.c * x_BD[..., 0]]
        if self.s is not None:
            outputs.append(self.s[task_B])
        return torch.stack(outputs, dim=-1)

    def task_axes(self):
        return {name: TaskAxis() for name, _ in self.named_parameters() if name != "c"}


class HandCritic(Network):
    """``w0 z + w1 a + w2``."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weights))

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return (x_BD @ self.w[:2] + self.w[2])[..., None]


class HandEncoder(Encoder):
    """``z = K s``."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.out_dim = 1
        self.k = nn.Parameter(torch.tensor(K))

    def forward(self, observation_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.k * observation_BD


def by_hand(make, **options):
    """Return an algorithm with these networks and targets, and plain gradient descent."""
    weights = iter(CRITICS)
    sgd = partial(SGD, lr=LEARNING_RATE)
    given = {
        "actor": HandActor,
        "critic": lambda *sizes: HandCritic(next(weights)),
        "encoder": HandEncoder,
        "discount": DISCOUNT,
        "tau": TAU,
        "encoder_tau": ENCODER_TAU,
        "actor_max_grad_norm": None,
        "critic_max_grad_norm": None,
        "actor_optimizer": sgd,
        "critic_optimizer": sgd,
    }
    algorithm = make(make_spec(2, obs_dim=1, action_dim=1), **{**given, **options})
    with torch.no_grad():
        algorithm.target_encoder.k.fill_(TARGET_K)
        for member, weight in zip(algorithm.target_critic.members, TARGET_CRITICS, strict=True):
            member.w.copy_(torch.tensor(weight))
    attach(algorithm)
    return algorithm


def numbers(*values):
    """Return trainable tensors in double precision."""
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def rows():
    """Return the columns of the batch in double precision, its four rows one after another."""
    columns = [column.flatten() for column in BATCH[:6]]
    return [c.double() if c.is_floating_point() else c for c in columns]


def q_values(w, z, action):
    """Return the values of critics ``[Q, B]``."""
    return w[:, :1] * z + w[:, 1:2] * action + w[:, 2:]


def task_means(x_B):
    return x_B.view(2, 2).mean(1)


def descend(loss, *parameters):
    """Return the parameters after a step of gradient descent, and the norm of the gradient."""
    gradients = torch.autograd.grad(loss, parameters)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    moved = [p.detach() - LEARNING_RATE * g for p, g in zip(parameters, gradients, strict=True)]
    return [p.requires_grad_() for p in moved], norm


def squashed(mean, log_std, noise):
    """Return actions ``tanh(mean + std noise)`` and their log densities."""
    normal = Normal(mean, log_std.exp())
    u = normal.mean + normal.stddev * noise
    action = u.tanh()
    return action, normal.log_prob(u) - torch.log(1 - action**2)
