"""An environment's state and that of its wrappers as plain values: all its future depends on.

A layer (the environment or a wrapper) that has ``get_state() -> dict`` and ``set_state(dict)`` uses
them. Of any other layer every attribute is saved: numbers, arrays, containers, generators, spaces,
other objects, MuJoCo's simulation and views of its memory. What cannot be saved is an error, so
nothing is lost silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from mtrl_lightning.envs.plain import REMEDY, Decoder, Encoder, has_slots
from mtrl_lightning.envs.simulator import ModelEdits, get_simulation, is_mujoco, set_simulation
from mtrl_lightning.errors import ConfigurationError


class EnvState:
    """Take and restore the state of one environment.

    Args:
        env: the environment as ``make_env`` gave it, not yet reset; edits of its MuJoCo model are
            found by comparison with it.
    """

    def __init__(self, env: gym.Env) -> None:
        self._env = env
        attributes = vars(env.unwrapped).values()
        self._models = [value for value in attributes if is_mujoco(value, "MjModel")]
        self._datas = [value for value in attributes if is_mujoco(value, "MjData")]
        self._edits = [ModelEdits(model) for model in self._models]
        found = Encoder([*self._models, *self._datas])
        with contextlib.suppress(ConfigurationError):  # `get` says so when the state is wanted
            self._encode_layers(found)
        self._classes = found.classes

    @property
    def simulations(self) -> list[Any]:
        """The environment's ``MjData``."""
        return self._datas

    def get(self) -> list[Any]:
        """Return the state of every layer, outermost first, as plain values.

        Raises:
            ConfigurationError: naming an attribute that cannot be saved.
        """
        encoder = Encoder([*self._models, *self._datas])
        layers = self._encode_layers(encoder)
        for name, (_, where) in encoder.found.items():
            if name not in self._classes:
                raise ConfigurationError(
                    f"the environment's attribute {where} is a {name},"
                    " which a new environment has none of:"
                    f" make one in its constructor, or {REMEDY}"
                )
        return [
            [edits.get() for edits in self._edits],
            [get_simulation(data) for data in self._datas],
            *layers,
        ]

    def _encode_layers(self, encoder: Encoder) -> list[Any]:
        layers = []
        for layer in _layers(self._env):
            name = type(layer).__name__
            own = getattr(type(layer), "get_state", None)
            if own is None and has_slots(type(layer)):
                raise ConfigurationError(
                    f"the environment {name} has __slots__, which cannot be saved: {REMEDY}"
                )
            if own:
                state = {
                    key: encoder.encode(value, f"{name}.get_state()[{key!r}]")
                    for key, value in own(layer).items()
                }
            else:
                state = encoder.attributes(layer, name)
            layers.append([name, state])
        return layers

    def set(self, states: list[Any]) -> None:
        """Restore a state that an environment made in the same way gave.

        Raises:
            ConfigurationError: if it is of an environment of other layers or attributes.
        """
        edits, simulations, *layers = states
        found = [name for name, _ in layers]
        here = [type(layer).__name__ for layer in _layers(self._env)]
        if found != here or len(edits) != len(self._models) or len(simulations) != len(self._datas):
            raise ConfigurationError(
                f"the state is of another environment: {' > '.join(found)} there, {here} here"
            )
        for own, edit in zip(self._edits, edits, strict=True):
            own.set(edit)
        for data, simulation in zip(self._datas, simulations, strict=True):
            set_simulation(data, simulation)
        decoder = Decoder([*self._models, *self._datas], self._classes)
        for layer, (name, state) in zip(_layers(self._env), layers, strict=True):
            if hasattr(type(layer), "get_state"):
                own_state = {key: decoder.decode(value, None, name) for key, value in state.items()}
                layer.set_state(own_state)  # type: ignore[attr-defined]
            else:
                decoder.attributes(layer, state, name)


def _layers(env: gym.Env) -> Iterator[gym.Env]:
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env
