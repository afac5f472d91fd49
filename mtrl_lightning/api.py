"""Train and evaluate from Python: what the command line does, in one call."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import algorithms, distributed
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.allocation import AllocationLimit
from mtrl_lightning.algorithms.description import import_path
from mtrl_lightning.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    MetricsCallback,
    MetricsCSV,
    ReplayCallback,
    ResetCallback,
    RolloutCallback,
)
from mtrl_lightning.callbacks.rollout import check_copies
from mtrl_lightning.callbacks.trainer_options import check_trainer, check_trainer_options
from mtrl_lightning.envs.benchmark import Benchmark, OnlyTasks, only_split, tasks_of, with_info
from mtrl_lightning.envs.gymnasium_tasks import GymnasiumTasks
from mtrl_lightning.envs.names import callable_name, plain_values
from mtrl_lightning.envs.wrapped import with_pixels, with_wrappers
from mtrl_lightning.errors import ConfigurationError, most_similar
from mtrl_lightning.launch import TRAINER, Launch, fit, restart_origin, standard_callbacks
from mtrl_lightning.loading import LoadedPolicy, load_policy
from mtrl_lightning.replay import MultiTaskData
from mtrl_lightning.replay.datamodule import (
    ROWS_PER_TASK,
    TRANSITIONS_PER_TASK,
    trained_spec,
)
from mtrl_lightning.rollout import ActionTransform, EpisodeListener, Evaluator
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.strategy import processes_for
from mtrl_lightning.types import Policy

WARMUP_VECTOR_STEPS = 4_000
"""Steps of all environments with random actions in MetaWorld+'s protocol."""

SECTION_CLASSES = {
    "data": MultiTaskData,
    "rollout": RolloutCallback,
    "evaluation": EvaluationCallback,
    "metrics": MetricsCallback,
    "replay": ReplayCallback,
    "checkpoint": CheckpointCallback,
    "resets": ResetCallback,
    "trainer": Trainer,
}
"""The class that takes the options of each section, as the command line calls them."""
RESERVED = {
    "data": ("benchmark", "batch_size", "capacity", "seed"),
    "rollout": (
        "total_steps",
        "warmup_steps",
        "updates_per_step",
        "envs_per_task",
        "num_workers",
        "listeners",
        "seed",
    ),
    "evaluation": ("every", "num_episodes"),
    "metrics": ("every",),
    "checkpoint": ("every",),
    "trainer": (
        "default_root_dir",
        "logger",
        "callbacks",
        "accelerator",
        "devices",
        "precision",
        "strategy",
    ),
}
"""Options that ``train`` takes as arguments of its own, or sets."""


class Run(NamedTuple):
    """A run that has ended."""

    folder: Path
    """Where its metrics, checkpoints and curves are."""
    evaluation: dict[str, float]
    """Metrics of its last evaluation, such as ``eval/success``."""
    policy: LoadedPolicy
    """The trained policy with its last weights, as ``load_policy`` returns one."""
    benchmark: Benchmark
    """The tasks, in the wrappers of ``data.wrappers``."""
    action_transforms: Sequence[ActionTransform] = ()
    """What changed the policy's actions before environments were sent them."""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that was trained, with its networks and counters."""
        return self.policy.algorithm

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.folder / "checkpoints" / "last.ckpt"

    def evaluate(self, num_episodes: int = 10, **options: Any) -> dict[str, float]:
        """Run test episodes of every task; see ``evaluate``."""
        return evaluate(self, self.benchmark, num_episodes, **options)


def evaluate(
    policy: Policy | Run | str | Path,
    benchmark: Benchmark | str,
    num_episodes: int = 10,
    split: str | None = None,
    tasks: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Run test episodes of every evaluated split's tasks with the policy's best actions.

    Args:
        policy: such as ``run.policy`` or what ``load_policy`` returns; a run; or a checkpoint or a
            run's folder, which is loaded by ``load_policy``.
        benchmark: the tasks, or the id of a Gymnasium environment as the only one. If the policy
            knows its tasks by name, as these do, they are matched by name: the benchmark may have
            some of them, in any order.
        num_episodes: test episodes per task.
        split: the only one to evaluate; None for all but the first, which is trained on.
        tasks: names of the only tasks to evaluate; None for all of the benchmark.
        options: further arguments of ``Evaluator``, such as ``num_workers``.

    Returns:
        ``eval/success``, ``eval/success_last``, ``eval/return`` and ``eval/score``, as far as the
        benchmark has them, on average and for each task; ``eval_base/return`` and so on for other
        splits than ``eval``.

    Raises:
        ConfigurationError: if the split is not an evaluated one, a task is unknown, or the policy
            does not know a task.
    """
    benchmark = _resolved_benchmark(benchmark)
    policy = _resolved_policy(policy)
    if split is not None:
        benchmark = only_split(benchmark, split)
    if tasks is not None:
        benchmark = OnlyTasks(benchmark, tasks)
    metrics: dict[str, float] = {}
    for split in benchmark.splits[1:]:
        evaluator = Evaluator(benchmark, num_episodes=num_episodes, split=split, **options)
        try:
            metrics |= evaluator.evaluate(policy).metrics(benchmark.spec.task_names)
        finally:
            evaluator.close()
    return metrics


def train(
    benchmark: Benchmark | str,
    algorithm: Callable[..., Algorithm] | str,
    *,
    total_steps: int,
    seed: int = 1,
    name: str = "run",
    root: str = "runs",
    ckpt_path: str | None = None,
    batch_size: int | None = None,
    capacity: int | None = None,
    warmup_steps: int | None = None,
    updates_per_step: float | None = None,
    envs_per_task: int = 1,
    num_workers: int | None = None,
    evaluation_every: int | None = None,
    num_episodes: int = 10,
    metrics_every: int | None = None,
    checkpoint_every: int | None = None,
    callbacks: Sequence[Callback] | Callback = (),
    listeners: Sequence[EpisodeListener] = (),
    loggers: Sequence[Logger] | Logger = (),
    progress_bar: bool = True,
    accelerator: str = "auto",
    devices: int = 1,
    precision: str = "32-true",
    overwrite_metrics: bool = False,
    **sections: dict[str, Any],
) -> Run:
    """Train an algorithm on a benchmark; what is not given is derived and printed.

    Args:
        benchmark: the tasks; or the id of a Gymnasium environment, ``"Pendulum-v1"``, as the only
            one.
        algorithm: a class such as ``SAC`` or ``PPO``, its name, or ``partial(SAC, actor=...)``.
        total_steps: environment steps after which training ends.
        seed: of weights, environments and all draws, also of this process's own generators.
        name: name of the run: its folder is ``ROOT/NAME/version_N``.
        root: folder of all runs.
        ckpt_path: continue from this checkpoint; from the last one of this run's folder; or from
            ``last`` or ``best`` of the newest run of that name.
        batch_size: transitions of a batch; rounded to a multiple of the trained tasks. This and the
            next three are options of off-policy algorithms.
        capacity: transitions that the replay keeps.
        warmup_steps: environment steps with random actions before the first update.
        updates_per_step: updates per step of all environments; None for 1.
        envs_per_task: copies of each task's environment.
        num_workers: worker processes that step environments; None for the cores but one, for all if
            the algorithm is on-policy.
        evaluation_every: environment steps between two evaluations; there is one at the end, too.
        num_episodes: test episodes per task in an evaluation.
        metrics_every: environment steps between two rows of metrics.
        checkpoint_every: environment steps between two checkpoints.
        callbacks: further callbacks. A progress bar, such as Lightning's ``RichProgressBar``, takes
            the place of this package's.
        listeners: called at the events of every training episode.
        loggers: loggers beside ``metrics.csv``.
        progress_bar: whether a progress bar is shown.
        accelerator: as Lightning's ``Trainer`` takes it.
        devices: processes on this machine, each with its own device and its share of environments,
            replay and batch. Lightning starts the script again for each of them; ``torchrun`` and
            ``srun`` start them all themselves, also on several machines
            (``trainer={"num_nodes": 2}``).
        precision: ``32-true`` or ``bf16-mixed``.
        overwrite_metrics: whether the run may continue from an older checkpoint than its last one,
            which deletes the later rows of ``metrics.csv``.
        sections: further options of the parts of a run by the names of the command line's
            sections: ``data``, ``rollout``, ``evaluation``, ``metrics``, ``replay``,
            ``checkpoint``, ``resets``, each a dictionary; ``trainer`` for Lightning's ``Trainer``.

    Returns:
        The run, with its folder, its last evaluation and its policy.

    Raises:
        ConfigurationError: if an option cannot work.
        EnvironmentFaultError: if environments broke more often than they may be rebuilt.
    """
    given = _checked(sections)
    benchmark = _resolved_benchmark(benchmark)
    make_algorithm = _factory(algorithm)
    callbacks = _listed(callbacks, Callback, "callbacks", "EarlyStopping('eval/return')")
    example = "TensorBoardLogger('logs')"
    loggers = _listed(loggers, Logger, "loggers", example, "; metrics.csv is always written")
    listeners = _listed(listeners, EpisodeListener, "listeners", "MyListener()")
    seed = _whole("seed", seed, 0, 2**32 - 1, "; for another one in every run, randrange(2**32)")
    total_steps = _whole("total_steps", total_steps, 1)
    envs_per_task = _whole("envs_per_task", envs_per_task, 1)
    check_trainer_options(given["trainer"])
    excluded = given["data"].get("exclude_from_training") or ()
    num_tasks = max(1, len(trained_spec(benchmark, excluded).train_tasks))
    num_envs = num_tasks * envs_per_task
    if total_steps < 2 * num_envs:
        raise ConfigurationError(
            f"total_steps is {total_steps}: give at least {2 * num_envs}, two steps of each of the"
            f" {num_envs} environments"
        )
    seed_everything(seed, verbose=False)
    benchmark = with_wrappers(benchmark, given["data"].get("wrappers"))
    benchmark = with_pixels(benchmark, given["data"].get("pixels"))
    info_options = (given["data"].get("info_keys"), given["data"].get("store_info", False))
    reporting = with_info(benchmark, *info_options)  # as the data do, so that the specs are equal
    with AllocationLimit.of_machine():
        model = make_algorithm(trained_spec(reporting, excluded), seed=seed)
    origin = restart_origin(f"{sys.argv} {name}")
    asked_for = {"accelerator": accelerator, "devices": devices, **given["trainer"]}
    rank_timeout = given["rollout"].get("rank_timeout", distributed.RANK_TIMEOUT)
    processes = processes_for(asked_for, rank_timeout)
    with distributed.together(ConfigurationError):
        check_copies(envs_per_task, processes.number)
    launch = Launch(
        root,
        name,
        ckpt_path,
        given["replay"].get("restore", True),
        origin,
        overwrite_metrics,
        processes.number,
    )
    # an evaluation steps environments no more than the training between two evaluations
    steps_of_evaluation = sum(
        num_episodes * benchmark.horizon_of(split) * len(tasks_of(benchmark, split))
        for split in benchmark.splits[1:]
    )
    derived = {
        "evaluation_every": _round_up(max(steps_of_evaluation, total_steps // 10)),
        "metrics_every": _round_up(max(num_envs, total_steps // 200)),
        "checkpoint_every": _round_up(max(num_envs, total_steps // 5)),
    }
    if model.collection is None:
        derived |= {
            "batch_size": ROWS_PER_TASK * num_tasks,
            "capacity": min(total_steps + num_envs, TRANSITIONS_PER_TASK * num_tasks),
            "warmup_steps": _warmup_steps(total_steps, num_envs),
        }
    arguments = {
        "batch_size": batch_size,
        "capacity": launch.saved_capacity() if capacity is None else capacity,
        "warmup_steps": warmup_steps,
        "evaluation_every": evaluation_every,
        "metrics_every": metrics_every,
        "checkpoint_every": checkpoint_every,
    }
    chosen = derived | {name: value for name, value in arguments.items() if value is not None}
    if chosen.get("batch_size", 0) > 0:
        chosen["batch_size"] = _multiple(chosen["batch_size"], num_tasks * processes.number)
    if "capacity" in derived and arguments["capacity"] is None:
        chosen["capacity"] = max(_multiple(chosen["capacity"], num_envs), chosen["batch_size"])
    rank_zero_info(", ".join(f"{option} {value:,}" for option, value in chosen.items()))
    options: dict[str, dict[str, Any]] = {
        "data": {
            "batch_size": chosen.get("batch_size"),
            "capacity": chosen.get("capacity"),
            "seed": seed,
        },
        "rollout": {
            "total_steps": total_steps,
            "warmup_steps": chosen.get("warmup_steps"),
            "updates_per_step": updates_per_step,
            "envs_per_task": envs_per_task,
            "num_workers": num_workers,
            "listeners": list(listeners),
            "seed": seed,
        },
        "evaluation": {"every": chosen["evaluation_every"], "num_episodes": num_episodes},
        "metrics": {"every": chosen["metrics_every"]},
        "replay": {},
        "checkpoint": {"every": chosen["checkpoint_every"]},
        "resets": {},
        "trainer": {
            "accelerator": accelerator,
            "devices": devices,
            "strategy": processes.strategy,
            "precision": precision,
            "enable_progress_bar": progress_bar,
            "enable_model_summary": False,
            **TRAINER,
        },
    }
    options = {section: options[section] | given[section] for section in SECTION_CLASSES}
    described = {
        "name": name,
        "root": root,
        "seed_everything": seed,
        "model": model.description,
        **options,
        "data": {"benchmark": dict(benchmark.spec.protocol), **options["data"]},
    }
    action_transforms = options["rollout"].get("action_transforms") or ()
    described["rollout"] = options["rollout"] | {
        "action_transforms": [_described(transform) for transform in action_transforms] or None
    }
    with launch.hold():
        # the benchmark has its wrappers and pixels already
        of_data = {**options["data"], "wrappers": None, "pixels": None}
        data = MultiTaskData(benchmark, **of_data)
        evaluation = EvaluationCallback(**options["evaluation"])
        parts = [
            RolloutCallback(**options["rollout"]),
            evaluation,
            MetricsCallback(**options["metrics"]),
            ReplayCallback(**options["replay"]),
            CheckpointCallback(**options["checkpoint"]),
            ResetCallback(**options["resets"]),
            *standard_callbacks(True, progress_bar, origin, described, callbacks),
        ]
        launch.check(data.spec, must_match=True)
        trainer = Trainer(
            default_root_dir=str(launch.folder),
            logger=[MetricsCSV(str(launch.folder)), *loggers],
            callbacks=[*parts, *callbacks],
            **options["trainer"],
        )
        check_trainer(trainer)
        fit(trainer, model, data, launch.checkpoint)
    return Run(
        launch.folder,
        dict(evaluation.session.results),
        LoadedPolicy(model.cpu()),
        benchmark,
        action_transforms,
    )


def _described(transform: ActionTransform) -> dict[str, Any]:
    """Return an action transform as a ``config.yaml`` names it, with its attributes.

    A run that continues with another description warns of it.
    """
    kind = type(transform)
    attributes = {name.removeprefix("_"): value for name, value in vars(transform).items()}
    return {
        "class_path": import_path(kind) or callable_name(kind),
        "init_args": plain_values(attributes),
    }


def _checked(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of every section, empty where none are given.

    Raises:
        ConfigurationError: naming options that ``train`` does not have there.
    """
    known = [*inspect.signature(train).parameters][:-1]
    for name in sections:
        if name not in SECTION_CLASSES:
            hint = _question(name, [*known, *SECTION_CLASSES]) or ": see help(train)"
            raise ConfigurationError(f"train() has no option {name}{hint}")
    given: dict[str, dict[str, Any]] = {}
    for section in SECTION_CLASSES:
        options = sections.get(section, {})
        if not isinstance(options, Mapping):
            raise ConfigurationError(
                f"{section} is {options!r}: give a dictionary of its options, such as"
                f" {section}={{...}} (see help(train))"
            )
        names = [*inspect.signature(SECTION_CLASSES[section]).parameters]
        for name in options:
            if name not in names:
                hint = _question(name, names) or f": its options are {', '.join(names)}"
                raise ConfigurationError(f"{section} has no option {name!r}{hint}")
        given[section] = dict(options)
    for section, reserved in RESERVED.items():
        twice = sorted(set(given[section]) & set(reserved))
        if twice:
            raise ConfigurationError(
                f"{section} has {', '.join(twice)}: train() sets that itself; use its own arguments"
                " (see help(train))"
            )
    if "learner_threads" in given["rollout"]:
        raise ConfigurationError(
            "rollout learner_threads is an option of the command line: call torch.set_num_threads"
        )
    return given


def _question(name: str, known: Sequence[str]) -> str:
    """Return a question after the most similar name; empty if there is none."""
    similar = most_similar(name, known)
    return "" if similar is None else f": did you mean {similar}?"


def _resolved_policy(given: Any) -> Policy:
    """Return the policy of a run, of a checkpoint, or an object that acts.

    Raises:
        ConfigurationError: naming the form that works.
    """
    if isinstance(given, Run):
        return with_action_transforms(given.policy, given.action_transforms)
    if isinstance(given, (str, Path)):
        return load_policy(given)
    if not hasattr(given, "act"):
        raise ConfigurationError(
            f"the policy is {given!r}: give a run, a checkpoint, or an object with the method"
            " act(observation_ED, task_E, mode)"
        )
    return given


def _resolved_benchmark(benchmark: Any) -> Benchmark:
    """Return the tasks.

    Raises:
        ConfigurationError: naming the form that works.
    """
    if isinstance(benchmark, Benchmark):
        return benchmark
    if isinstance(benchmark, str):
        return GymnasiumTasks(benchmark)
    if isinstance(benchmark, (gym.Env, gym.vector.VectorEnv)):
        spec = getattr(benchmark, "spec", None)
        task = "make_env" if spec is None else repr(spec.id)
        raise ConfigurationError(
            f"{type(benchmark).__name__} is an environment, and a run makes several: give what"
            f" makes it, GymnasiumTasks({{'task': {task}}}), a registered id or a function without"
            " arguments"
        )
    raise ConfigurationError(
        f"the benchmark is {benchmark!r}: give one such as MetaWorld(['reach']) or"
        " GymnasiumTasks(['Pendulum-v1'])"
    )


def _factory(algorithm: Any) -> Callable[..., Algorithm]:
    """Return the class or the function that builds the algorithm.

    Raises:
        ConfigurationError: naming the form that works.
    """
    if isinstance(algorithm, Algorithm):
        name = type(algorithm).__name__
        raise ConfigurationError(
            f"the algorithm is an object of {name}, and train() builds it for the tasks and the"
            f" seed: give the class, {name}, or with options partial({name}, discount=0.97)"
        )
    if callable(algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise ConfigurationError(f"the algorithm is {algorithm!r}: give a class such as SAC")
    known = {
        name: kind
        for name, kind in vars(algorithms).items()
        if inspect.isclass(kind) and issubclass(kind, Algorithm) and kind is not Algorithm
    }
    if algorithm not in known:
        raise ConfigurationError(
            f"there is no algorithm {algorithm!r}: give one of {', '.join(known)}, or a class"
        )
    return known[algorithm]


def _whole(name: str, value: Any, least: int, most: int | None = None, hint: str = "") -> int:
    """Return a number as an integer.

    Raises:
        ConfigurationError: if it is not a whole number, or out of range.
    """
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if not number.is_integer() or number < least or (most is not None and number > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ConfigurationError(f"{name} is {value!r}: give a whole number {limit}{hint}")
    return int(number)


def _listed(given: Any, kind: type, name: str, example: str, hint: str = "") -> list[Any]:
    """Return callbacks, loggers or listeners as a list, also if a single one is given.

    Raises:
        ConfigurationError: if there is anything else among them.
    """
    if given is None or given is False:
        return []
    listed = [given] if isinstance(given, kind) else given
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    if not is_list or not all(isinstance(one, kind) for one in listed):
        raise ConfigurationError(
            f"{name} is {given!r}: give a list of objects, such as [{example}]{hint}"
        )
    return list(listed)


def _round_up(number: int) -> int:
    """Return the next round number: 1, 1.5, 2, 3, ... 9 times a power of ten."""
    power = 10 ** (len(str(number)) - 1)
    step = power // 2 if 10 <= number < 2 * power else power
    return math.ceil(number / step) * step


def _multiple(number: int, of: int) -> int:
    """Return the multiple that is nearest to a number, at least one of it."""
    return max(1, round(number / of)) * of


def _warmup_steps(total_steps: int, num_envs: int) -> int:
    """Return a tenth of the run, at most as many steps as in MetaWorld+'s protocol."""
    share = math.ceil(total_steps / 10 / num_envs) * num_envs
    return max(num_envs, min(share, WARMUP_VECTOR_STEPS * num_envs, total_steps - num_envs))
