"""Everything that lives in a run, as ``{path: plain value}``.

It is found by walking, so that nothing has to be listed.
"""

import random
from collections import deque

import gymnasium as gym
import numpy as np
import torch


def graph_of(trainer, algorithm):
    """Walk from the algorithm, the data, the callbacks and the optimizers.

    Two equal states give equal graphs.
    """
    found = {}
    roots = {
        "algorithm": algorithm,
        "data": trainer.datamodule,
        "optimizers": list(trainer.optimizers),
    }
    roots |= {f"callbacks.{type(callback).__name__}": callback for callback in trainer.callbacks}
    seen = set()
    kept = []
    for name, root in roots.items():
        _walk(root, name, found, seen, kept)
    _walk(algorithm.generators.state_dict(), "generators", found, set(), [])
    found["torch"] = torch.get_rng_state().tolist()
    found["numpy"], found["python"] = str(np.random.get_state()[1].tolist()), random.getstate()
    return found


def _walk(value, path, found, seen, kept):
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        found[path] = value
    elif isinstance(value, np.generic):
        found[path] = value.item()
    elif isinstance(value, torch.Tensor):
        found[path] = (str(value.dtype), value.detach().cpu().tolist())
    elif isinstance(value, np.ndarray):
        found[path] = (str(value.dtype), value.tolist())
    elif isinstance(value, torch.Generator):
        found[path] = value.get_state().tolist()
    elif isinstance(value, np.random.Generator):
        found[path] = value.bit_generator.state
    elif isinstance(value, torch.optim.Optimizer):
        _walk(value.state_dict(), path, found, seen, kept)
    elif id(value) not in seen:
        seen.add(id(value))
        kept.append(value)  # an id must not be given away meanwhile
        for name, child in _children(value):
            _walk(child, f"{path}.{name}", found, seen, kept)


def _children(value):
    if isinstance(value, dict):
        return [(repr(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [("len", len(value)), *((str(i), child) for i, child in enumerate(value))]
    if isinstance(value, (set, frozenset)):
        return [("items", sorted(map(repr, value)))]
    if type(value).__module__.startswith("mtrl_lightning") or isinstance(
        value, (torch.nn.Module, gym.Env)
    ):
        return [
            (name, child)
            for name, child in vars(value).items()
            if name not in ("_trainer", "trainer")
        ]
    return []
