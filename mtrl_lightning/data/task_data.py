"""The tasks of a run, and the interface between data modules and callbacks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import IterableDataset

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.checkpoints import restoring
from mtrl_lightning.checks import at_least, nearest_multiples
from mtrl_lightning.data.drift import check_equal
from mtrl_lightning.data.run_checks import check_run
from mtrl_lightning.data.run_io import RunIO
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, trained_spec, with_info
from mtrl_lightning.envs.benchmarks.wrappers import with_layers
from mtrl_lightning.errors import ConfigurationError, Interrupted
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout import ActionTransform, Collector
from mtrl_lightning.transitions import Kind, TransitionBatch
from mtrl_lightning.utils.counters import Counters, Stopwatch
from mtrl_lightning.utils.requeue import requeue

FALSE_WARNINGS = (
    "Using ModelCheckpoint with manual optimization",  # it saves the state after the update
    "You're resuming from a checkpoint that ended before the epoch ended",  # this is exact
    "The number of training batches",  # metrics do not follow log_every_n_steps
)
"""Beginnings of Lightning's warnings that do not apply."""
ROWS_PER_TASK = 128
"""Batch size per task in MetaWorld+'s protocol."""
SUMMED = ("env_steps", "dropped_transitions", "episodes", "worker_restarts", "repeated_steps")
"""Counters that are summed over processes after each vector step."""
LARGE_UPDATE = 600_000_000
"""Trained parameters times batch size above which several PyTorch threads are faster."""


class Ticks(IterableDataset[int]):
    """Infinite stream of one tick per update.

    ``TaskData.transfer_batch_to_device`` replaces each tick with a batch sampled right before the
    update, because Lightning prefetches one element of iterables without length.
    """

    def __iter__(self) -> Iterator[int]:
        """Yield ticks."""
        while True:
            yield 0


class TaskData(LightningDataModule):
    """A benchmark's tasks, and the state of a run's training data.

    ``RolloutCallback`` calls ``begin`` when training starts, ``begin_epoch`` at each of Lightning's
    epochs, and ``begin_update`` and ``end_update`` around each update. Between ``end_update`` and
    the next batch nothing is pending: checkpoints saved there are complete.

    Args:
        benchmark: the tasks.
        total_steps: environment steps after which training ends, over all processes.
        learner_threads: number of PyTorch's CPU threads, set for the whole process; None for one
            with small networks and batches, and PyTorch's default otherwise.
        action_transforms: transforms of the actions sent to the environments, applied in order; the
            policy's original actions are stored. Evaluations apply them too, without noise.
        exclude_from_training: names of tasks that are evaluated but never trained on.
        wrappers: Gymnasium wrappers, or your own, of all training and evaluation environments,
            innermost first: import paths, or ``class_path`` with ``init_args``; in Python also
            classes and functions. See ``WithWrappers``.
        pixels: wraps the benchmark to observe images instead of states, such as
            ``mtrl_lightning.envs.Pixels`` with its arguments; None for states.
        info_keys: names of numbers in the environments' ``info`` whose means are logged, as
            ``rollout/info/<key>`` and ``eval/info/<key>``, with ``_last`` for an episode's last
            value.
        store_info: whether to also store them with the transitions, for algorithms that read
            ``batch.extra[key]``; every step must report them.
        seed: seed of environments, action transforms, extras and batch sampling.
    """

    kind: ClassVar[Kind]
    """The kind of algorithm that it supports."""
    buffer: Any
    """The transitions to learn from, available after ``setup``."""
    folder: Path
    """The run folder, available after ``setup``."""
    collector: Collector | None = None
    """Steps the training environments; None if there are none."""

    def __init__(
        self,
        benchmark: Benchmark,
        total_steps: int = 1_000_000,
        learner_threads: int | None = None,
        action_transforms: list[ActionTransform] | None = None,
        exclude_from_training: list[str] | None = None,
        wrappers: list[str | dict[str, Any]] | None = None,
        pixels: Callable[[Benchmark], Benchmark] | None = None,
        info_keys: list[str] | None = None,
        store_info: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        at_least(1, prefix="data.", total_steps=total_steps)
        at_least(1, prefix="data.", hint=", or null", learner_threads=learner_threads)
        benchmark = with_layers(benchmark, wrappers, pixels)
        self.benchmark = with_info(benchmark, info_keys, store_info)
        self.spec = trained_spec(self.benchmark, exclude_from_training)
        self.total_steps = total_steps
        self.action_transforms = action_transforms or []
        self.is_training = False
        """False until training starts, because state may be partially restored before."""
        self.is_busy = False
        """Whether a batch or a vector step is in progress, so that the state is incomplete."""
        self.received_signal = 0
        """Number of the signal received by this process; 0 for none."""
        self.after_step: list[Callable[[int], None]] = []
        """Called with the environment steps after every vector step, including the warm-up."""
        self.local_counters = Counters()
        """Counts of this process since the last exchange; the run's own with one process."""
        self._seed = seed
        self._learner_threads = learner_threads
        self._signal = 0
        """Number of a signal received by any process."""
        self._restarts = 0
        """Groups of environments rebuilt on all processes since the program started."""
        self._faulty_rank: int | None = None
        """The first process whose environments failed without a restart left."""
        self._wants_stop = False
        """Whether a stop was requested on this process and not all have been notified."""
        self._is_stop_agreed = False
        """Whether all processes have been notified of a requested stop."""

    # interface for callbacks

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that is trained on these data."""
        assert self.trainer is not None
        return self.trainer.lightning_module  # type: ignore[return-value]

    @property
    def counters(self) -> Counters:
        """Counts over all processes."""
        return self.algorithm.counters

    @property
    def stopwatch(self) -> Stopwatch:
        """Measures the time of each phase."""
        return self.algorithm.stopwatch

    @property
    def last_step(self) -> int:
        """The environment step after which training ends."""
        return self.total_steps

    @property
    def is_step_finished(self) -> bool:
        """Whether all updates due so far have been made, so that schedules may act."""
        return True

    @property
    def is_over(self) -> bool:
        """Whether all environment steps and their updates have been made."""
        return self.counters.env_steps >= self.last_step and self.is_step_finished

    def check_signals(self) -> None:
        """Raise ``Interrupted`` if a signal was received; called where the state is complete."""
        signal = self.received_signal if distributed.world_size() == 1 else self._signal
        if signal:
            raise Interrupted(128 + signal)

    def missing_callbacks(self) -> list[Callback]:
        """Return the required callbacks that the trainer does not have yet."""
        from mtrl_lightning.callbacks import missing_callbacks

        assert self.trainer is not None
        return missing_callbacks(self.trainer)

    # the loop: called by RolloutCallback and by Lightning

    def setup(self, stage: str) -> None:
        """Check that algorithm, data and trainer are compatible, and set the number of threads."""
        trainer = self.trainer
        assert trainer is not None
        check_run(trainer, self)
        self.folder = Path(trainer.log_dir or trainer.default_root_dir)
        if distributed.world_size() == 1:
            self.local_counters = self.counters
        trainer.strategy.checkpoint_io = RunIO(self)
        if stage != "fit":
            return
        for message in FALSE_WARNINGS:
            warnings.filterwarnings("ignore", message)
        self.algorithm.data_name = type(self).__qualname__
        # otherwise EarlyStopping and ModelCheckpoint would wait for the end of an epoch
        trainer.check_val_every_n_epoch = None
        self._set_threads(trainer.strategy.root_device)

    def _set_threads(self, device: torch.device) -> None:
        threads = self._learner_threads
        if threads is None and device.type == "cpu":
            parameters = self.algorithm.parameters()
            num_trained = sum(one.numel() for one in parameters if one.requires_grad)
            if num_trained * self._batch_rows() < LARGE_UPDATE:
                threads = 1
        if threads is not None:
            torch.set_num_threads(threads)
        rank_zero_info(f"PyTorch threads: {torch.get_num_threads()}")

    def _batch_rows(self) -> int:
        """Return the number of rows of a batch over all processes."""
        raise NotImplementedError

    def train_dataloader(self) -> Iterable[int]:
        """Return a stream of ticks, one for each update."""
        return Ticks()

    def begin(self) -> None:
        """Start or resume training."""

    def begin_learning(self) -> None:
        """Pass the tasks' mean rewards to reward scales, for new networks."""
        self.algorithm.transforms.begin_learning(self.buffer.mean_rewards())

    def begin_epoch(self) -> None:
        """Prepare the updates of one of Lightning's epochs."""

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> TransitionBatch:
        """Return the next batch; the data loader only yields ticks.

        Lightning prefetches one batch of an ``IterableDataset`` without length, before the vector
        step whose transitions the batch may contain. This hook is called right before each update.

        Raises:
            Interrupted: if a signal was received; everything due before has been done.
            RestartsExhaustedError: if environments failed too often.
        """
        assert self.trainer is not None
        if not self.trainer.training:
            return batch
        self.check_faults()
        self.check_signals()
        self.is_busy = True
        with self.stopwatch.measure("sample"):
            return self.next_batch()

    def next_batch(self) -> TransitionBatch:
        """Return a batch for an update."""
        raise NotImplementedError

    def begin_update(self) -> None:
        """Prepare an update; environments may be stepped during the update."""

    def end_update(self) -> None:
        """Finish what ``begin_update`` started."""

    def check_faults(self) -> None:
        """Raise the fault for which no restart was left."""

    def val_dataloader(self) -> range:
        """Return one empty batch: ``EvaluationCallback`` runs test episodes at the epoch's end."""
        return range(1)

    def test_dataloader(self) -> range:
        """Return one empty batch."""
        return range(1)

    # several processes

    def exchange(self) -> None:
        """Sum the counts of all processes, and exchange signals, faults and stop requests.

        They share one message per vector step, after which all processes act identically.
        """
        if distributed.world_size() == 1:
            return
        local = self.local_counters
        envs = None if self.collector is None else self.collector.envs
        numbers = distributed.gather_numbers(
            [
                *(getattr(local, name) for name in SUMMED),
                self.received_signal,
                int(envs is not None and envs.fault is not None),
                int(self._wants_stop),
                0 if envs is None else envs.num_restarts,
            ]
        )
        *counts, signals, faults, stops, restarts = zip(*numbers, strict=True)
        counters = self.counters
        for name, of_ranks in zip(SUMMED, counts, strict=True):
            setattr(counters, name, getattr(counters, name) + sum(of_ranks))
        counters.vector_steps += local.vector_steps  # in lockstep: equal on all processes
        local.load_state_dict(Counters().state_dict())
        self._signal = max(signals)
        self._faulty_rank = faults.index(1) if any(faults) else None
        self._restarts = sum(restarts)
        if any(stops):
            assert self.trainer is not None
            self._wants_stop = False
            self.trainer.should_stop = True
            self._is_stop_agreed = True

    def envs_of(self, rank: int) -> list[int]:
        """Return the global indices of the environments that a process steps."""
        return []

    def defer_stop(self) -> None:
        """Postpone a stop requested on this process until all processes have been notified."""
        trainer = self.trainer
        assert trainer is not None
        is_alone = distributed.world_size() == 1
        if is_alone or self._is_stop_agreed or self.is_over or not trainer.should_stop:
            return
        self._wants_stop = True
        trainer.should_stop = False

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training data; fails where it is incomplete."""
        error = sys.exc_info()[1]
        is_alone = error is not None and not getattr(error, "is_on_all_ranks", False)
        if is_alone and distributed.world_size() > 1:
            raise RuntimeError("no checkpoint is saved if only a single process has failed")
        if self.is_busy:
            if error is None:
                raise ConfigurationError(
                    "a checkpoint cannot be saved in the middle of an update: save it in"
                    " on_train_batch_end, on_validation_end or on_train_epoch_end"
                )
            return {"is_busy": True}
        check_equal(self.algorithm)  # no checkpoints of processes that have diverged
        with self.stopwatch.measure("checkpoint"):
            return self.training_state()

    def training_state(self) -> dict[str, Any]:
        """Return the state of this process."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; an evaluation has none."""
        assert self.trainer is not None
        if self.trainer.training or self.trainer.state.fn == "fit":
            with restoring(self.trainer.ckpt_path):
                self.load_training_state(state_dict)

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the state of this process."""
        raise NotImplementedError

    def teardown(self, stage: str) -> None:
        """Shut down the workers."""
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        """Shut down the workers, and requeue the job after the callbacks have saved."""
        self.close()
        assert self.trainer is not None
        requeue(self.trainer, exception)

    def close(self) -> None:
        """Shut down the workers of the training environments."""
        self.is_training = False
        self.is_busy = False
        self._is_stop_agreed = False
        self.after_step.clear()
        if self.collector is not None:
            self.collector.envs.close()
            self.collector = None


def check_batch_size(batch_size: int, num_tasks: int, num_processes: int = 1) -> None:
    """Check that a batch can be divided equally among tasks and processes."""
    of_each = num_tasks * num_processes
    if batch_size >= of_each and batch_size % of_each == 0:
        return
    among = f"{num_tasks} tasks"
    if num_processes > 1:
        among = f"{num_processes} processes and {among}"
    raise ConfigurationError(
        f"data.batch_size {batch_size} cannot be divided equally among {among}:"
        f" give {nearest_multiples(batch_size, of_each)}"
    )
