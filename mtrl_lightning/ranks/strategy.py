"""Lightning strategy for a run of several processes ("ranks")."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from mtrl_lightning.checkpoints import RANKS, part_of
from mtrl_lightning.ranks import distributed

TIMEOUT = timedelta(minutes=30)
"""Time after which a process that does not respond to the others counts as lost."""


class RanksStrategy(DDPStrategy):
    """Strategy for algorithms that average gradients themselves, in ``Update``.

    It replaces Lightning's ``ddp`` once a data module or an algorithm of this package is imported.
    The module is not wrapped, because ``DistributedDataParallel`` does not handle gradients
    computed in manual optimization. Parameters and buffers are broadcast from rank 0 at the start.

    Args:
        timeout: time after which a process that does not respond to the others counts as lost.
        options: arguments of Lightning's ``DDPStrategy``.
    """

    strategy_name = "ranks"

    def __init__(self, timeout: timedelta = TIMEOUT, **options: Any) -> None:
        # gloo for CPU tensors, which avoids GPU synchronization
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        super().__init__(timeout=timeout, process_group_backend=backend, **options)
        self._start_timeout = timeout

    def setup_distributed(self) -> None:
        """Connect the processes."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not dist.is_initialized():
            self._connect_in_new_part_of_store()
        super().setup_distributed()
        distributed.set_local_size(self.num_processes)

    def _connect_in_new_part_of_store(self) -> None:
        """Connect in a new part of the store that ``torchrun`` keeps between restarts.

        It still contains the addresses of the previous processes.
        """
        assert self.cluster_environment is not None
        self.set_world_ranks()
        own_rank, size = self.global_rank, self.world_size
        store, _, _ = next(dist.rendezvous("env://", own_rank, size, timeout=self._start_timeout))
        start = f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        dist.init_process_group(
            self.process_group_backend,
            store=dist.PrefixStore(start, store),
            rank=own_rank,
            world_size=size,
            timeout=self._start_timeout,
        )

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does, but avoid a broadcast per batch.

        Lightning uses it to notify all processes of a SIGTERM, which ``SignalCallback`` handles.
        """
        super().setup(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    @torch.no_grad()
    def configure_ddp(self) -> None:
        """Broadcast the parameters and buffers of rank 0."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, without using a CUDA stream."""
        distributed.total(0)

    def on_exception(self, exception: BaseException) -> None:
        """Let all processes exit on their own after an exception that all of them raise.

        Lightning would kill the first process once it detects that another one has exited.
        """
        if getattr(exception, "is_on_all_ranks", False):
            self.barrier()
            getattr(self.launcher, "procs", []).clear()
        super().on_exception(exception)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint with the parts of all ranks.

        Raises:
            OSError: on all ranks, if rank 0 cannot write it.
        """
        if "data" in checkpoint["mtrl_lightning"]:
            parts = distributed.gather_to_zero(part_of(checkpoint))
            checkpoint = {**checkpoint, RANKS: parts}
        with distributed.raise_on_all_ranks(OSError):
            if self.is_global_zero:
                super().save_checkpoint(checkpoint, filepath, storage_options)


StrategyRegistry.register("ddp", RanksStrategy, description=RanksStrategy.__doc__, override=True)
