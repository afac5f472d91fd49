"""The commands beside ``fit`` and ``validate``, each a module with ``main`` and ``HELP``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from mtrl_lightning.errors import ConfigurationError

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


@contextlib.contextmanager
def mistakes_end_the_program() -> Iterator[None]:
    """Print a user's mistake, or a file that cannot be read or written, and exit with code 2."""
    try:
        yield
    except (ConfigurationError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(2)
