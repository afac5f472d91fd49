"""Make the updates of every case, probe what is exchanged, and train, as one of several ranks.

``FOLDER CASE...``; without cases all of them, and the runs. ``torchrun`` has started it, or a test
has set the environment variables that ``torchrun`` sets.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from tests.ranks import CASES, float64, lost, probes, result_of
from tests.ranks.runs import RUNS, ended

broadcasts: list[int] = []
"""Of Lightning's SIGTERM flag, before a batch."""
_TrainingEpochLoop._broadcast_sigterm_tensor = lambda loop: broadcasts.append(1)  # type: ignore[method-assign,assignment]

rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
folder = Path(sys.argv[1])
names = sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
with float64():
    results = {name: result_of(name, rank, size) for name in names or CASES}
    probed = probes(rank)
runs = {} if names else {name: ended(name, folder / "runs") for name in RUNS}
probed["broadcasts"] = len(broadcasts)
probed["lost"] = lost(rank, size)  # the last one: the connections are closed
saved = {"results": results, "probes": probed, "runs": runs}
torch.save(saved, folder / f"{rank}.pt")
