"""What holds for every architecture: a new one is one line here."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks import MLP, MultiHead

ALWAYS_FUSED = {torch.float32: 0, torch.bfloat16: 0, torch.float64: 0}
"""Numbers of outputs from which hidden layers are fused."""
ARCHITECTURES = [pytest.param(MLP, id="mlp"), pytest.param(MultiHead, id="multi_head")]


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between -1 and 1 from a generator of their own."""
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1
