"""A benchmark that takes longer to build in the processes that a run has started."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mtrl_lightning.envs import ToyReach


class SlowToStart(ToyReach):
    """The toy benchmark, whose constructor waits in all processes but the first.

    Args:
        file: made when one of them begins to wait.
    """

    def __init__(self, file: str = "") -> None:
        super().__init__()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            Path(file).touch()
            time.sleep(100)
