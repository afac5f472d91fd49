"""An environment's state and that of its wrappers as plain values: all its future depends on.

A layer (the environment or a wrapper) that has ``get_state() -> dict`` and ``set_state(dict)``
answers for all of itself. Of any other layer every attribute is saved: numbers, arrays, containers,
generators, spaces, other objects, MuJoCo's simulation and views of its memory. What cannot be saved
is an error, so nothing is lost silently.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from mtrl_lightning.envs.state.codec import HINT, StateDecoder, StateEncoder, has_slots
from mtrl_lightning.envs.state.simulator import MujocoState, is_mujoco
from mtrl_lightning.errors import ConfigurationError


class EnvState:
    """Take and restore the state of one environment.

    Args:
        env: the environment as ``make_env`` returned it, not yet reset; edits of its MuJoCo model
            are found by comparison with it.
    """

    def __init__(self, env: gym.Env) -> None:
        self._env = env
        self.simulations = [v for v in vars(env.unwrapped).values() if is_mujoco(v, "MjData")]
        """The environment's ``MjData``."""
        self._simulators = [*(data.model for data in self.simulations), *self.simulations]
        self._mujoco = (
            []
            if _answers(env.unwrapped)
            else [MujocoState(data.model, data) for data in self.simulations]
        )
        encoder = StateEncoder(self._simulators)
        with contextlib.suppress(ConfigurationError):  # raised by `get`, where a state is saved
            self._encode_layers(encoder)
        self._classes = encoder.classes

    def get(self) -> list[Any]:
        """Return the state of every layer, outermost first, as plain values.

        Raises:
            ConfigurationError: naming an attribute that cannot be saved.
        """
        encoder = StateEncoder(self._simulators)
        layers = self._encode_layers(encoder)
        for name, (_, where) in encoder.objects.items():
            if name not in self._classes:
                raise ConfigurationError(
                    f"the environment's attribute {where} is a {name}, and a new environment has"
                    f" none: create one in its constructor, or {HINT}"
                )
        return [[simulation.get() for simulation in self._mujoco], *layers]

    def _encode_layers(self, encoder: StateEncoder) -> list[Any]:
        layers = []
        for layer in layers_of(self._env):
            name = type(layer).__name__
            if _answers(layer):
                answer = layer.get_state()  # type: ignore[attr-defined]
                state = {
                    key: encoder.encode(value, f"{name}.get_state()[{key!r}]")
                    for key, value in answer.items()
                }
            elif has_slots(type(layer)):
                raise ConfigurationError(
                    f"the environment {name} has __slots__, which cannot be saved: {HINT}"
                )
            else:
                state = encoder.attributes(layer, name)
            layers.append([name, state])
        return layers

    def set(self, states: list[Any]) -> None:
        """Restore a state that an environment made in the same way gave.

        Raises:
            ConfigurationError: if it is of an environment of other layers or attributes.
        """
        simulations, *layers = states
        there = [name for name, _ in layers]
        here = [type(layer).__name__ for layer in layers_of(self._env)]
        if there != here or len(simulations) != len(self._mujoco):
            raise ConfigurationError(
                f"the state is of another environment: {' > '.join(there)} there,"
                f" {' > '.join(here)} here"
            )
        for mujoco, simulation in zip(self._mujoco, simulations, strict=True):
            mujoco.set(simulation)
        decoder = StateDecoder(self._simulators, self._classes)
        for layer, (name, state) in zip(layers_of(self._env), layers, strict=True):
            if _answers(layer):
                answer = {key: decoder.decode(value, None, name) for key, value in state.items()}
                layer.set_state(answer)  # type: ignore[attr-defined]
            else:
                decoder.attributes(layer, state, name)


def layers_of(env: gym.Env) -> Iterator[gym.Env]:
    """Yield the environment's wrappers and itself, the outermost layer first."""
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env


def _answers(layer: gym.Env) -> bool:
    """Return whether a layer has ``get_state()`` and ``set_state(dict)``.

    ``set_state(qpos, qvel)`` of Gymnasium's ``MujocoEnv`` is another method of the same name.
    """
    setter = getattr(type(layer), "set_state", None)
    if setter is None or not hasattr(type(layer), "get_state"):
        return False
    return len(inspect.signature(setter).parameters) == len(("self", "state"))
