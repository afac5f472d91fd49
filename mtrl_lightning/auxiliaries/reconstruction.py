"""Reconstruct observations from latent features: a regularized autoencoder (SAC-AE).

Yarats et al. 2021, "Improving Sample Efficiency in Model-Free Reinforcement Learning from Images"
(arXiv 1910.01741).

Shapes: ``R`` trained tasks, ``T`` tasks, ``n`` rows of a task, ``D`` observation, ``S`` stacked
frames, ``H`` height, ``W`` width, ``Z`` latent features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.auxiliaries.auxiliary import (
    Auxiliary,
    LossInputs,
    require_trained_encoder,
)
from mtrl_lightning.checks import at_least
from mtrl_lightning.networks import is_image
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch

NUM_LEVELS = 32
"""Number of values of a color channel after the 5-bit preprocessing."""
LEVEL = 256 // NUM_LEVELS
"""Number of byte values that map to the same preprocessed value."""


class Reconstruction(Auxiliary):
    """Decode observations from the encoder's latent features ``z`` (SAC-AE).

    The loss of a row is the mean squared error of ``decoder(z)`` plus
    ``latent_weight ||z||^2 / 2``. An image's bytes ``o`` are reconstructed as
    ``floor(o / 8) / 32 + U / 32 - 1 / 2`` with uniform noise ``U`` (Ho et al. 2019). State vectors
    are not preprocessed, and padding is masked. The decoder mirrors the encoder. One Adam trains
    the encoder, another the decoder.

    Args:
        spec: the tasks.
        encoder: the encoder that the loss trains.
        latent_weight: weight of the latent penalty, ``lambda``, at least 0; 1e-6 in SAC-AE.
        weight_decay: weight decay of the decoder, at least 0; 1e-7 in SAC-AE.
        options: arguments of ``Auxiliary``.
    """

    mask_TD: Tensor | None
    shown_RD: Tensor | None

    buffers_of_each_rank = ("shown_RD",)

    def __init__(
        self,
        spec: EnvSpec,
        encoder: Encoder,
        *,
        latent_weight: float = 1e-6,
        weight_decay: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(spec, encoder, weight_decay=weight_decay, **options)
        require_trained_encoder(encoder, type(self).__name__)
        at_least(0, latent_weight=latent_weight)
        self._latent_weight = latent_weight
        self._train_tasks = spec.train_tasks
        self.decoder = encoder.make_decoder()
        space = spec.observation_space
        mask_TD = None
        shown_RD = None
        if is_image(space):
            # one observation of each task for images(), saved so that a resumed run returns the
            # same images
            shown_RD = torch.zeros((self.num_trained, *space.shape), dtype=torch.uint8)
        else:
            mask_TD = torch.from_numpy(spec.observation_mask_TD).to(torch.get_default_dtype())
        self.register_buffer("mask_TD", mask_TD, persistent=False)
        self.register_buffer("shown_RD", shown_RD)

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> Tensor:
        """Return one loss per trained task, ``[R]``."""
        z_RnZ = inputs.encoder.latent(batch.observation_RnD, batch.task_Rn)
        decoded_RnD = self.decoder(z_RnZ).float()
        if self.mask_TD is None:
            target_RnD = preprocessed(batch.observation_RnD, inputs.generator)
            error_Rn = (decoded_RnD - target_RnD).square().flatten(2).mean(2)
        else:
            mask_R1D = self.mask_TD[batch.task_R1]
            square_RnD = (decoded_RnD - batch.observation_RnD).square() * mask_R1D
            error_Rn = square_RnD.sum(2) / mask_R1D.sum(2)
        if self.shown_RD is not None:
            self.shown_RD.copy_(batch.observation_RnD[:, 0])
        self._statistics = {"reconstruction_error": error_Rn.detach().mean()}
        size_Rn = z_RnZ.float().square().sum(2) / 2
        return (error_Rn + self._latent_weight * size_Rn).mean(1)

    @torch.no_grad()
    def images(self, encoder: Encoder) -> dict[str, npt.NDArray[np.uint8]]:
        """Return, for each task, the newest frame of the last batch above its reconstruction.

        Empty for states.
        """
        if self.shown_RD is None:
            return {}
        task_R = torch.tensor(self._train_tasks, device=self.shown_RD.device)
        decoded_RD = self.decoder(encoder.latent(self.shown_RD, task_R)).float()
        levels_RD = ((decoded_RD + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        rows = [_side_by_side(images) for images in (self.shown_RD, levels_RD)]
        return {"reconstruction": np.concatenate(rows)}


def preprocessed(observation: Tensor, generator: torch.Generator) -> Tensor:
    """Return bytes quantized to 32 values between -1/2 and 1/2, with uniform noise."""
    noise = torch.rand(observation.shape, generator=generator, device=observation.device)
    level = observation.div(LEVEL, rounding_mode="floor")
    return (level + noise) / NUM_LEVELS - 0.5


def _side_by_side(images_RD: Tensor) -> npt.NDArray[np.uint8]:
    """Return the newest frames in a row, ``[H, R * W, 3]``."""
    newest_RCHW = images_RD.flatten(1, -3)[:, -3:]
    row: npt.NDArray[np.uint8] = newest_RCHW.permute(2, 0, 3, 1).flatten(1, 2).cpu().numpy()
    return row
