"""What the auxiliaries' tests share."""

from functools import partial
from typing import Any

import torch

from mtrl_lightning import networks
from mtrl_lightning.auxiliaries import LossInputs
from mtrl_lightning.networks import Encoder, MLPEncoder, PixelEncoder
from mtrl_lightning.spec import EnvSpec

CONTEXT = partial(networks.TaskEncoder, width=6, depth=1, out_dim=3)
STATES = partial(MLPEncoder, width=8, out_dim=5)
STATES_CONTEXT = partial(MLPEncoder, width=8, out_dim=5, context=CONTEXT)
PIXELS = partial(PixelEncoder, channels=3, out_dim=5)


def make_encoder(spec: EnvSpec, make: Any = STATES_CONTEXT) -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make(spec)


def inputs(encoder: Encoder, seed: int = 0) -> LossInputs:
    return LossInputs(encoder, encoder, torch.Generator().manual_seed(seed))


def reached(loss: torch.Tensor, *modules: torch.nn.Module) -> set[str]:
    """Return the parameters, without their modules' last names, that a loss trains."""
    for module in modules:
        module.zero_grad()
    loss.backward()
    return {
        name.split(".")[0]
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
