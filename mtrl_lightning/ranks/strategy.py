"""Lightning's strategy for a run of several processes, and who starts them.

The processes ("ranks") are started by Lightning on one machine, or by ``torchrun`` or SLURM's
``srun`` on one or several.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mtrl_lightning.checkpoints.parts import RANKS, own_part
from mtrl_lightning.checks import above
from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import ConfigurationError, RankLostError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.distributed import RANK_TIMEOUT
from mtrl_lightning.ranks.launcher import RankLauncher, end_with_first_process

MEETING = "mtrl_lightning/meeting"
"""Keys by which processes find each other in a launcher's store."""


def backend_for(device: torch.device) -> str:
    """Return the backend of the processes' exchange; tensors on the CPU never wait for a GPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


class RanksStrategy(DDPStrategy):
    """Several processes whose algorithm itself averages its gradients, in ``Update``.

    The module is not wrapped: ``DistributedDataParallel`` does nothing for gradients that manual
    optimization computes. Parameters and buffers are those of rank 0 at the start.

    Args:
        rank_timeout: seconds that a process waits for the others before one of them counts as lost.
        options: those of Lightning's ``DDPStrategy``.
    """

    strategy_name = "ranks"

    def __init__(self, rank_timeout: float = RANK_TIMEOUT, **options: Any) -> None:
        super().__init__(timeout=_time_to_start(rank_timeout), **options)
        self._rank_timeout = rank_timeout

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _get_process_group_backend(self) -> str:
        return backend_for(self.root_device)

    def setup_distributed(self) -> None:
        """Connect the processes."""
        with connecting():
            super().setup_distributed()
        distributed.start(self._rank_timeout)
        distributed.set_local_size(self.num_processes)

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does, and spare each batch a broadcast.

        By it Lightning lets all processes know of a SIGTERM, which the run has a handler of its own
        for.
        """
        super().setup(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_exception(self, exception: BaseException) -> None:
        """Let the other processes know that this one ends, unless they end the same way."""
        super().on_exception(exception)
        if not getattr(exception, "is_on_all_ranks", False):
            distributed.leave(f"{type(exception).__name__}: {distributed.short(exception)}")

    @torch.no_grad()
    def configure_ddp(self) -> None:
        """Give all ranks the parameters and buffers of rank 0."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, without a GPU's stream."""
        distributed.total(0)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint with the parts of all ranks.

        Raises:
            OSError: on all ranks, if rank 0 cannot write it.
        """
        parts = distributed.gather_to_zero(own_part(checkpoint))
        with distributed.raise_on_all_ranks(OSError):
            if self.is_global_zero:
                super().save_checkpoint({**checkpoint, RANKS: parts}, filepath, storage_options)


class Processes(NamedTuple):
    """The processes of a run."""

    strategy: Strategy | str
    """Of the trainer."""
    number: int = 1
    """How many there are."""


def _time_to_start(rank_timeout: float) -> timedelta:
    """Return for how long processes wait for the others to start."""
    return timedelta(seconds=max(rank_timeout, distributed.RANK_TIMEOUT))


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Raise an error if not all processes of the run have come.

    Raises:
        RankLostError: in place of the error of ``torch.distributed``.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            "the processes of the run could not be connected"
            f" ({distributed.short(error)}): at least one has not started or has ended, or does not"
            " reach the first one's address"
        ) from error


def processes_for(options: Mapping[str, Any], rank_timeout: float = RANK_TIMEOUT) -> Processes:
    """Return the strategy for a trainer's options, and the number of processes.

    If a launcher has started the processes, they are connected.

    Args:
        options: ``accelerator``, ``devices``, ``num_nodes``, ``strategy``; a missing one is the
            trainer's default.
        rank_timeout: seconds that a process waits for the others before one of them counts as lost.

    Raises:
        ConfigurationError: if there is another strategy, or not the number of processes.
        RankLostError: if not all processes that a launcher has started have come.
    """
    above(0, rank_timeout=rank_timeout, prefix="rollout.", hint=", in seconds")
    distributed.start(rank_timeout)
    num_nodes = options.get("num_nodes") or 1
    devices = options.get("devices")
    given = options.get("strategy") or "auto"
    accelerator = options.get("accelerator") or "auto"
    try:
        connector = _AcceleratorConnector(
            devices="auto" if devices is None else devices,
            num_nodes=num_nodes,
            accelerator=accelerator,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"trainer.accelerator is {accelerator} and trainer.devices {devices}, which this"
            f" machine does not have ({error}): give fewer devices, or --trainer.accelerator cpu."
            " mtrl-lightning doctor lists what there is"
        ) from error
    strategy = connector.strategy
    is_several = isinstance(strategy, ParallelStrategy)
    per_node = len(strategy.parallel_devices) if is_several else 1
    num_processes = per_node * num_nodes
    _check_launched(num_processes, per_node, num_nodes)
    if not is_several or num_processes == 1:
        return Processes(given)
    if given != "auto" and type(given) is not RanksStrategy:
        name = given if isinstance(given, str) else type(given).__name__
        raise ConfigurationError(
            f"trainer.strategy is {name}: leave it out. With several processes the run has a"
            " strategy of its own, because others do not average gradients that manual"
            " optimization computes, and the processes would drift apart"
        )
    cores = usable_cores()
    if strategy.root_device.type == "cpu" and per_node > cores:
        rank_zero_warn(
            f"trainer.devices is {per_node} and this process may use {cores} cores: processes"
            " that share a core make a run slower than fewer of them"
        )
    environment = connector.cluster_environment
    if isinstance(environment, LightningEnvironment):
        if num_nodes > 1:
            raise ConfigurationError(
                f"trainer.num_nodes is {num_nodes}: start the processes with torchrun or srun,"
                " which connect the nodes, see docs/scale"
            )
        end_with_first_process()
    elif not dist.is_initialized():
        with connecting():
            _connect(
                environment, backend_for(strategy.parallel_devices[0]), _time_to_start(rank_timeout)
            )
    distributed.start(rank_timeout)
    distributed.set_local_size(per_node)
    strategy_of_ranks = RanksStrategy(rank_timeout)
    return Processes(given if isinstance(given, Strategy) else strategy_of_ranks, num_processes)


def _connect(environment: ClusterEnvironment, backend: str, timeout: timedelta) -> None:
    """Connect the processes that a launcher has started."""
    options: dict[str, Any] = {"timeout": timeout}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        own_rank = environment.global_rank()
        size = environment.world_size()
        store, _, _ = next(dist.rendezvous("env://", own_rank, size, timeout=timeout))
        options["store"] = unused_part(store, own_rank, size, timeout)
        distributed.set_restart(own_rank == 0 and not is_first_start(store))
    _init_dist_connection(environment, backend, **options)


def unused_part(store: dist.Store, own: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a part of a launcher's store that no previous processes of the run have used.

    ``torchrun`` keeps its store when it restarts the processes. The addresses of the previous
    ones are still in it, and whoever is first would try to connect to them.

    Args:
        store: of the launcher.
        own: this process' rank.
        size: number of processes.
        timeout: for how long the first process waits for the others.

    Raises:
        RuntimeError: if not all have come in time.
    """
    name = uuid.uuid4().hex
    if own != 0:
        store.set(f"{MEETING}/here/{own}", name)
        first = store.get(f"{MEETING}/met/{name}").decode()  # waits for it
        store.set(f"{MEETING}/{first}/{own}", "")
        return dist.PrefixStore(first, store)
    missing = set(range(1, size))
    give_up_at = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{MEETING}/here/{other}"]):  # the name of a previous process, or a new
                met = store.get(f"{MEETING}/here/{other}").decode()
                store.set(f"{MEETING}/met/{met}", name)
        missing = {other for other in missing if not store.check([f"{MEETING}/{name}/{other}"])}
        if missing and time.monotonic() > give_up_at:
            raise RuntimeError(f"rank {min(missing)} has not come in {timeout.total_seconds():g} s")
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


def is_first_start(store: dist.Store) -> bool:
    """Return whether a launcher starts the processes of a run for the first time; count the start.

    ``TORCHELASTIC_RESTART_COUNT`` does not tell: an agent counts only losses of its own processes.
    """
    return bool(store.add(f"{MEETING}/starts", 1) == 1)


def _check_launched(number: int, per_node: int, num_nodes: int) -> None:
    """Check that a launcher, if there is one, has started as many processes as are asked for."""
    if TorchElasticEnvironment.detect():
        launcher = "torchrun"
        started = int(os.environ.get("WORLD_SIZE", "1"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(started)))
    elif "SLURM_STEP_NUM_TASKS" in os.environ:
        launcher = "srun"
        started = int(os.environ["SLURM_STEP_NUM_TASKS"])
        here = started // int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    else:
        return
    if started != number:
        raise ConfigurationError(
            f"{launcher} has started {started} processes, and trainer.devices {per_node} times"
            f" trainer.num_nodes {num_nodes} is {number}: give --trainer.devices {here}"
            f" --trainer.num_nodes {max(1, started // max(here, 1))}"
        )
