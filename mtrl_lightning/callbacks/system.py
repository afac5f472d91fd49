"""The load of the processor and the memory that a run uses."""

from __future__ import annotations

import contextlib

import psutil
import torch

GIBIBYTE = 1 << 30


class SystemUse:
    """Measure the machine's load since the last measurement, and the memory in use."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first value has no interval

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return ``system/`` metrics.

        Args:
            device: that trains.
        """
        this_process = psutil.Process()
        memory = 0
        for process in [this_process, *this_process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                memory += process.memory_info().rss
        found = {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_gib": memory / GIBIBYTE,
        }
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            found["system/gpu_memory_gib"] = (total - free) / GIBIBYTE
        return found
