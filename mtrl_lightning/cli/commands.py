"""The commands beside ``fit`` and ``validate``, each a module with ``main`` and ``HELP``."""

from __future__ import annotations

COMMANDS = {
    "play": "mtrl_lightning.cli.play",
    "export": "mtrl_lightning.cli.export",
    "list": "mtrl_lightning.cli.config_list",
    "doctor": "mtrl_lightning.cli.doctor",
    "clear": "mtrl_lightning.cli.clear",
    "completion": "mtrl_lightning.cli.completion",
}
