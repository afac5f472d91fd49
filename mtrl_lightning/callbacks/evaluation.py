"""Evaluate every task in Lightning's validation loop, in ``fit``, ``validate`` and ``test``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm

from mtrl_lightning.callbacks.metrics_file import log_row
from mtrl_lightning.callbacks.rollout import data_of, is_fitting
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.data import EnvData, TaskData
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, tasks_of
from mtrl_lightning.envs.vector.vector import default_num_workers
from mtrl_lightning.errors import (
    ConfigurationError,
    EnvironmentFaultError,
    PolicyFaultError,
    RestartsExhaustedError,
)
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout import Evaluation, Evaluator
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.rollout.evaluator import metric_prefix
from mtrl_lightning.schedules import Every, round_up
from mtrl_lightning.transitions import Policy, step_unit
from mtrl_lightning.utils.progress import shows_progress
from mtrl_lightning.utils.text import text_table, with_interval

NEVER = 2**62
"""A ``val_check_batch`` that no run reaches; ``inf`` would mean the end of each epoch."""
COLUMNS = {"success": "7.2f", "success_last": "12.2f", "return": "9.1f", "score": "6.3f"}
"""The columns of the table printed by an evaluation, and their formats."""


class EvaluationCallback(Callback):
    """Run test episodes of every evaluated split, log the results and print a table of each.

    An evaluation is one batch of Lightning's validation loop, in ``fit``, ``validate`` and
    ``test``; its results are in ``trainer.callback_metrics``. ``test`` visits every goal of a task
    once. The environments are divided among processes, and all processes get the results.

    Args:
        every: environment steps between two evaluations; there is always one at the end. None for
            ``trainer.val_check_interval`` if it is set, otherwise for about ten evaluations.
        num_episodes: test episodes per task; 50 visit each of MetaWorld's goals once.
        envs_per_task: environments per task, stepped together.
        num_workers: worker processes; None for one per core, 0 to use this process.
        timeout: seconds after which an unresponsive worker counts as hung.
        max_restarts: number of times an evaluation is repeated after a fault of an environment or
            its worker, counted since the program started. The next fault saves and ends the run.
        at_start: whether to also evaluate before the first environment step.
    """

    order: ClassVar[int] = 2

    def __init__(
        self,
        every: int | None = None,
        num_episodes: int = 10,
        envs_per_task: int = 1,
        num_workers: int | None = None,
        timeout: float = 300.0,
        max_restarts: int = 10,
        at_start: bool = False,
    ) -> None:
        above(0, prefix="evaluation.", timeout=timeout)
        at_least(0, prefix="evaluation.", max_restarts=max_restarts)
        at_least(1, prefix="evaluation.", num_episodes=num_episodes, envs_per_task=envs_per_task)
        self._every = None if every is None else Every(every, "evaluation.every")
        self._num_episodes = num_episodes
        self._envs_per_task = envs_per_task
        self._num_workers = num_workers
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._at_start = at_start
        self._evaluators: list[Evaluator] = []
        self._is_due = False
        """Whether an evaluation follows this batch; a run resumed here starts with it."""
        self.results: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.success_intervals: dict[str, tuple[float, float]] = {}
        """95 % confidence intervals of the last evaluation's success, by metric name."""
        self.evaluated_at = -1
        """Environment steps at the last evaluation."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create an evaluator for each split except the first, which is used for training."""
        data = data_of(trainer)
        interval = trainer.val_check_interval
        has_interval = interval != 1.0
        if has_interval and not isinstance(interval, int):
            raise ConfigurationError(
                f"trainer.val_check_interval is {interval}: give a number of batches, or set"
                " evaluation.every in environment steps"
            )
        if self._every is not None and has_interval:
            raise ConfigurationError(
                f"trainer.val_check_interval {interval} and evaluation.every"
                f" {self._every.interval} are mutually exclusive: set only one"
            )
        if self._every is None and not has_interval:
            self._every = Every(_default_interval(data, self._num_episodes))
        self._close()
        self._evaluators = self._make_evaluators(trainer, self._num_episodes)

    def _make_evaluators(self, trainer: Trainer, num_episodes: int) -> list[Evaluator]:
        data = data_of(trainer)
        is_trial = trainer.fast_dev_run  # type: ignore[attr-defined]
        evaluators = []
        for split in data.benchmark.splits[1:]:
            episodes = num_episodes
            if trainer.state.fn == TrainerFn.TESTING:
                episodes = max(episodes, num_goals(data.benchmark))
            num_workers = self._num_workers
            if num_workers is None:
                num_envs = len(tasks_of(data.benchmark, split)) * self._envs_per_task
                num_envs_here = -(-num_envs // distributed.world_size())
                num_workers = default_num_workers(num_envs_here, 0, distributed.local_size())

            def note_restart(reason: str) -> None:
                data.local_counters.worker_restarts += 1
                distributed.warn(f"the evaluation is repeated with new environments: {reason}")

            evaluators.append(
                Evaluator(
                    data.benchmark,
                    num_episodes=1 if is_trial else episodes,
                    split=split,
                    envs_per_task=self._envs_per_task,
                    num_workers=num_workers,
                    share=(distributed.rank(), distributed.world_size()),
                    timeout=self._timeout,
                    max_restarts=self._max_restarts,
                    on_restart=note_restart,
                    progress=shows_progress(trainer),
                )
            )
        return evaluators

    # schedule

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run an evaluation that was due at the checkpoint, or the one before the first step."""
        if self._every is not None:
            trainer.val_check_batch = NEVER
        data = data_of(trainer)
        is_first = self._at_start and data.counters.env_steps == 0 and self.evaluated_at != 0
        if (self._is_due or is_first) and trainer.enable_validation:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let Lightning validate after this batch if an evaluation is due."""
        data = data_of(trainer)
        if self._every is None:
            num_batches = trainer.fit_loop.total_batch_idx + 1
            is_due = num_batches % int(trainer.val_check_interval) == 0
        else:
            is_due = data.is_step_finished and self._every(data.counters.env_steps)
            trainer.val_check_batch = 1 if is_due else NEVER
        # Lightning validates if should_stop is set, but not at its own limits
        if _is_last_batch(trainer, data):
            is_due, trainer.val_check_batch = True, 1
        self._is_due = is_due or trainer.should_stop

    # results

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate; in ``test``, all goals."""
        data = data_of(trainer)
        algorithm = data.algorithm
        evaluators = self._evaluators
        if trainer.sanity_checking:
            num_episodes = min(int(trainer.num_sanity_val_steps), self._num_episodes)
            evaluators = self._make_evaluators(trainer, num_episodes)
        elif not is_fitting(trainer) and algorithm.untrained.summary:
            rank_zero_info(algorithm.untrained.summary)
        env_steps = algorithm.counters.env_steps
        policy = with_action_transforms(algorithm, data.action_transforms)
        results: dict[str, float] = {}
        intervals: dict[str, tuple[float, float]] = {}
        for evaluator in evaluators:
            with data.stopwatch.measure("evaluate"):
                evaluation = _evaluate_split(evaluator, policy, data)
            results |= evaluation.metrics()
            if trainer.state.fn != TrainerFn.FITTING:
                intervals |= evaluation.success_intervals()
            if distributed.rank() == 0:
                unit = step_unit(algorithm.kind)
                tqdm.write(table(evaluation, env_steps, unit, intervals))
        if trainer.sanity_checking:
            for evaluator in evaluators:
                evaluator.close()
            return
        self._is_due = False
        self.results = results
        self.success_intervals = intervals
        self.evaluated_at = env_steps
        # log_row passes them to the loggers with environment steps, in double precision
        pl_module.log_dict(results, logger=False, sync_dist=distributed.world_size() > 1)
        if is_fitting(trainer):
            log_row(trainer, env_steps, results)
            for logger in trainer.loggers:
                logger.save()

    on_test_epoch_end = on_validation_epoch_end

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the last results."""
        return {
            "every": None if self._every is None else self._every.state_dict(),
            "is_due": self._is_due,
            "results": self.results,
            "env_steps": self.evaluated_at,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the last results."""
        if self._every is not None and state_dict["every"] is not None:
            self._every.load_state_dict(state_dict["every"])
        self._is_due = state_dict["is_due"]
        self.results = dict(state_dict["results"])
        self.evaluated_at = state_dict["env_steps"]

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Shut down the workers."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Shut down the workers."""
        self._close()

    def _close(self) -> None:
        for evaluator in self._evaluators:
            evaluator.close()


def _evaluate_split(evaluator: Evaluator, policy: Policy, data: TaskData) -> Evaluation:
    if distributed.world_size() == 1:
        return evaluator.evaluate(policy, data.check_signals)
    # processes run different numbers of steps: signals are checked when all have finished
    faults = (RestartsExhaustedError, EnvironmentFaultError, PolicyFaultError)
    with distributed.raise_on_all_ranks(*faults):
        finished = evaluator.run(policy)
    return evaluator.summarize(one for part in distributed.gather(finished) for one in part)


def _is_last_batch(trainer: Trainer, data: TaskData) -> bool:
    """Return whether one of Lightning's own limits ends training after this batch."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    is_last_epoch = trainer.max_epochs == trainer.current_epoch + 1
    is_over = data.kind == "on-policy" and data.is_step_finished
    return is_last_epoch and (is_over or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _default_interval(data: TaskData, num_episodes: int) -> int:
    """Return a tenth of the run, or more if evaluations would make more steps than training."""
    benchmark = data.benchmark
    steps = sum(
        num_episodes * benchmark.horizon_of(split) * len(tasks_of(benchmark, split))
        for split in benchmark.splits[1:]
    )
    if not isinstance(data, EnvData):
        steps = 0  # offline training makes no environment steps to compare with
    return round_up(max(1, steps, data.total_steps // 10))


def num_goals(benchmark: Benchmark) -> int:
    """Return the number of test episodes that visit each goal of a task once; 1 if unknown."""
    return int(benchmark.spec.protocol.get("num_goals", 1))


def table(
    evaluation: Evaluation,
    env_steps: int,
    unit: str = "env steps",
    intervals: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Return a text table of the results of a split's tasks, and their averages.

    Its columns are the success in any step, the success in the last step, the return and the score,
    if the benchmark has them.

    Args:
        evaluation: results of the split.
        env_steps: environment steps with which the policy was trained.
        unit: unit of these steps.
        intervals: confidence intervals by metric name.
    """
    prefix = metric_prefix(evaluation.split)

    def cell(name: str, value: float, task: str = "") -> str:
        bounds = (intervals or {}).get(f"{prefix}/{name}{task}")
        return f"{value:{COLUMNS[name]}}" if bounds is None else with_interval(value, bounds)

    values = evaluation.values()
    lines = [["task", *values]]
    for index, task in enumerate(evaluation.task_names):
        cells = [cell(name, float(v_T[index]), f"/{task}") for name, v_T in values.items()]
        lines.append([task, *cells])
    lines.append(["average", *(cell(name, float(v_T.mean())) for name, v_T in values.items())])
    *rows, averages = text_table(lines, num_texts=1).splitlines()
    title = f"{evaluation.split} after {env_steps:,} {unit}"
    return "\n".join([title, *rows, "-" * len(rows[0]), averages])
