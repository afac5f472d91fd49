"""The state of a collector: its episodes, and the states of its listeners, transforms and extras.

A checkpoint identifies a listener, transform or extra by its class and its index among those of the
same class. Each process saves and loads its own states, except for entries under the key
``per_env``, which belong to environments; see ``mtrl_lightning.checkpoints``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl_lightning.checkpoints import PER_ENV, PER_RANK
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.transitions import WeightedPolicy

if TYPE_CHECKING:
    from mtrl_lightning.rollout.collector import Collector

PARTS = ("listeners", "action_transforms", "extras")
"""Lists of stateful objects of a collector."""
COMPONENTS = ("windows", "episodes", *PARTS)
"""Components of a collector's state: statistics of finished episodes; running episodes with their
environments; the states of its parts."""
WEIGHTS = "weights"
"""Optional component: the policy's weights, which a run's checkpoints save separately."""


def get_state(collector: Collector, components: Sequence[str]) -> dict[str, Any]:
    """Return components of the state; see ``Collector.get_state``."""
    known = (*COMPONENTS, WEIGHTS)
    unknown = sorted({*components} - {*known})
    if unknown:
        raise ConfigurationError(
            f"components has {', '.join(unknown)}: give some of {', '.join(known)}"
        )
    state: dict[str, Any] = {}
    if WEIGHTS in components:
        state[WEIGHTS] = _weighted_policy(collector).get_weights()
        state["weights_seq_no"] = collector.weights_seq_no
    if list(components) == [WEIGHTS]:
        return state  # even if a step is pending, and for a collector of other tasks
    assert not collector.is_step_pending, "a step is pending"
    state[PER_ENV] = {"tasks": collector.envs.task_E.tolist()}
    if "windows" in components:
        state["windows"] = collector.windows.state_dict()
    if "episodes" in components:
        state["running"] = collector.running.state_dict()
        state[PER_ENV]["paused"] = collector.paused_E.tolist()
        state[PER_ENV]["envs"] = collector.envs.get_state()
    for name in [name for name in PARTS if name in components]:
        parts = _named(getattr(collector, name))
        state[name] = {key: _state_of(part) for key, part in parts.items()}
    return state


def set_state(collector: Collector, state: Mapping[str, Any]) -> None:
    """Restore the components in a state; see ``Collector.set_state``."""
    if WEIGHTS in state:
        seq_no = state["weights_seq_no"]
        policy = _weighted_policy(collector)
        # messages may arrive late or twice, and a learner may have been restarted
        if seq_no == 0 or seq_no > policy.counters.updates:
            policy.set_weights(state[WEIGHTS], seq_no)
    if PER_ENV not in state:
        return
    tasks, saved = collector.envs.task_E.tolist(), state[PER_ENV]["tasks"]
    if saved != tasks:
        raise ConfigurationError(
            f"the checkpoint has environments of tasks {saved}, but this run of {tasks}:"
            " resume with the same tasks, data.envs_per_task and data.exclude_from_training"
        )
    if "windows" in state:
        collector.windows.load_state_dict(state["windows"])
    if "running" in state:
        collector.running.load_state_dict(state["running"])
        collector.paused_E = np.array(state[PER_ENV]["paused"], np.bool_)
        collector.times.forget()  # exclude the time between saving and restoring
        collector.observation_ED = collector.envs.set_state(state[PER_ENV]["envs"])
    for name in PARTS:
        _load_states(getattr(collector, name), state.get(name, {}))


def _weighted_policy(collector: Collector) -> WeightedPolicy:
    if not isinstance(collector.policy, WeightedPolicy):
        raise ConfigurationError(
            f"{type(collector.policy).__name__} has no weights: collect with an algorithm or a"
            " loaded policy"
        )
    return collector.policy


def _state_of(part: Any) -> dict[str, Any]:
    """Return the state of an object: per environment under ``per_env``, otherwise per rank."""
    own = dict(part.state_dict())
    return {PER_ENV: own.pop(PER_ENV, {}), PER_RANK: {distributed.rank(): own}}


def _load_states(parts: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Restore the objects that have a saved state; the others start anew."""
    for name, part in _named(parts).items():
        if name not in states:
            continue
        state = dict(states[name][PER_RANK].get(distributed.rank(), {}))
        if states[name][PER_ENV]:
            state[PER_ENV] = states[name][PER_ENV]
        if state:
            part.load_state_dict(state)


def _named(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the objects by class and by their index among those of the same class."""
    named: dict[str, Any] = {}
    for part in parts:
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        index = sum(name.rpartition(":")[0] == kind for name in named)
        named[f"{kind}:{index}"] = part
    return named
