"""Weights & Biases over environment steps, each point once however often a run continues."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from mtrl_lightning.callbacks.loggers.csv_logger import with_env_steps
from mtrl_lightning.errors import ConfigurationError

EMPTY_NOTE = {"env_steps": -1, "written_env_steps": -1, "wandb_step": -1}
"""The last row that W&B received, the last one that is in its offline file, its own step."""

SECONDS_UNTIL_WRITTEN = 60.0
"""A row that was logged this long ago is in W&B's offline file, which W&B writes every 15 s."""

SECONDS_UNTIL_STOP_IS_KNOWN = 17.0
"""A run asks W&B every 15 s whether it is to stop."""
LARGER_IS_BETTER = ("success", "return", "score")
"""Parts of the names of metrics whose largest value is a run's best."""


def sweep_run_id() -> str | None:
    """Return the id of the run if an agent of a W&B sweep started this process; else None."""
    in_sweep = os.environ.get("WANDB_SWEEP_ID")
    return (os.environ.get("WANDB_RUN_ID") or None) if in_sweep else None


def note_name(run_id: str) -> str:
    """Return the name of the file in a run's folder that records which rows W&B has."""
    return f"wandb_logged_{run_id}.json"


class EnvStepWandbLogger(WandbLogger):
    """Log to one W&B run over environment steps, however often the training run continues.

    ``env_steps`` is a logged value and the x-axis of the charts. Each row is a step of W&B's own.
    W&B's step must always increase: it is the row's ``env_steps``, or one more than the row before
    if that is larger.

    W&B takes back nothing that was logged, in offline files neither. When a run continues from a
    checkpoint and W&B has points later than it, these stay, and points are logged from the next
    one on. A run that continues with the same options repeats the points that stay. A warning
    names their range, because with other options they differ from those of this run: give ``id``
    for a W&B run of its own. ``metrics.csv`` is always the exact record of the run.

    Rows of ``metrics.csv`` that W&B lacks are added. The rows that W&B has are known from the
    server (``wandb.Run.starting_step``) and from ``wandb_logged_<id>.json`` in ``save_dir``, which
    is written after each row. An offline run that is killed may have lost the rows of its last
    minute. They are logged a second time, which a warning reports.

    In a W&B sweep a run that SIGTERM or SLURM's signal interrupts is marked as preempting and ends
    with an exit code above 0: W&B then hands it to another agent. A run that W&B itself stops, as
    Hyperband and the web page do, ends with the exit code 0 instead.

    With ``log_artifacts`` the end of a run, interrupted or not, logs ``best.ckpt`` (``last.ckpt``
    if there is none) as a version of the artifact ``<id>-policy`` and the configuration as
    ``<id>-config``. Where a run continues another W&B run's checkpoint under an ``id`` of its own,
    its configuration names it (``continues``), and W&B's lineage graph links that run's policy if
    both are online.

    Args:
        args: Those of Lightning's ``WandbLogger``.
        log_artifacts: Whether the best checkpoint and the configuration are logged as artifacts.
        kwargs: Those of Lightning's ``WandbLogger``, by name.
    """

    _logged_env_steps = -1
    """Rows up to here are left out, because W&B has them."""
    _next_step = 0
    """W&B's step of the next row is at least this."""

    def __init__(self, *args: Any, log_artifacts: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log_artifacts = log_artifacts
        if self._wandb_init["anonymous"] is None:
            del self._wandb_init["anonymous"]  # Lightning's default, of which W&B warns
        self._note = dict(EMPTY_NOTE)
        self._unwritten: deque[tuple[float, int]] = deque()
        self.is_stopped = False
        """Whether W&B has asked this run of a sweep to stop."""
        self.is_interrupted: Callable[[], bool] = lambda: False
        """Returns whether a signal has ended the training, which then must not be sent another."""
        self.count_env_steps: Callable[[], int] | None = None
        """Returns the environment steps that the run has made; None outside of a run."""
        self._is_ending = False
        self._can_be_stopped = False
        if sweep_run_id() is not None:
            self._join_sweep()

    def _join_sweep(self) -> None:
        """Leave the project and the id to the sweep, and let W&B stop the run."""
        import wandb

        for name in ("project", "id"):
            self._wandb_init.pop(name, None)  # else W&B warns that it ignores them
        if "settings" not in self._wandb_init and "stop_fn" in wandb.Settings.model_fields:
            self._wandb_init["settings"] = wandb.Settings(stop_fn=self._stop)
            self._can_be_stopped = True

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return the W&B run, which is started at the first use.

        Raises:
            ConfigurationError: if W&B cannot start it, as without a login; with what to do.
        """
        import wandb

        try:
            return super().experiment
        except wandb.Error as error:
            reason = str(error).rstrip(".")
            raise ConfigurationError(
                f"Weights & Biases could not start a run: {reason}. Log in by `wandb login`, or"
                " store the run here, without an account, by"
                " --trainer.logger.init_args.offline true or WANDB_MODE=offline;"
                " `wandb sync` sends it later. metrics.csv alone: -c logger/csv"
            ) from error

    def _stop(self) -> None:
        """Interrupt the run, as W&B asks for when Hyperband or a user stops it.

        Its agent sends SIGTERM, too, before or after this; the run that it interrupts is saved.
        """
        self.is_stopped = True
        if not self._is_ending and not self.is_interrupted():
            os.kill(os.getpid(), signal.SIGINT)

    @rank_zero_only
    def define_metrics(self, names: Iterable[str]) -> None:
        """Make ``env_steps`` the x-axis, and let tables show the best value beside the last."""
        run = self.experiment
        run.define_metric("env_steps")
        run.define_metric("*", step_metric="env_steps")
        best = ["rollout/success", "rollout/return"]
        best += [name for name in names if _is_better_when_larger(name)]
        for name in best:
            run.define_metric(name, step_metric="env_steps", summary="max,last")

    def end_interrupted(self, code: Any) -> Any:
        """End the W&B run of a sweep whose training a signal interrupted and that is saved.

        It is called in the first process alone.

        Args:
            code: 128 plus the number of the signal, an integer.

        Returns:
            The exit code of the process: 0 if W&B stopped the run, which no agent is to repeat.
        """
        self._is_ending = True
        run = self.experiment
        if run.disabled or run.sweep_id is None:
            return code
        is_sigterm = code == 128 + signal.SIGTERM
        if code != 128 + signal.SIGINT:
            run.mark_preempting()
        if is_sigterm and not run.offline and self._can_be_stopped:
            # an agent stops a run by SIGTERM too, and W&B reports the stop only on request
            end = time.monotonic() + SECONDS_UNTIL_STOP_IS_KNOWN
            while not self.is_stopped and time.monotonic() < end:
                time.sleep(0.1)
        if self.is_stopped:
            code = 0
            rank_zero_info("W&B stopped this run of the sweep")
        # W&B's own hook at the end of the process sees no exit code in an exception
        run.finish(exit_code=code)
        return code

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a row, unless W&B has it from before the run continued.

        Args:
            metrics: The values by name. Where ``env_steps`` is not among them, as in the rows of
                Lightning's own callbacks, those of the run are added, and are the step.
            step: The environment steps of the row. None logs the row at W&B's next step.
        """
        metrics, step = with_env_steps(metrics, step, self.count_env_steps)
        if step is None:
            super().log_metrics(metrics)
            return
        if step <= self._logged_env_steps:
            return
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        row = {f"{prefix}{name}": value for name, value in metrics.items()}
        wandb_step = max(step, self._next_step)
        # committed at once: else W&B holds the row back until the next one, and a kill loses it
        self.experiment.log(row, step=wandb_step, commit=True)
        self._next_step = wandb_step + 1
        now = time.monotonic()
        self._unwritten.append((now, step))
        while now - self._unwritten[0][0] > SECONDS_UNTIL_WRITTEN:
            self._note["written_env_steps"] = self._unwritten.popleft()[1]
        self._note |= {"env_steps": step, "wandb_step": wandb_step}
        self._save_note()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Note that all rows are handed over; W&B writes them when the process ends.

        Args:
            status: how the run ended, in Lightning's words.
        """
        super().finalize(status)
        if self._log_artifacts and self._experiment is not None:
            self._log_files(self._experiment)
        if self._unwritten:
            self._unwritten.clear()
            self._note["written_env_steps"] = self._note["env_steps"]
            self._save_note()

    def _log_files(self, run: Any) -> None:
        """Log the best checkpoint and the configuration as artifacts."""
        import wandb

        folder = Path(self.save_dir or ".")
        checkpoints = [folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
        policy = next((path for path in checkpoints if path.is_file()), None)
        configs = sorted(folder.glob("config*.yaml"))
        metadata = {"env_steps": self._note["env_steps"]}
        for kind, files in (("policy", [policy] if policy else []), ("config", configs)):
            if not files:
                continue
            artifact = wandb.Artifact(
                f"{run.id}-{kind}", "model" if kind == "policy" else kind, metadata=metadata
            )
            try:
                for file in files:
                    artifact.add_file(str(file))
                run.log_artifact(artifact, aliases=["latest", *(file.stem for file in files[:1])])
            except Exception as error:  # a run that has been trained is not lost for that
                rank_zero_warn(f"the W&B artifact {artifact.name} could not be logged: {error}")

    def continue_from(self, wandb_id: str | None, env_steps: int) -> None:
        """Record the W&B run whose checkpoint is continued, if that is another one.

        Args:
            wandb_id: Its id; None if the checkpoint belongs to none.
            env_steps: The environment steps of the checkpoint.
        """
        run = self.experiment
        if wandb_id is None or wandb_id == run.id or env_steps == 0:
            return
        continues = {"wandb_id": wandb_id, "env_steps": env_steps}
        run.config.update({"continues": continues}, allow_val_change=True)
        if self._log_artifacts and not run.offline:
            try:
                run.use_artifact(f"{wandb_id}-policy:latest")
            except Exception as error:  # such as a run that logged none
                rank_zero_warn(
                    f"W&B's lineage does not show that this run continues {wandb_id}: {error}"
                )

    @rank_zero_only
    def resume_from(self, rows: list[dict[str, float]], env_steps: int) -> None:
        """Continue after the last row that W&B has, and add the rows that it lacks.

        Args:
            rows: The rows of ``metrics.csv`` up to the checkpoint, with ``env_steps`` in each.
            env_steps: The environment steps of the checkpoint; 0 for a new run.
        """
        run = self.experiment
        self._note = self._load_note()
        handed_over = self._note["env_steps"]
        if run.offline:
            logged = self._note["written_env_steps"]
        else:
            on_server = run.starting_step - 1
            logged = min(handed_over, on_server) if handed_over >= 0 else on_server
        self._next_step = max(run.starting_step, self._note["wandb_step"] + 1)
        self._logged_env_steps = logged
        if run.offline and handed_over > logged:
            rank_zero_warn(
                f"the offline W&B run {run.id} did not end properly, and may have lost its points"
                f" of steps {logged + 1} to {handed_over}: they are logged a second time"
            )
        for row in rows:
            steps = int(row["env_steps"])
            self.log_metrics({**row, "env_steps": steps}, step=steps)
        if logged > env_steps:
            rank_zero_warn(
                f"the W&B run {run.id} has points up to step {logged},"
                f" later than the checkpoint's {env_steps}. W&B cannot delete points:"
                f" its points of steps {env_steps + 1} to {logged} stay,"
                " and this run logs from the next one on."
                " With the same options it repeats them exactly;"
                " with others, metrics.csv has this run's own,"
                " and the logger's option id starts another W&B run with all of them"
            )
        else:
            # an evaluation that an interruption prevented is made at the checkpoint's own step
            self._logged_env_steps = env_steps - 1

    def _note_path(self) -> Path:
        return Path(self.save_dir or ".") / note_name(self.experiment.id)

    def _load_note(self) -> dict[str, int]:
        path = self._note_path()
        try:
            saved: dict[str, Any] = json.loads(path.read_text())
            return {name: int(saved[name]) for name in EMPTY_NOTE}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError) as error:
            rank_zero_warn(
                f"{path} cannot be read ({error}):"
                " points that an offline W&B run already has are logged a second time"
            )
        return dict(EMPTY_NOTE)

    def _save_note(self) -> None:
        if self.experiment.disabled:
            return
        path = self._note_path()
        unfinished = path.with_suffix(".unfinished")
        try:
            unfinished.write_text(json.dumps(self._note))
            os.replace(unfinished, path)
        except OSError as error:
            rank_zero_warn(
                f"{path} cannot be written ({error}):"
                " if the run continues offline, W&B may get some points a second time"
            )


def _is_better_when_larger(name: str) -> bool:
    quantity = name.split("/")[1] if "/" in name else name
    return quantity.startswith(LARGER_IS_BETTER)
