"""Weights of networks as plain tensors: compared by shape, copied, and exchanged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError


def weight_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of a module's state by name; None for an extra state."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in state.items()
    }


def copied_weights(networks: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return copies of the states of networks on the CPU, by the networks' names."""
    states = {name: network.state_dict() for name, network in networks.items()}
    # an extra state may hold NumPy arrays, such as running statistics
    copied = copy.deepcopy(states)
    return apply_to_collection(copied, Tensor, lambda tensor: tensor.detach().cpu())


def load_weights(networks: Mapping[str, nn.Module], weights: Mapping[str, Any]) -> None:
    """Give networks the weights that ``copied_weights`` returned of equal networks.

    Raises:
        ConfigurationError: naming the networks of other shapes; nothing is changed then.
    """
    own = {name: weight_shapes(network.state_dict()) for name, network in networks.items()}
    received = {name: weight_shapes(state) for name, state in weights.items()}
    differing = [
        name for name in dict.fromkeys([*own, *received]) if own.get(name) != received.get(name)
    ]
    if differing:
        raise ConfigurationError(
            f"the weights of {', '.join(differing)} are of another network: give those of an"
            " algorithm with the same arguments"
        )
    for name, network in networks.items():
        network.load_state_dict(weights[name])
