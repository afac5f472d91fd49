"""The commands beside ``fit`` and ``validate``, each a module with ``main`` and ``HELP``."""

from __future__ import annotations

COMMANDS = {
    "list": "mtrl_lightning.config_list",
    "doctor": "mtrl_lightning.doctor",
    "clear": "mtrl_lightning.clear",
    "completion": "mtrl_lightning.completion",
}
