"""Make the updates of every case, probe what is exchanged, and train, as one of several ranks.

``RANK N PORT FOLDER CASE...``; without cases all of them, and the runs. The environment variables
are those that ``torchrun`` sets.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import CASES, float64, probes, result_of
from tests.ranks.runs import RUNS, ended

rank, size, port = (int(argument) for argument in sys.argv[1:4])
folder = Path(sys.argv[4])
names = sys.argv[5:]
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": str(rank),
    "WORLD_SIZE": str(size),
    "LOCAL_WORLD_SIZE": str(size),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(port),
    "TORCHELASTIC_RUN_ID": "tests",
}
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
with float64():
    results = {name: result_of(name, rank, size) for name in names or CASES}
    probed = probes(rank)
runs = {} if names else {name: ended(name, folder / "runs") for name in RUNS}
saved = {"results": results, "probes": probed, "runs": runs}
torch.save(saved, folder / f"{rank}.pt")
dist.destroy_process_group()
