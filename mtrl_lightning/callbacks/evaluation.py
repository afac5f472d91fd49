"""Evaluate every task on a schedule, and for ``validate``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.progress import shows_progress
from mtrl_lightning.callbacks.trainer_options import check_early_stopping
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.envs.benchmarks.benchmark import tasks_of
from mtrl_lightning.envs.vector.vector import default_num_workers
from mtrl_lightning.errors import (
    EnvironmentFaultError,
    Interrupted,
    PolicyFaultError,
    RestartsExhaustedError,
)
from mtrl_lightning.formats import text_table
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout import Evaluation, Evaluator
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.run.registered import StepAction
from mtrl_lightning.schedules import Every
from mtrl_lightning.types import Policy

COLUMNS = {"success": "7.2f", "success_last": "12.2f", "return": "9.1f", "score": "6.3f"}
"""The columns of the table that an evaluation prints, and the formats of their values."""


class EvaluationCallback(SessionCallback):
    """Run test episodes of every evaluated split, log the results and print a table of each.

    Several processes share the environments out, and all get the results.

    Args:
        every: environment steps between two evaluations; there is one at the end, too.
        at_start: whether there is one before the first environment step, too.
        num_episodes: test episodes per task; 50 visit each of MetaWorld's goals once.
        envs_per_task: environments per task, stepped together.
        num_workers: worker processes; null for all cores, 0 for this process.
        timeout: seconds to wait for a worker before it counts as hung.
        max_restarts: how often, from one start of the program to its end, an evaluation is repeated
            because an environment or its worker broke. At the next fault the run saves and ends.
    """

    key = "evaluation"

    def __init__(
        self,
        every: int = 100_000,
        num_episodes: int = 10,
        envs_per_task: int = 1,
        num_workers: int | None = None,
        timeout: float = 300.0,
        max_restarts: int = 10,
        at_start: bool = False,
    ) -> None:
        above(0, prefix="evaluation.", timeout=timeout)
        at_least(0, prefix="evaluation.", max_restarts=max_restarts)
        self._every = Every(every, "evaluation.every")
        self._num_episodes = num_episodes
        self._envs_per_task = envs_per_task
        self._num_workers = num_workers
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._at_start = at_start
        self._evaluators: list[Evaluator] = []
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare an evaluator for each split but the first, which is trained on."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        self.session.after_updates["evaluate"] = StepAction(
            self.evaluate_if_due, self.evaluate_at_start
        )
        benchmark = self.session.benchmark
        if stage == TrainerFn.FITTING:
            check_early_stopping(trainer, metric_names(benchmark))
        self._evaluators = []
        for split in benchmark.splits[1:]:
            num_workers = self._num_workers
            if num_workers is None:
                num_envs = len(tasks_of(benchmark, split)) * self._envs_per_task
                num_envs_here = -(-num_envs // distributed.world_size())
                num_workers = default_num_workers(num_envs_here, 0, distributed.local_size())
            evaluator = Evaluator(
                benchmark,
                num_episodes=self._num_episodes,
                split=split,
                envs_per_task=self._envs_per_task,
                num_workers=num_workers,
                share=(distributed.rank(), distributed.world_size()),
                timeout=self._timeout,
                max_restarts=self._max_restarts,
                on_restart=self._note_restart,
                progress=shows_progress(trainer),
            )
            self._evaluators.append(evaluator)
        if stage == TrainerFn.VALIDATING:
            self.session.is_restoring = trainer.ckpt_path is not None

    def _note_restart(self, reason: str) -> None:
        self.session.local_counters.worker_restarts += 1
        distributed.warn(f"the evaluation is repeated with new environments: {reason}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate at the end if something else stopped the training."""
        if self.session.evaluated_at != self.session.counters.env_steps:
            self._evaluate()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate for ``validate``; ``Trainer.validate`` returns the metrics logged here."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            if self.session.algorithm.untrained_summary:
                rank_zero_info(self.session.algorithm.untrained_summary)
            self._evaluate()
            # it returns the metrics of loggers: there are none, as their rows would lack env_steps
            trainer.loggers = []
            pl_module.log_dict(self.session.results)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the trainer its loggers back."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            trainer.loggers = self.session.loggers

    def evaluate_at_start(self) -> None:
        """Evaluate before the first environment step if that is configured; not twice."""
        if self._at_start and self.session.evaluated_at != 0:
            self._evaluate()

    def evaluate_if_due(self, env_steps: int, at_end: bool) -> None:
        """Evaluate when it is due, and at the end."""
        before = self._every.state_dict()
        if self._every(env_steps) or at_end:
            try:
                self._evaluate()
            except (Interrupted, RestartsExhaustedError):
                self._every.load_state_dict(before)  # the continued run evaluates first
                raise

    def _evaluate(self) -> None:
        session = self.session
        session.is_restoring = False
        results: dict[str, float] = {}
        policy = with_action_transforms(session.algorithm, session.action_transforms)
        self._call_in_fit("on_validation_start", "on_validation_epoch_start")
        for evaluator in self._evaluators:
            with session.stopwatch.measure("evaluate"):
                evaluation = self._evaluate_split(evaluator, policy)
            results |= evaluation.metrics(session.spec.task_names)
            if distributed.rank() == 0:
                steps = session.counters.env_steps
                unit = session.algorithm.step_unit
                tqdm.write(table(evaluation, session.spec.task_names, steps, unit))
        session.results = results
        session.evaluated_at = session.counters.env_steps
        assert self._trainer is not None
        if self._trainer.state.fn == TrainerFn.FITTING:
            session.log(results)
            for logger in session.loggers:
                logger.save()
            for call in session.after_evaluation:
                call()
            metrics = {name: torch.tensor(value) for name, value in results.items()}
            self._trainer.callback_metrics.update(metrics)
        self._call_in_fit("on_validation_epoch_end", "on_validation_end")
        # a callback such as early stopping may have asked one process to end the run; all wait for
        # the first one's videos
        with distributed.extended_timeout():
            self._trainer.should_stop = distributed.is_any(self._trainer.should_stop)

    def _evaluate_split(self, evaluator: Evaluator, policy: Policy) -> Evaluation:
        session = self.session
        if distributed.world_size() == 1:
            return evaluator.evaluate(policy, session.check_signals)
        # processes have different numbers of steps: a signal is looked at when all are done
        faults = (RestartsExhaustedError, EnvironmentFaultError, PolicyFaultError)
        with distributed.extended_timeout(), distributed.raise_on_all_ranks(*faults):
            finished = evaluator.run(policy)
        return evaluator.summarize(one for part in distributed.gather(finished) for one in part)

    def _call_in_fit(self, *hooks: str) -> None:
        """Call Lightning's hooks of a validation, for callbacks such as ``EarlyStopping``.

        ``Trainer.validate`` calls them itself.
        """
        trainer = self._trainer
        assert trainer is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        algorithm = self.session.algorithm
        for hook in hooks:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                getattr(callback, hook)(trainer, algorithm)
            getattr(algorithm, hook)()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the last results."""
        return {
            "every": self._every.state_dict(),
            "results": self.session.results,
            "env_steps": self.session.evaluated_at,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the last results."""
        self._every.load_state_dict(state_dict["every"])
        self.session.results = dict(state_dict["results"])
        self.session.evaluated_at = state_dict["env_steps"]

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the workers."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the workers."""
        self._close()

    def _close(self) -> None:
        for evaluator in self._evaluators:
            evaluator.close()


def table(
    evaluation: Evaluation,
    task_names: tuple[str, ...],
    env_steps: int,
    unit: str = "env steps",
) -> str:
    """Return a text table of success, return and score of a split's tasks, and their averages.

    Its columns are the success in any step, the success in the last step, the return and the score;
    a benchmark without success or without a score has no such columns.
    """
    values = {name: (COLUMNS[name], v_T) for name, v_T in evaluation.values().items()}
    lines = [["task", *values]]
    for index, task in enumerate(evaluation.names(task_names)):
        lines.append([task, *(f"{v_T[index]:{form}}" for form, v_T in values.values())])
    lines.append(["average", *(f"{v_T.mean():{form}}" for form, v_T in values.values())])
    *rows, averages = text_table(lines, num_texts=1).splitlines()
    title = f"{evaluation.split} after {env_steps:,} {unit}"
    return "\n".join([title, *rows, "-" * len(rows[0]), averages])
