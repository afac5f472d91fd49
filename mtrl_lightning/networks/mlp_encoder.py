"""An MLP that encodes state vectors.

Shapes: ``B`` batch, ``D`` observation, ``F`` shared features, ``Z`` latent features.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mtrl_lightning.networks.conditioning import TaskConditioning
from mtrl_lightning.networks.encoder import require_vectors
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.projection import ProjectedEncoder
from mtrl_lightning.spec import EnvSpec


class MLPEncoder(ProjectedEncoder):
    """Encode a state vector with an MLP, for auxiliary losses on states.

    The features are ``tanh(LayerNorm(W h + b))`` of the hidden layers ``h``, as in
    ``PixelEncoder``. Actor and critic share the hidden layers, which the critic loss trains; the
    actor has its own projection.

    Args:
        spec: the tasks; observations are vectors.
        width: size of a hidden layer.
        depth: number of hidden layers.
        out_dim: number of latent features, ``Z``; 50 in SAC-AE.
        context: task context, ``(spec) -> TaskConditioning``, which is appended to the features
            and trained only by auxiliary losses; None for no context.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        width: int = 256,
        depth: int = 1,
        out_dim: int = 50,
        context: Callable[[EnvSpec], TaskConditioning] | None = None,
    ) -> None:
        super().__init__(spec)
        require_vectors(spec.observation_space, type(self).__name__)
        self._sizes = (width, depth)
        self._observation_dim = spec.observation_space.shape[0]
        self.hidden = HiddenLayers(self._observation_dim, width, depth, layer_norm=False)
        self.add_projection(width, out_dim, context)

    def layers(self, observation_BD: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, F]``."""
        return self.hidden(observation_BD)  # type: ignore[no-any-return]

    def make_decoder(self) -> nn.Module:
        """Return an MLP of the same size from latent features to state vectors."""
        width, depth = self._sizes
        hidden = HiddenLayers(self.latent_dim, width, depth, layer_norm=False)
        return nn.Sequential(hidden, nn.Linear(width, self._observation_dim))
