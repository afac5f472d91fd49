"""Parts of SAC that learn, and what it acts on."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from mtrl_lightning.auxiliaries import Auxiliary, LossInputs
from mtrl_lightning.networks import MLP, Encoder, MultiHead, TaskConditioning
from mtrl_lightning.transitions import TransitionBatch
from tests.helpers.algorithms import make_batch


class LinearEncoder(Encoder):
    def __init__(self, spec, out_dim: int = 3) -> None:
        super().__init__(spec)
        self.out_dim = out_dim
        self.linear = nn.Linear(spec.observation_space.shape[0], out_dim)

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
FULL = {"actor": embedded_heads, "critic": embedded_heads, "encoder": LinearEncoder}


class Reconstruction(Auxiliary):
    """A loss of the encoder's features and a weight of its own."""

    def __init__(self, spec, encoder, **options) -> None:
        super().__init__(spec, encoder, **options)
        self.decoder = nn.Linear(encoder.out_dim, spec.observation_space.shape[0])

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> torch.Tensor:
        z_RnZ = inputs.encoder(batch.observation_RnD, batch.task_Rn)
        error_RnD = self.decoder(z_RnZ) - batch.observation_RnD
        return error_RnD.square().mean(-1).mean(1)


class TypeSpy(MLP):
    """Notes the type of its outputs in learning."""

    def __init__(self, *sizes, seen, **options) -> None:
        super().__init__(*sizes, width=16, depth=2, output_bound=0.3, **options)
        self.seen = seen

    def forward(self, x_BD: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        out = super().forward(x_BD, task_B)
        if torch.is_grad_enabled():
            self.seen.add(out.dtype)
        return out


def still(parameters):
    return SGD(parameters, lr=0.0)


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
