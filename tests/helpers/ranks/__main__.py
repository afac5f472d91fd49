"""Make the updates of cases as several ranks, and probe what they exchange.

``SIZE FOLDER CASE...``: each rank, a copy of this process, writes ``FOLDER/RANK.pt``.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.ranks.cases import float64, probes, result_of

size, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]


def main(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    with float64():
        saved = {name: result_of(name, rank, size) for name in names} | probes(rank)
    torch.save(saved, folder / f"{rank}.pt")
    dist.barrier()


for rank in range(size):
    if os.fork() == 0:
        try:
            main(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(max(abs(os.waitstatus_to_exitcode(os.wait()[1])) for _ in range(size)))
