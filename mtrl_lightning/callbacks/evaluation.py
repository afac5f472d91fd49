"""Evaluate every task on a schedule, and for ``validate``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from tqdm import tqdm

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import data_of, log, step_complete
from mtrl_lightning.callbacks.signals import Interrupted, check_signals
from mtrl_lightning.envs.vector import default_num_workers
from mtrl_lightning.errors import ConfigurationError, RestartsExhaustedError
from mtrl_lightning.rollout import Evaluation, Evaluator
from mtrl_lightning.schedules import Every


class EvaluationCallback(Callback):
    """Run test episodes of every task, log the results and print them as a table.

    Args:
        every: environment steps between two evaluations; there is one at the end, too.
        num_episodes: test episodes a task; 50 visit each of MetaWorld's goals once.
        envs_per_task: copies of each task's environment, stepped together.
        num_workers: worker processes; null for all cores, 0 for this process.
        timeout: seconds to wait for a worker before it counts as hung.
        max_restarts: how often, from one start of the program to its end, an evaluation begins anew
            because an environment or its worker broke. At the next fault the run saves and ends.

    Raises:
        ConfigurationError: if a number is out of range.
    """

    def __init__(
        self,
        every: int = 100_000,
        num_episodes: int = 10,
        envs_per_task: int = 1,
        num_workers: int | None = None,
        timeout: float = 300.0,
        max_restarts: int = 10,
    ) -> None:
        if timeout <= 0 or max_restarts < 0:
            raise ConfigurationError(
                f"evaluation.timeout is {timeout}: give a number above 0; evaluation.max_restarts"
                f" is {max_restarts}:"
                " give 0 or more"
            )
        self._every = Every(every, "evaluation.every")
        self._options: dict[str, Any] = {
            "num_episodes": num_episodes,
            "envs_per_task": envs_per_task,
        }
        self._num_workers = num_workers
        self._supervision: dict[str, Any] = {"timeout": timeout, "max_restarts": max_restarts}
        self.made_up = False
        """Whether this run began with an evaluation that an interruption had kept the former one from."""
        self._evaluators: list[Evaluator] = []
        self.results: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.env_steps = -1
        """When that was."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare an evaluator for each split but the first, which is trained on."""
        benchmark = data_of(trainer).benchmark
        envs = benchmark.spec.num_tasks * self._options["envs_per_task"]
        workers = (
            default_num_workers(envs, spare=0) if self._num_workers is None else self._num_workers
        )
        assert isinstance(pl_module, Algorithm)
        counters = pl_module.counters

        def on_restart(reason: str) -> None:
            counters.worker_restarts += 1
            rank_zero_warn(f"the evaluation begins anew with new environments: {reason}")

        options = self._options | self._supervision
        self._evaluators = [
            Evaluator(benchmark, split=split, num_workers=workers, on_restart=on_restart, **options)
            for split in benchmark.splits[1:]
        ]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate when it is time, and at the end."""
        assert isinstance(pl_module, Algorithm)
        if step_complete(trainer):
            self._evaluate_if_due(trainer, pl_module, at_end=trainer.should_stop)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate first if an interruption kept the run from it."""
        assert isinstance(pl_module, Algorithm)
        if pl_module.counters.updates > 0 and step_complete(trainer):
            before = self.env_steps
            self._evaluate_if_due(trainer, pl_module)
            self.made_up = self.env_steps != before

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate at the end if something else stopped the training."""
        assert isinstance(pl_module, Algorithm)
        if self.env_steps != pl_module.counters.env_steps:
            self._evaluate(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate for ``validate``; what is logged here is what ``Trainer.validate`` returns."""
        assert isinstance(pl_module, Algorithm)
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._evaluate(trainer, pl_module)
            pl_module.log_dict(self.results, logger=False)

    def _evaluate_if_due(
        self, trainer: Trainer, algorithm: Algorithm, at_end: bool = False
    ) -> None:
        before = self._every.state_dict()
        if self._every(algorithm.counters.env_steps) or at_end:
            try:
                self._evaluate(trainer, algorithm)
            except (Interrupted, RestartsExhaustedError):
                self._every.load_state_dict(
                    before
                )  # `on_train_start` of the continued run makes up for it
                raise

    def _evaluate(self, trainer: Trainer, algorithm: Algorithm) -> None:
        env_steps = algorithm.counters.env_steps
        results: dict[str, float] = {}
        for evaluator in self._evaluators:
            with algorithm.stopwatch.measure("evaluate"):
                evaluation = evaluator.evaluate(algorithm, on_step=lambda: check_signals(trainer))
            results |= evaluation.metrics(algorithm.spec.task_names)
            _print(table(evaluation, algorithm.spec.task_names, env_steps))
        self.results, self.env_steps = results, env_steps
        if trainer.state.fn == TrainerFn.FITTING:
            log(trainer, results, env_steps)
            for logger in trainer.loggers:
                logger.save()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the last results."""
        return {
            "every": self._every.state_dict(),
            "results": self.results,
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the last results."""
        self._every.load_state_dict(state_dict["every"])
        self.results, self.env_steps = dict(state_dict["results"]), state_dict["env_steps"]

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


def table(evaluation: Evaluation, task_names: tuple[str, ...], env_steps: int) -> str:
    """Return success in any step, success in the last step and return of every task, and their averages, as text."""
    rows = [
        (name, evaluation.success_T[i], evaluation.success_last_T[i], evaluation.return_T[i])
        for i, name in enumerate(task_names)
    ]
    rows.append(
        (
            "average",
            *(
                v.mean()
                for v in (evaluation.success_T, evaluation.success_last_T, evaluation.return_T)
            ),
        )
    )
    width = max(len(name) for name, *_ in rows)
    head = f"{evaluation.split} after {env_steps:,} env steps"
    lines = [head, f"{'task':<{width}}  success  success_last     return"]
    lines += [
        f"{name:<{width}}  {any_:7.2f}  {last:12.2f}  {return_:9.1f}"
        for name, any_, last, return_ in rows
    ]
    lines.insert(-1, "-" * len(lines[1]))
    return "\n".join(lines)


@rank_zero_only
def _print(text: str) -> None:
    tqdm.write(text)
