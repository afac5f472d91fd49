"""Make the updates of every case, probe what is exchanged, and train, as one of several ranks.

``FOLDER CASE...``; without cases all of them, and the runs. ``torchrun`` has started it as one of
the ranks. Else it has the environment variables but ``RANK``, and starts all ranks as its copies,
which spares their imports.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from tests.helpers.ranks.cases import CASES, float64, lost, probes, result_of
from tests.helpers.ranks.runs import RUNS, ended

broadcasts: list[int] = []
"""Of Lightning's SIGTERM flag, before a batch."""


def main(folder: Path, names: list[str]) -> None:
    """Do all of it as one rank."""
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
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


def fork(folder: Path, names: list[str]) -> int:
    """Do it as all ranks; return the exit code."""
    pids = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            try:
                main(folder, names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) for _ in pids]
    return max(abs(code) for code in codes)


_TrainingEpochLoop._broadcast_sigterm_tensor = lambda loop: broadcasts.append(1)  # type: ignore[method-assign,assignment]
if "RANK" in os.environ:
    main(Path(sys.argv[1]), sys.argv[2:])
else:
    sys.exit(fork(Path(sys.argv[1]), sys.argv[2:]))
