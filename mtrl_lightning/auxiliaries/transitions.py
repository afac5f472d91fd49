"""Models of the next latent features.

Gelada et al. 2019, "DeepMDP: Learning Continuous Latent Space Models for Representation Learning";
the layers are those of Zhang et al. 2021 (DBC, arXiv 2006.10742).

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``I`` inputs, ``K`` members of an ensemble, ``Z``
latent features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least

MIN_STD = 1e-4
MAX_STD = 10.0
"""Bounds of the predicted standard deviations, as in deep_bisim4control."""


class Gaussians(NamedTuple):
    """Gaussian predictions of an ensemble's members."""

    mean_KRnZ: Tensor
    """Their means."""
    std_KRnZ: Tensor
    """Their standard deviations."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """Sample a prediction ``[R, n, Z]`` of one member, the same for all rows."""
        num_members, *shape = self.mean_KRnZ.shape
        device = self.mean_KRnZ.device
        member = torch.randint(num_members, (1,), generator=generator, device=device)
        noise_RnZ = torch.randn(
            shape, generator=generator, device=device, dtype=self.mean_KRnZ.dtype
        )
        sample_1RnZ = self.mean_KRnZ[member] + self.std_KRnZ[member] * noise_RnZ
        return sample_1RnZ[0]


class TransitionModel(nn.Module):
    """Predict the next latent features; built by a factory ``(in_dim, latent_dim)``.

    Args:
        in_dim: number of inputs, ``I``: latent features, a context, an action.
        latent_dim: number of latent features, ``Z``.
    """

    def __init__(self, in_dim: int, latent_dim: int) -> None:
        super().__init__()

    def forward(self, x_RnI: Tensor) -> Gaussians:
        """Map inputs ``[R, n, I]`` to ``K`` predictions, in single precision at least."""
        raise NotImplementedError

    def draw(self, predicted: Gaussians, generator: torch.Generator) -> Tensor:
        """Return next latent features ``[R, n, Z]`` sampled from a prediction."""
        return predicted.sample(generator)


class Deterministic(TransitionModel):
    """Predict a mean with a fixed standard deviation of 1: the loss is half the squared error.

    Args:
        in_dim: number of inputs.
        latent_dim: number of latent features.
        width: size of the hidden layer; 512 in DeepMDP's implementation for continuous control.
    """

    def __init__(self, in_dim: int, latent_dim: int, *, width: int = 512) -> None:
        super().__init__(in_dim, latent_dim)
        at_least(1, width=width)
        self.layers = nn.Sequential(*hidden_layer(in_dim, width), nn.Linear(width, latent_dim))

    def forward(self, x_RnI: Tensor) -> Gaussians:
        """Map inputs ``[R, n, I]`` to one prediction."""
        mean_KRnZ = self.layers(x_RnI).float()[None]
        return Gaussians(mean_KRnZ, torch.ones_like(mean_KRnZ))

    def draw(self, predicted: Gaussians, generator: torch.Generator) -> Tensor:
        """Return the prediction's mean."""
        return predicted.mean_KRnZ[0]


class Probabilistic(TransitionModel):
    """Predict a Gaussian for each latent feature, with standard deviations from 1e-4 to 10.

    Args:
        in_dim: number of inputs.
        latent_dim: number of latent features.
        width: size of the hidden layer; 512 in deep_bisim4control.
    """

    def __init__(self, in_dim: int, latent_dim: int, *, width: int = 512) -> None:
        super().__init__(in_dim, latent_dim)
        at_least(1, width=width)
        self.hidden = nn.Sequential(*hidden_layer(in_dim, width))
        self.mean = nn.Linear(width, latent_dim)
        self.std = nn.Linear(width, latent_dim)

    def forward(self, x_RnI: Tensor) -> Gaussians:
        """Map inputs ``[R, n, I]`` to one prediction."""
        hidden_RnH = self.hidden(x_RnI)
        fraction_RnZ = self.std(hidden_RnH).float().sigmoid()
        std_RnZ = MIN_STD + (MAX_STD - MIN_STD) * fraction_RnZ
        return Gaussians(self.mean(hidden_RnH).float()[None], std_RnZ[None])


class TransitionEnsemble(TransitionModel):
    """Train several ``Probabilistic`` models on the same transitions.

    Args:
        in_dim: number of inputs.
        latent_dim: number of latent features.
        size: number of models, ``K``; 5 in deep_bisim4control.
        width: size of each hidden layer.
    """

    def __init__(self, in_dim: int, latent_dim: int, *, size: int = 5, width: int = 512) -> None:
        super().__init__(in_dim, latent_dim)
        at_least(1, size=size)
        self.members = nn.ModuleList(
            Probabilistic(in_dim, latent_dim, width=width) for _ in range(size)
        )

    def forward(self, x_RnI: Tensor) -> Gaussians:
        """Map inputs ``[R, n, I]`` to ``K`` predictions."""
        means, stds = zip(*(member(x_RnI) for member in self.members), strict=True)
        return Gaussians(torch.cat(means), torch.cat(stds))


def hidden_layer(in_dim: int, width: int) -> tuple[nn.Module, ...]:
    """Return the modules of a hidden layer with LayerNorm and ReLU."""
    return nn.Linear(in_dim, width), nn.LayerNorm(width), nn.ReLU()
