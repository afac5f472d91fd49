"""Make the updates of every case, and probe what is exchanged, as one of several ranks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import CASES, probes, result_of, use_float64

rank, size, port = (int(argument) for argument in sys.argv[1:4])
torch.set_num_threads(1)
use_float64()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
names = sys.argv[5:] or list(CASES)
results = {name: result_of(name, rank, size) for name in names}
torch.save({"results": results, "probes": probes(rank)}, Path(sys.argv[4]) / f"{rank}.pt")
dist.destroy_process_group()
