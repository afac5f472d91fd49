"""SAC with networks whose numbers are worked out by hand."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from mtrl_lightning.auxiliaries import Auxiliary, LossInputs
from mtrl_lightning.networks import Encoder, MultiHead, Network, TaskConditioning
from mtrl_lightning.transitions import TransitionBatch
from tests.helpers.algorithms import (
    make_batch,
)

BATCH = TransitionBatch(
    observation_RnD=torch.tensor([[[0.5], [-1.0]], [[2.0], [0.3]]]),
    action_RnA=torch.tensor([[[0.1], [-0.4]], [[0.9], [0.6]]]),
    reward_Rn=torch.tensor([[1.0, -0.5], [2.0, 0.25]]),
    next_observation_RnD=torch.tensor([[[0.7], [-0.8]], [[1.5], [-0.2]]]),
    terminated_Rn=torch.tensor([[False, True], [False, False]]),
    task_Rn=torch.tensor([[0, 0], [1, 1]]),
)


class HandCritic(Network):
    """``w0 z + w1 a + w2``."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weights))

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return (x_BD @ self.w[:2] + self.w[2])[..., None]


def draw_action(mean, log_std, noise):
    """Action, its log density, and the gradients of both to mean and log standard deviation."""
    std = math.exp(log_std)
    a = math.tanh(mean + std * noise)
    log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - math.log(1 - a**2)
    da = (1 - a**2, (1 - a**2) * std * noise)
    dlog_prob = (2 * a, -1 + 2 * a * std * noise)
    return a, log_prob, da, dlog_prob


def linear_encoder(spec):
    return LinearEncoder(spec)


class LinearEncoder(Encoder):
    def __init__(self, spec, out_dim: int = 3) -> None:
        super().__init__(spec)
        self.out_dim = out_dim
        self.linear = nn.Linear(spec.observation_space.shape[0], out_dim)
        self.heard = []

    def observe(self, observation_BD: torch.Tensor, task_B: torch.Tensor) -> None:
        self.heard.append(observation_BD)

    def forward(self, observation_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        return self.linear(observation_BD).tanh()


class Embedding(TaskConditioning):
    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.out_dim = 4
        self.table = nn.Embedding(spec.num_tasks, 4)

    def forward(self, task_B: torch.Tensor) -> torch.Tensor:
        return self.table(task_B)


embedded_heads = partial(
    MultiHead, width=16, depth=2, output_bound=0.3, conditioning=Embedding, layer_norm=True
)
FULL = {"actor": embedded_heads, "critic": embedded_heads, "encoder": linear_encoder}


def still(parameters):
    return SGD(parameters, lr=0.0)


class Reconstruction(Auxiliary):
    """A loss of the encoder's features and a weight of its own."""

    def __init__(self, spec, encoder, **options) -> None:
        super().__init__(spec, encoder, **options)
        self.decoder = nn.Linear(encoder.out_dim, spec.observation_space.shape[0])

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> torch.Tensor:
        z_RnZ = inputs.encoder(batch.observation_RnD, batch.task_Rn)
        error_RnD = self.decoder(z_RnZ) - batch.observation_RnD
        return error_RnD.square().mean(-1).mean(1)


def fit(sac, num_updates):
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [make_batch(sac.spec, seed=i) for i in range(num_updates)]
    trainer.fit(sac, DataLoader(batches, batch_size=None, generator=torch.Generator()))
    return trainer


OBSERVATION_ED = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TASK_E = np.array([0, 1, 2, 2, 1, 0])


def act(sac, mode, times=1):
    return np.stack([sac.act(OBSERVATION_ED, TASK_E, mode) for _ in range(times)])
