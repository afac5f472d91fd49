"""The state of a collector: its episodes, and the states of its listeners and transforms.

A checkpoint identifies a listener or an action transform by its class, and by its index among the
parts of that class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl_lightning.envs.state.simulator import from_text, to_text
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks.share import Rules, Share
from mtrl_lightning.rollout.episodes import EpisodeWindows, RunningEpisodes
from mtrl_lightning.types import WeightedPolicy

if TYPE_CHECKING:
    from mtrl_lightning.rollout.collector import Collector

COMPONENTS = ("windows", "episodes", "listeners", "action_transforms", "exploration", "reuse")
"""Parts of a collector's state.

Statistics of finished episodes; running episodes with their environments; the states of the
listeners, of the action transforms, of the exploration, and of the policies' reuse.
"""
WEIGHTS = "weights"
"""A further part: the policy's weights. A run's checkpoints hold them beside this state."""


def get_state(collector: Collector, components: Sequence[str]) -> dict[str, Any]:
    """Return parts of the state; see ``Collector.get_state``."""
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
        return state  # also while a step is under way, and for a collector of other tasks
    assert not collector.is_step_pending, "a step is under way"
    state["tasks"] = collector.envs.task_E.tolist()
    if "windows" in components:
        state["windows"] = collector.windows.state_dict()
    if "episodes" in components:
        observation = None
        if collector.observation_ED is not None:
            dtype = collector.observation_ED.dtype.str
            observation = [dtype, to_text(collector.observation_ED)]
        state["running"] = collector.running.state_dict()
        state["observation"] = observation
        state["paused"] = collector.paused_E.tolist()
        state["envs"] = collector.envs.get_state()
    for name, parts in _parts(collector).items():
        if name in components:
            state[name] = {key: part.state_dict() for key, part in _named(parts).items()}
    return state


def set_state(collector: Collector, state: Mapping[str, Any]) -> None:
    """Restore the parts that are in a state; see ``Collector.set_state``."""
    if WEIGHTS in state:
        seq_no = state["weights_seq_no"]
        policy = _weighted_policy(collector)
        # messages may arrive late or twice, and a learner may start from the beginning
        if seq_no == 0 or seq_no > policy.weights_seq_no:
            policy.set_weights(state[WEIGHTS], seq_no)
    if "tasks" not in state:
        return
    tasks = collector.envs.task_E.tolist()
    if state["tasks"] != tasks:
        raise ConfigurationError(
            f"the checkpoint has environments of tasks {state['tasks']}, this run of {tasks}:"
            " continue with the same data.envs_per_task and data.exclude_from_training"
        )
    if "windows" in state:
        collector.windows.load_state_dict(state["windows"])
    if "envs" in state:
        _set_episodes(collector, state)
    parts = _parts(collector)
    for name in ("listeners", "action_transforms", "exploration", "reuse"):
        _load_states(parts[name], state.get(name, {}))


def reshard(
    collector: Collector, states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    """Return the whole state of one rank; see ``Collector.reshard``."""
    rules: Rules = {
        "tasks": share.of_envs,
        "windows": partial(EpisodeWindows.reshard, share=share),
        "running": partial(RunningEpisodes.reshard, share=share),
        "observation": partial(_reshard_observation, share=share),
        "envs": share.of_envs,
        "paused": share.of_envs,
    }
    parts = {
        name: partial(_reshard_states, of_name, share=share)
        for name, of_name in _parts(collector).items()
    }
    return share.join("the collector", states, {**rules, **parts})


def _parts(collector: Collector) -> dict[str, Sequence[Any]]:
    """Return the parts with a state of their own, by component."""
    exploration = collector.exploration
    return {
        "listeners": collector.listeners,
        "action_transforms": collector.action_transforms,
        "exploration": [] if exploration is None else [exploration],
        "reuse": [] if collector.reuse is None else [collector.reuse],
    }


def _weighted_policy(collector: Collector) -> WeightedPolicy:
    if not isinstance(collector.policy, WeightedPolicy):
        raise ConfigurationError(
            f"{type(collector.policy).__name__} has no weights to give or take: collect with an"
            " algorithm or a loaded policy"
        )
    return collector.policy


def _set_episodes(collector: Collector, state: Mapping[str, Any]) -> None:
    observation_ED = None
    envs = collector.envs
    collector.running.load_state_dict(state["running"])
    collector.paused_E = np.array(state["paused"], np.bool_)
    if state["observation"] is not None:
        dtype, text = state["observation"]
        shape = (envs.num_envs, *envs.single_observation_space.shape)  # type: ignore[misc]
        observation_ED = from_text(text, dtype).reshape(shape)
    collector.times.forget()  # the time that passed between two programs is no episode's
    envs.set_state(state["envs"])
    collector.observation_ED = observation_ED


def _reshard_observation(states: Sequence[list[str] | None], share: Share) -> list[str] | None:
    """Return the last observations of a rank's environments; None before the first reset."""
    present = [state for state in states if state is not None]
    if not present:
        return None
    dtype, _ = present[0]
    rows: list[list[Any]] = [
        list(from_text(text, dtype).reshape(share.num_envs, -1)) for _, text in present
    ]
    return [dtype, to_text(np.stack(share.of_envs(rows)))]


def _load_states(parts: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Restore the parts that have a state; the others start from the beginning."""
    for name, part in _named(parts).items():
        if states.get(name):
            part.load_state_dict(states[name])


def _reshard_states(
    parts: Sequence[Any], states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    """Return the states of listeners or transforms on a rank; those it does not have are left out.

    Args:
        parts: the listeners or transforms.
        states: by name, of all saved ranks.
        share: the rank's part of the saved run.
    """
    return {
        name: part.reshard([state[name] for state in states], share)
        for name, part in _named(parts).items()
        if name in states[0]
    }


def _named(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the parts by class and by their index among the parts of the class."""
    named: dict[str, Any] = {}
    for part in parts:
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        index = sum(name.rpartition(":")[0] == kind for name in named)
        named[f"{kind}:{index}"] = part
    return named
