"""Convolutional image encoder, and the decoder that mirrors it.

Yarats et al. 2021, "Improving Sample Efficiency in Model-Free Reinforcement Learning from Images"
(SAC-AE); DrQ (Kostrikov et al. 2021) uses the same architecture.

Shapes: ``B`` batch, ``S`` stacked frames, ``H`` height, ``W`` width, ``F`` shared features, ``Z``
latent features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import TaskConditioning
from mtrl_lightning.networks.projection import ProjectedEncoder, orthogonal_linear
from mtrl_lightning.spec import EnvSpec

KERNEL = 3
"""Kernel size of the convolutions."""


class PixelEncoder(ProjectedEncoder):
    """Encode images with convolutions and a projection.

    Observations are bytes ``[S, 3, H, W]``, ``S`` frames with the newest last, or a single image
    ``[3, H, W]``. They are divided by 255, and the frames' colors become channels. Each convolution
    is followed by ReLU, and the last by ``tanh(LayerNorm(W x + b))``. Actor and critic share the
    convolutions, which the critic loss trains; the actor has its own projection.

    Convolutions are initialized delta-orthogonally (Xiao et al. 2018): an orthogonal matrix at the
    kernel's center and zeros elsewhere.

    Args:
        spec: the tasks; observations are bytes from 0 to 255.
        channels: output channels of each convolution; 32 in SAC-AE.
        strides: stride of each convolution, with kernel size 3; 2, 1, 1, 1 in SAC-AE.
        out_dim: number of latent features, ``Z``; 50 in SAC-AE.
        context: task context, ``(spec) -> TaskConditioning``, which is appended to the features
            and trained only by auxiliary losses; None for no context.
        channels_last: whether to use the channels-last memory format, which makes updates in
            bf16-mixed on a CPU about 10 % faster.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        channels: int = 32,
        strides: Sequence[int] = (2, 1, 1, 1),
        out_dim: int = 50,
        context: Callable[[EnvSpec], TaskConditioning] | None = None,
        channels_last: bool = False,
    ) -> None:
        super().__init__(spec)
        require_images(spec.observation_space, type(self).__name__)
        at_least(1, channels=channels, strides=min(strides, default=0))
        self._observation_shape = spec.observation_space.shape
        self._channels = channels
        self._strides = list(strides)
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        *stack, height, width = spec.observation_space.shape
        self._sizes = sizes_of(height, width, self._strides)
        """Height and width of an image before each convolution and after the last."""
        convolutions: list[nn.Module] = []
        in_channels = int(np.prod(stack))
        for stride in self._strides:
            convolution = nn.Conv2d(in_channels, channels, KERNEL, stride)
            delta_orthogonal_(convolution)
            convolutions += [convolution, nn.ReLU()]
            in_channels = channels
        self.convolutions = nn.Sequential(*convolutions)
        height, width = self._sizes[-1]
        self.add_projection(channels * height * width, out_dim, context)

    def layers(self, observation_BD: Tensor) -> Tensor:
        """Map bytes ``[..., S, 3, H, W]`` to ``[..., F]``."""
        weight: Tensor = self.convolutions[0].weight  # type: ignore[assignment]
        rows = observation_BD.shape[: -len(self._observation_shape)]
        height, width = self._sizes[0]
        image_BCHW = observation_BD.reshape(-1, weight.shape[1], height, width)
        scaled_BCHW = image_BCHW.to(weight.dtype, memory_format=self._memory_format) / 255
        features_BF: Tensor = self.convolutions(scaled_BCHW).flatten(1)
        return features_BF.view(*rows, features_BF.shape[1])

    def make_decoder(self) -> nn.Module:
        """Return a decoder with transposed convolutions of the same sizes and strides."""
        return PixelDecoder(
            self.latent_dim, self._channels, self._strides, self._sizes, self._observation_shape
        )


class PixelDecoder(nn.Module):
    """Map latent features to images with transposed convolutions, mirroring ``PixelEncoder``.

    Args:
        latent_dim: number of latent features, ``Z``.
        channels: channels of the encoder's convolutions.
        strides: strides of the encoder's convolutions.
        sizes: height and width of an image before each convolution and after the last.
        observation_shape: shape of an observation.
    """

    def __init__(
        self,
        latent_dim: int,
        channels: int,
        strides: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        observation_shape: Sequence[int],
    ) -> None:
        super().__init__()
        self._observation_shape = tuple(observation_shape)
        self._first_shape = (channels, *sizes[-1])
        self.linear = orthogonal_linear(latent_dim, int(np.prod(self._first_shape)))
        layers: list[nn.Module] = []
        for index in reversed(range(len(strides))):
            stride = strides[index]
            is_last = index == 0
            out_channels = int(np.prod(observation_shape[:-2])) if is_last else channels
            # border pixels that a convolution with this stride skips
            left_out = [
                before - ((after - 1) * stride + KERNEL)
                for before, after in zip(sizes[index], sizes[index + 1], strict=True)
            ]
            layer = nn.ConvTranspose2d(
                channels, out_channels, KERNEL, stride, output_padding=(left_out[0], left_out[1])
            )
            delta_orthogonal_(layer)
            layers += [nn.ReLU(), layer]
        self.convolutions = nn.Sequential(*layers)

    def forward(self, z_BZ: Tensor) -> Tensor:
        """Map ``[..., Z]`` to ``[..., S, 3, H, W]``."""
        first_BCHW = self.linear(z_BZ.flatten(0, -2)).unflatten(1, self._first_shape)
        # on a CPU, transposed convolutions are 1.5 times slower in bfloat16 than in float32
        with torch.autocast("cpu", enabled=False):
            image_BCHW: Tensor = self.convolutions(first_BCHW.float())
        return image_BCHW.view(*z_BZ.shape[:-1], *self._observation_shape)


def is_image(observation_space: Box) -> bool:
    """Return whether observations are images, possibly stacked, instead of vectors."""
    return len(observation_space.shape) >= 3


def require_images(observation_space: Box, encoder: str) -> None:
    """Check that observations are images of bytes."""
    shape = observation_space.shape
    if not is_image(observation_space):
        raise ConfigurationError(
            f"the encoder {encoder} requires images,"
            f" but observations have shape {shape}: choose an encoder of state vectors"
            " (-c encoder/mlp), or an environment with pixel observations"
        )
    if observation_space.dtype != np.uint8:
        raise ConfigurationError(
            f"the encoder {encoder} requires images of bytes (uint8, 0 to 255),"
            f" but observations are {observation_space.dtype}:"
            " remove the wrappers or transforms that convert them"
        )


def sizes_of(height: int, width: int, strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return an image's height and width before each convolution and after the last."""
    sizes = [(height, width)]
    for stride in strides:
        height, width = ((side - KERNEL) // stride + 1 for side in sizes[-1])
        sizes.append((height, width))
    if min(min(size) for size in sizes) < 1:
        least = 1
        for stride in reversed(strides):
            least = (least - 1) * stride + KERNEL
        raise ConfigurationError(
            f"images of {sizes[0][0]} x {sizes[0][1]} pixels are too small for convolutions with"
            f" strides {', '.join(map(str, strides))}: use at least {least} x {least} pixels"
            " (channels come before height and width), or fewer or smaller strides"
            " (model.init_args.encoder.init_args.strides)"
        )
    return sizes


@torch.no_grad()
def delta_orthogonal_(layer: nn.Conv2d | nn.ConvTranspose2d) -> None:
    """Initialize a convolution: an orthogonal matrix at the kernel's center, zeros elsewhere."""
    center = KERNEL // 2
    nn.init.zeros_(layer.weight)
    nn.init.orthogonal_(layer.weight[:, :, center, center], nn.init.calculate_gain("relu"))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
