"""Encoders whose layers are shared by actor and critic, followed by a separate projection of each.

Yarats et al. 2021, "Improving Sample Efficiency in Model-Free Reinforcement Learning from Images"
(SAC-AE): the actor loss trains the actor's projection, but no shared layers.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``C`` context, ``F``
shared features, ``Z`` features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.conditioning import TaskConditioning
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.networks.network import Network
from mtrl_lightning.spec import EnvSpec


class Projection(nn.Module):
    """Map shared features to ``tanh(LayerNorm(W x + b))``; pass on any following entries.

    ``W`` is initialized orthogonally, ``b`` with zeros.

    Args:
        in_dim: number of shared features, ``F``.
        out_dim: number of projected features, ``Z``.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.linear = orthogonal_linear(in_dim, out_dim)
        self.norm = nn.LayerNorm(out_dim)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Map ``[B, F + C]`` to ``[B, Z + C]``; ``C`` may be 0."""
        # in two dimensions: in three, a product of non-contiguous rows would copy them
        rows_BF = x_BF.flatten(0, -2)[:, : self.in_dim]
        z_BZ = torch.tanh(self.norm(self.linear(rows_BF))).view(*x_BF.shape[:-1], self.out_dim)
        if x_BF.shape[-1] == self.in_dim:
            return z_BZ
        return torch.cat([z_BZ, x_BF[..., self.in_dim :].to(z_BZ.dtype)], dim=-1)


class ProjectedEncoder(Encoder):
    """Base of encoders with layers shared with the actor and a projection that is not shared.

    A subclass builds its layers, calls ``add_projection``, and computes the layers in ``layers``.
    With a context, the output is ``projection(layers(o)) || sg(context(task))``: actor and critic
    losses do not train the context.

    Args:
        spec: the tasks.
    """

    projection: Projection

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self._spec = spec

    def add_projection(
        self,
        shared_dim: int,
        latent_dim: int,
        context: Callable[[EnvSpec], TaskConditioning] | None,
    ) -> None:
        """Build the projection that follows the layers, and the context.

        Args:
            shared_dim: number of features of the layers, ``F``.
            latent_dim: number of projected features, ``Z``.
            context: the task context; None for no context.
        """
        at_least(1, out_dim=latent_dim)
        self.out_dim = latent_dim
        if context is not None:
            self.context = context(self._spec)
            self.out_dim += self.context.out_dim
        # last, because gradient methods use the last layer that the critic loss trains
        self.projection = Projection(shared_dim, latent_dim)

    def layers(self, observation_BD: Tensor) -> Tensor:
        """Map observations ``[B, ...]`` to ``[B, F]``."""
        raise NotImplementedError

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map observations ``[B, ...]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        return self.project(self.shared_features(observation_BD, task_B))

    def latent(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the features without the context's, ``[B, Z]``."""
        return self.projection(self.layers(observation_BD))  # type: ignore[no-any-return]

    def shared_features(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the layers' features and the context, ``[B, F + C]``."""
        shared_BF = self.layers(observation_BD)
        if self.context is None:
            return shared_BF
        context_BC = self.context(task_B).detach()
        return torch.cat([shared_BF, context_BC.to(shared_BF.dtype)], dim=-1)

    def project(self, shared_BF: Tensor) -> Tensor:
        """Map the shared features to the output, ``[B, out_dim]``."""
        return self.projection(shared_BF)  # type: ignore[no-any-return]

    def make_projection(self) -> Projection:
        """Return a new projection for the actor."""
        return Projection(self.projection.in_dim, self.projection.out_dim)

    def make_actor(
        self,
        make_network: Callable[[int, int, EnvSpec], Network],
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
    ) -> Network:
        """Build a policy network after a new projection, which the actor loss trains."""
        network = super().make_actor(make_network, in_dim, out_dim, spec)
        return ProjectedNetwork(self.make_projection(), network)


class ProjectedNetwork(Network):
    """Apply a projection shared by all tasks, then a network.

    Args:
        projection: maps shared features to the network's inputs.
        network: the network.
    """

    def __init__(self, projection: nn.Module, network: Network) -> None:
        super().__init__()
        self.projection = projection
        self.network = network

    def forward(self, x_BF: Tensor, task_B: Tensor) -> Tensor:
        """Map shared features ``[B, F]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        return self.network(self.projection(x_BF), task_B)  # type: ignore[no-any-return]

    def mask_losses(self, loss_R: Tensor) -> Tensor:
        """Return the losses masked by the network."""
        return self.network.mask_losses(loss_R)

    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Call ``after_step`` of the network."""
        self.network.after_step(loss_R, task_R, generator)


def orthogonal_linear(in_dim: int, out_dim: int) -> nn.Linear:
    """Return a linear layer with orthogonal weights and zero biases."""
    linear = nn.Linear(in_dim, out_dim)
    nn.init.orthogonal_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
