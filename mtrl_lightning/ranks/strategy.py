"""Lightning's strategy for a run of several processes ("ranks")."""

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
"""Time that a process waits for the others before one of them counts as lost."""


class RanksStrategy(DDPStrategy):
    """Several processes whose algorithm itself averages its gradients, in ``Update``.

    It is Lightning's ``ddp`` as soon as a data module or an algorithm of this package is imported.
    The module is not wrapped: ``DistributedDataParallel`` does nothing for gradients that manual
    optimization computes. Parameters and buffers are those of rank 0 at the start.

    Args:
        timeout: time that a process waits for the others before one of them counts as lost.
        options: those of Lightning's ``DDPStrategy``.
    """

    strategy_name = "ranks"

    def __init__(self, timeout: timedelta = TIMEOUT, **options: Any) -> None:
        # tensors on the CPU never wait for a GPU
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
        """Connect where ``torchrun`` keeps its store when it starts the processes again.

        The addresses of the processes that have ended are still in it.
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
        """Set up as Lightning does, and spare each batch a broadcast.

        By it Lightning lets all processes know of a SIGTERM, which ``SignalCallback`` does.
        """
        super().setup(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    @torch.no_grad()
    def configure_ddp(self) -> None:
        """Give all ranks the parameters and buffers of rank 0."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, without a GPU's stream."""
        distributed.total(0)

    def on_exception(self, exception: BaseException) -> None:
        """Let all processes end by themselves after an exception that all of them raise.

        Lightning would kill the first one as soon as it finds another one that has ended.
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
