"""Random augmentation of the images in a batch.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` all rows, ``S`` stacked frames, ``H``
height, ``W`` width, ``P`` padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import is_image
from mtrl_lightning.networks.multi_input import image_of
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.transforms import Transform


class RandomShift(Transform):
    """Shift each image of a batch by up to ``padding`` pixels, as DrQ does.

    An image is padded by replicating its border and cropped at a random position (Kostrikov et al.
    2021, "Image Augmentation Is All You Need", arXiv 2004.13649). All frames of an observation get
    the same shift; observation and next observation are shifted independently. One shift of each
    is sampled per update, ``K = M = 1``, as in DrQ-v2. The policy acts on unshifted images. Of
    images with vectors, only the images are shifted.

    Args:
        spec: the tasks; observations are images ``[..., H, W]``.
        padding: largest shift in pixels, at least 1; 4 in DrQ.
    """

    def __init__(self, spec: EnvSpec, padding: int = 4) -> None:
        super().__init__(spec)
        self._parts = spec.observation_parts
        if not (self._parts or is_image(spec.observation_space)):
            raise ConfigurationError(
                "RandomShift needs image observations, but they have shape"
                f" {spec.observation_space.shape}: remove it from model.init_args.transforms,"
                " or choose an environment with pixel observations"
            )
        at_least(1, padding=padding, prefix="RandomShift's ")
        self._padding = padding

    def forward(self, batch: TransitionBatch) -> TransitionBatch:
        """Return the batch with shifted observations and next observations."""
        return batch._replace(
            observation_RnD=self._shifted(batch.observation_RnD),
            next_observation_RnD=self._shifted(batch.next_observation_RnD),
        )

    def _shifted(self, observation_RnD: Tensor) -> Tensor:
        if not self._parts:
            return self._shifted_images(observation_RnD)
        (size,), shape = (part.shape for part in self._parts)
        shifted_RnD = observation_RnD.clone()
        image_RnSCHW = image_of(shifted_RnD, size, shape)
        image_RnSCHW.copy_(self._shifted_images(image_RnSCHW))
        return shifted_RnD

    def _shifted_images(self, image_RnDHW: Tensor) -> Tensor:
        image_BDHW = image_RnDHW.flatten(0, 1)
        device = image_BDHW.device
        offset_B2 = torch.randint(
            2 * self._padding + 1,
            (len(image_BDHW), 2),
            generator=self.generator(device),
            device=device,
        )
        return shifted(image_BDHW, offset_B2, self._padding).view(image_RnDHW.shape)


def shifted(image_BDHW: Tensor, offset_B2: Tensor, padding: int) -> Tensor:
    """Return images ``[B, ..., H, W]``, padded with their edges and cropped.

    Args:
        image_BDHW: the images.
        offset_B2: row and column of the padded image where the crop starts, from 0 to ``2 P``;
            ``P`` leaves an image unchanged.
        padding: number of pixels added on each side, ``P``.
    """
    padded_BCHW = padded(image_BDHW.flatten(1, -3), padding)
    # on a CPU, a loop is ten times faster than one vectorized operation
    crop = cropped_one_by_one if padded_BCHW.device.type == "cpu" else cropped_together
    height, width = image_BDHW.shape[-2:]
    return crop(padded_BCHW, offset_B2, height, width).reshape(image_BDHW.shape)


def cropped_one_by_one(image_BCHW: Tensor, offset_B2: Tensor, height: int, width: int) -> Tensor:
    """Return the crop of each image that starts at its offset, in a loop."""
    crops = [
        image_CHW[:, y : y + height, x : x + width]
        for image_CHW, (y, x) in zip(image_BCHW, offset_B2.tolist(), strict=True)
    ]
    return torch.stack(crops)


def cropped_together(image_BCHW: Tensor, offset_B2: Tensor, height: int, width: int) -> Tensor:
    """Return the same crops without a loop and without GPU synchronization."""
    # a view of every crop of every image; only the sampled crops are copied
    crop_BCYXHW = image_BCHW.unfold(2, height, 1).unfold(3, width, 1)
    row_B = torch.arange(len(image_BCHW), device=image_BCHW.device)
    return crop_BCYXHW[row_B, :, offset_B2[:, 0], offset_B2[:, 1]]


def padded(image_BCHW: Tensor, padding: int) -> Tensor:
    """Return images with replicated borders; ``F.pad`` does not support bytes in this mode."""
    *shape, height, width = image_BCHW.shape
    padded_BCHW = image_BCHW.new_empty(*shape, height + 2 * padding, width + 2 * padding)
    inner = slice(padding, -padding)
    padded_BCHW[..., inner, inner] = image_BCHW
    padded_BCHW[..., :padding, inner] = image_BCHW[..., :1, :]
    padded_BCHW[..., -padding:, inner] = image_BCHW[..., -1:, :]
    padded_BCHW[..., :padding] = padded_BCHW[..., padding : padding + 1]
    padded_BCHW[..., -padding:] = padded_BCHW[..., -padding - 1 : -padding]
    return padded_BCHW
