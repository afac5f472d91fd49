"""The commands beside ``fit`` and ``validate``, each a module with ``main`` and ``HELP``."""

from __future__ import annotations

COMMANDS = {
    "play": "mtrl_lightning.cli.play",
    "compare": "mtrl_lightning.cli.compare",
    "watch": "mtrl_lightning.cli.watch",
    "sweep": "mtrl_lightning.cli.sweep",
    "export": "mtrl_lightning.cli.export",
    "list": "mtrl_lightning.cli.config_list",
    "doctor": "mtrl_lightning.cli.doctor",
    "clear": "mtrl_lightning.cli.clear",
    "completion": "mtrl_lightning.cli.completion",
}
