"""Former import paths of classes, which checkpoints and ``config.yaml`` of older runs name.

The former modules still import the classes. The table tells which paths mean the same class without
importing anything that a file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMER_MODULES = {
    "mtrl_lightning.learning.reward_scale": "mtrl_lightning.learning.transforms",
    "mtrl_lightning.learning.temperature": "mtrl_lightning.learning.weighting",
    "mtrl_lightning.learning.values": "mtrl_lightning.learning.losses",
}
"""Modules until 0.3, each with the one that has its classes now."""


def with_present_paths(described: Any) -> Any:
    """Return described options with the present path of every class.

    Args:
        described: plain values: mappings, lists, and among their values import paths of classes.
    """
    if isinstance(described, Mapping):
        return {name: with_present_paths(value) for name, value in described.items()}
    if isinstance(described, (list, tuple)):
        return type(described)(with_present_paths(value) for value in described)
    if not isinstance(described, str):
        return described
    module, dot, name = described.rpartition(".")
    return f"{FORMER_MODULES.get(module, module)}{dot}{name}"
