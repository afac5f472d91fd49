"""The data of a run: a benchmark, the transitions to learn from, and the stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from mtrl_lightning.checks import nearest_multiples
from mtrl_lightning.devices import CPU
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, trained_spec, with_info
from mtrl_lightning.envs.benchmarks.wrappers import with_layers
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.share import Rules, Share
from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.manifest import EMPTY_MANIFEST, reshard_manifests
from mtrl_lightning.replay.rollout_buffer import RolloutBuffer
from mtrl_lightning.replay.sizes import replay_bytes
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.resources import free_memory
from mtrl_lightning.run.demonstrations import GIVE, check_identity, load_demonstrations
from mtrl_lightning.run.kinds import refused_by
from mtrl_lightning.schema import transition_fields
from mtrl_lightning.spec import Field
from mtrl_lightning.types import RolloutConfig, TransitionBatch

if TYPE_CHECKING:
    from mtrl_lightning.algorithms import Algorithm

NO_LOOP = (
    "the run has no RolloutCallback, which collects transitions: add one to the trainer's callbacks"
)
"""The error of a trainer that has data and no environments to step."""
ROWS_PER_TASK = 128
"""Transitions per task in a batch of MetaWorld+'s protocol."""
TRANSITIONS_PER_TASK = 100_000
"""Transitions per task in the replay of MetaWorld+'s protocol."""


class MultiTaskData(LightningDataModule):
    """A benchmark and the transitions that are learned from.

    An off-policy algorithm has a replay of them. An on-policy one keeps one iteration, whose size
    it decides itself; it takes no option of the replay. An offline one has demonstrations.

    Args:
        benchmark: the tasks, chosen by ``class_path``.
        batch_size: not on-policy: transitions of a batch over all trained tasks and processes;
            each gets the same number. Null for 128 per task.
        capacity: off-policy only: transitions kept, over all trained tasks and processes; each
            environment has an equal share. Null for 100,000 per task.
        demonstrations: offline only: folder of the Minari data sets to learn from, which
            ``collect`` has written. It has every trained task, and may have others.
        exclude_from_training: names of tasks that are evaluated but never trained on.
        memory_map: off-policy only: keep the replay in a file in the run's folder, mapped into
            memory, for one larger than the memory.
        on_device: not on-policy: keep the replay in the memory of the GPU that trains, if it
            takes at most half of the free memory there. One that takes more is kept by the host.
        wrappers: Gymnasium's wrappers or your own, around every environment that is trained in or
            evaluated in, the innermost first: import paths, or ``class_path`` with ``init_args``;
            in Python also classes and functions. See ``WithWrappers``.
        pixels: observes images of the environments in place of their states, such as
            ``mtrl_lightning.envs.Pixels`` with its arguments; null for states.
        info_keys: names of numbers in the environments' ``info`` whose means are logged, as
            ``rollout/info/<key>`` and ``eval/info/<key>``, with ``_last`` for an episode's last
            value.
        store_info: whether they are also stored with the transitions, for an algorithm that reads
            ``batch.extra[key]``; then every step has to report them.
        seed: of the sampling of batches.

    Raises:
        ConfigurationError: if a task is unknown, all are excluded, the batch cannot be shared out
            equally, or the capacity is smaller than a batch.
    """

    learning_options: ClassVar[tuple[str, ...]] = (
        "benchmark",
        "batch_size",
        "capacity",
        "exclude_from_training",
        "memory_map",
        "on_device",
        "wrappers",
        "pixels",
        "info_keys",
        "store_info",
    )
    """Arguments that change the result: a continued run warns if one differs."""

    @refused_by(("on-policy", "off-policy"), "demonstrations")
    @refused_by(("on-policy",), "batch_size", "on_device")
    @refused_by(("on-policy", "offline"), "capacity", "memory_map")
    def __init__(
        self,
        benchmark: Benchmark,
        batch_size: int | None = None,
        capacity: int | None = None,
        exclude_from_training: list[str] | None = None,
        memory_map: bool = False,
        on_device: bool = True,
        wrappers: list[str | dict[str, Any]] | None = None,
        pixels: Callable[[Benchmark], Benchmark] | None = None,
        info_keys: list[str] | None = None,
        store_info: bool = False,
        seed: int = 0,
        demonstrations: str | None = None,
    ) -> None:
        super().__init__()
        if demonstrations == "" or not isinstance(demonstrations, str | Path | None):
            raise ConfigurationError(f"data.demonstrations is {demonstrations!r}: {GIVE}")
        benchmark = with_layers(benchmark, wrappers, pixels)
        benchmark = with_info(benchmark, info_keys, store_info)
        self.benchmark = benchmark
        self.demonstrations = demonstrations
        self._memory_map = memory_map
        self._on_device = on_device
        self._seed = seed
        self.spec = trained_spec(benchmark, exclude_from_training)
        num_tasks = len(self.spec.train_tasks)
        self.batch_size = ROWS_PER_TASK * num_tasks if batch_size is None else batch_size
        self.capacity = TRANSITIONS_PER_TASK * num_tasks if capacity is None else capacity
        _check_sizes(self.batch_size, self.capacity, num_tasks)
        self.session: Any = None
        """The run that these data are part of, while it lasts."""
        self.buffer: ReplayBuffer | None = None
        self.rollout_buffer: RolloutBuffer | None = None
        """The transitions of an on-policy algorithm, in place of the buffer."""
        self._opened_for: tuple[Any, ...] = ()
        self._identity: dict[str, Any] | None = None
        """Of the demonstrations that the buffer holds; None without."""
        self.manifest: dict[str, Any] | None = None
        """The replay's files according to the last checkpoint; None if they are not saved."""

    def setup(self, stage: str) -> None:
        """Let callbacks such as ``EarlyStopping`` look at evaluations, not at the end of an epoch.

        A run has one epoch without an end. Lightning calls this before any callback's ``setup``.
        """
        if stage == TrainerFn.FITTING and self.trainer is not None:
            self.trainer.check_val_every_n_epoch = None

    def open(
        self, algorithm: Algorithm, tasks: Sequence[int], folder: Path, device: torch.device
    ) -> None:
        """Allocate the transitions that an algorithm learns from; offline, read them.

        Args:
            algorithm: of the run.
            tasks: the task of each training environment; none offline.
            folder: of the run.
            device: that trains.
        """
        fields = algorithm.policy_fields
        if algorithm.kind == "offline":
            self.open_demonstrations(device)
        elif algorithm.collection is None:
            self.open_replay(tasks, folder, device, fields)
        else:
            self.open_rollout_buffer(tasks, algorithm.collection, fields, device)

    def next_batch(self) -> TransitionBatch:
        """Return a batch for an update."""
        if self.rollout_buffer is not None:
            return self.rollout_buffer.next_minibatch()
        assert self.buffer is not None, "the data are not open"
        # each process samples its share: gradients are averaged over the processes
        return self.buffer.sample(self.batch_size // distributed.world_size())

    def open_replay(
        self,
        tasks: Sequence[int],
        folder: Path,
        device: torch.device = CPU,
        policy_fields: Sequence[Field] = (),
    ) -> ReplayBuffer:
        """Print the memory that the replay needs, and allocate it.

        Args:
            tasks: the task of each training environment.
            folder: the run's, for a replay on disk.
            device: that trains.
            policy_fields: further fields of a transition, which the policy's ``act`` returns.

        Raises:
            ConfigurationError: if memory or disk is short.
        """
        opened_for = (tuple(tasks), folder, device, tuple(policy_fields))
        if self.buffer is not None and self._opened_for == opened_for:
            return self.buffer  # a second fit with the same data continues with their replay
        self._forget(opened_for)
        if self._memory_map:
            folder.mkdir(parents=True, exist_ok=True)
        num_envs = distributed.world_size() * len(tasks)
        num_rows = self.capacity // num_envs * len(tasks)
        fields = transition_fields(self.spec, policy_fields)
        needed = replay_bytes(self.spec, fields, len(tasks), num_rows // len(tasks))
        wants_device = self._on_device and not self._memory_map
        fits = needed <= free_memory(device) / 2
        if not (device.type == "cuda" and wants_device and fits):
            device = CPU
        where = f"disk in {folder}" if self._memory_map else f"memory of {device} when full"
        once = ""
        if self.spec.frame_stack:
            stacks = bytes_needed(fields, num_rows)
            once = f", each frame once (as stacks {stacks / 2**20:,.0f} MiB)"
        rank_zero_info(
            f"{distributed.per_rank_prefix()}Replay of {num_rows:,} transitions:"
            f" {needed / 2**20:,.0f} MiB of {where}{once}"
        )
        self.buffer = ReplayBuffer(
            self.spec,
            num_rows,
            self._seed,
            tasks=tasks,
            folder=folder if self._memory_map else None,
            device=device,
            policy_fields=policy_fields,
        )
        return self.buffer

    def open_demonstrations(self, device: torch.device = CPU) -> ReplayBuffer:
        """Read the demonstrations into memory, and print their number.

        Raises:
            ConfigurationError: if there are none, they are not of the trained tasks, or memory is
                short.
        """
        if self.demonstrations is None:
            raise ConfigurationError(
                f"data.demonstrations is missing, from which an offline algorithm learns: {GIVE}"
            )
        opened_for = (self.demonstrations, device)
        if self.buffer is not None and self._opened_for == opened_for:
            return self.buffer
        self._forget(opened_for)
        self.buffer, self._identity = load_demonstrations(
            self.demonstrations,
            self.spec,
            self._seed,
            device if self._on_device else CPU,
            self.benchmark.splits[0],
        )
        needed = bytes_needed(self.buffer.storage.fields, self.buffer.capacity)
        rank_zero_info(
            f"Demonstrations in {self.demonstrations}: {len(self.buffer):,} transitions of"
            f" {len(self.spec.train_tasks)} tasks, {needed / 2**20:,.0f} MiB of memory of"
            f" {self.buffer.storage.device}"
        )
        return self.buffer

    def open_rollout_buffer(
        self,
        tasks: Sequence[int],
        collection: RolloutConfig,
        policy_fields: Sequence[Field] = (),
        device: torch.device = CPU,
    ) -> RolloutBuffer:
        """Allocate the memory of an on-policy iteration, and print its size.

        Args:
            tasks: the task of each training environment.
            collection: steps, epochs and minibatches of an iteration.
            policy_fields: further fields of a transition, which the policy's ``act`` returns.
            device: that trains.

        Raises:
            ConfigurationError: if the rows cannot be shared out among the minibatches.
        """
        opened_for = (tuple(tasks), collection, device, tuple(policy_fields))
        if self.rollout_buffer is not None and self._opened_for == opened_for:
            return self.rollout_buffer  # a second fit continues in the middle of its iteration
        self._forget(opened_for)
        self.rollout_buffer = RolloutBuffer(
            self.spec, tasks, collection, policy_fields, seed=self._seed, device=device
        )
        rows = collection.num_steps * len(tasks)
        rank_zero_info(
            f"{distributed.per_rank_prefix()}Iterations of {rows:,} env steps"
            f" ({self.rollout_buffer.num_bytes / 2**20:,.0f} MiB),"
            f" {collection.num_epochs} epochs of {collection.num_minibatches} minibatches of"
            f" {rows // collection.num_minibatches:,}"
        )
        return self.rollout_buffer

    def _forget(self, opened_for: tuple[Any, ...]) -> None:
        self.buffer = None
        self.rollout_buffer = None
        self._identity = None
        self._opened_for = opened_for

    def train_dataloader(self) -> DataLoader:
        """Return the loop of the run, which yields a batch for every update."""
        if self.session is None:
            raise ConfigurationError(NO_LOOP)
        # a generator of its own, because DataLoader samples a worker seed even without workers
        return DataLoader(self.session.loop, batch_size=None, generator=torch.Generator())

    def val_dataloader(self) -> DataLoader | list:
        """Return one empty batch, around which ``EvaluationCallback`` runs; none while fitting."""
        assert self.trainer is not None
        if self.trainer.state.fn == TrainerFn.FITTING:
            return []
        return DataLoader([0], batch_size=None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the manifest of the replay's files and its generator, or an iteration's state.

        Of demonstrations it is their identity and the generator.
        """
        if self.rollout_buffer is not None:
            return {"rollout_buffer": self.rollout_buffer.state_dict()}
        if self.buffer is None:
            return {}
        if self._identity is not None:
            return {"demonstrations": self._identity, "buffer": self.buffer.state_dict()}
        return {"replay": self.manifest, "buffer": self.buffer.state_dict()}

    @staticmethod
    def reshard(states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
        """Return the state of a rank: its environments' iteration, or their rings of the replay."""
        rules: Rules = {
            "rollout_buffer": partial(RolloutBuffer.reshard, share=share),
            "replay": partial(reshard_manifests, share=share),
            "demonstrations": lambda identities: identities[0],
            "buffer": lambda buffers: share.own(buffers) or {},
        }
        return share.join("the data", states, rules)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them; ``ReplayCallback`` reads the replay's transitions.

        Raises:
            ConfigurationError: if they are of other demonstrations.
        """
        if self.rollout_buffer is not None and "rollout_buffer" in state_dict:
            self.rollout_buffer.load_state_dict(state_dict["rollout_buffer"])
        if self.buffer is None or "buffer" not in state_dict:
            return
        if self._identity is not None:
            check_identity(state_dict["demonstrations"], self._identity)
        else:
            self.manifest = state_dict["replay"]
        self.buffer.load_state_dict(state_dict["buffer"])


def _check_sizes(batch_size: int, capacity: int, num_tasks: int) -> None:
    rows, rest = divmod(batch_size, num_tasks)
    if rest or rows < 1:
        raise ConfigurationError(
            f"batch_size {batch_size} cannot be shared out equally among {num_tasks} tasks:"
            f" give {nearest_multiples(batch_size, num_tasks)}"
        )
    if capacity // num_tasks < rows:
        raise ConfigurationError(
            f"capacity {capacity} is too small for a batch of {batch_size}:"
            f" give at least {batch_size}"
        )


def check_share(batch_size: int, num_tasks: int, num_processes: int) -> None:
    """Check that each process can have the same number of rows of every task in a batch.

    Raises:
        ConfigurationError: naming the nearest batch sizes.
    """
    of_each = num_tasks * num_processes
    if batch_size % of_each == 0:
        return
    raise ConfigurationError(
        f"data.batch_size {batch_size} cannot be shared out equally among {num_processes} processes"
        f" and {num_tasks} tasks: give {nearest_multiples(batch_size, of_each)}"
    )


def manifest_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of the replay that a checkpoint needs."""
    return checkpoint.get(MultiTaskData.__qualname__, {}).get("replay") or EMPTY_MANIFEST
