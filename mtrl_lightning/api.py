"""Train and evaluate from Python, as the command line does, in one call."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import algorithms
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.algorithms.description import import_path
from mtrl_lightning.algorithms.starting import NewTasks
from mtrl_lightning.callbacks.trainer_options import check_trainer_options
from mtrl_lightning.envs.benchmarks.benchmark import (
    Benchmark,
    OnlyTasks,
    only_split,
    tasks_of,
    trained_spec,
    with_info,
)
from mtrl_lightning.envs.benchmarks.gymnasium_tasks import GymnasiumTasks
from mtrl_lightning.envs.benchmarks.wrappers import with_layers
from mtrl_lightning.envs.names import callable_name, plain_values
from mtrl_lightning.errors import ConfigurationError, closest
from mtrl_lightning.launch.folder import find_restart_id
from mtrl_lightning.launch.sections import CALLBACKS, SECTIONS, SEEDS, complete, options_of
from mtrl_lightning.launch.start import RunStart, as_list, check_start, prepare
from mtrl_lightning.loading import LoadedPolicy, load_policy
from mtrl_lightning.rollout import (
    ActionTransform,
    CorrelatedNoise,
    EpisodeListener,
    Evaluator,
    PauseSolved,
    PolicyReuse,
)
from mtrl_lightning.rollout.action_transforms import with_action_transforms
from mtrl_lightning.run.data import ROWS_PER_TASK, TRANSITIONS_PER_TASK, MultiTaskData
from mtrl_lightning.types import Policy

WARMUP_VECTOR_STEPS = 4_000
"""Steps of all environments with random actions in MetaWorld+'s protocol."""
TRAINER = {
    "accelerator": "auto",
    "devices": 1,
    "precision": "32-true",
    "enable_model_summary": False,
}
"""Defaults of Lightning's trainer that differ from Lightning's, as in ``configs/base.yaml``."""
ROLLOUT_PARTS = {"exploration": CorrelatedNoise, "pausing": PauseSolved, "reuse": PolicyReuse}
"""Options of the section ``rollout`` that are objects, and their classes."""
DERIVED_OPTIONS = (
    "evaluation.every",
    "metrics.every",
    "checkpoint.every",
    "data.batch_size",
    "data.capacity",
    "rollout.warmup_steps",
)
"""Options that ``train`` derives from the others where they are not given."""


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
    """Changes of the policy's actions before they were sent."""

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
        policy: such as ``run.policy`` or the result of ``load_policy``; a run; or a checkpoint or a
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
    total_steps: int | None = None,
    seed: int = 1,
    name: str = "run",
    root: str = "runs",
    ckpt_path: str | None = None,
    init_from: str | Path | None = None,
    init_new_tasks: NewTasks = "fresh",
    overwrite_metrics: bool = False,
    num_workers: int | None = None,
    callbacks: Sequence[Callback] | Callback = (),
    loggers: Sequence[Logger] | Logger = (),
    **sections: Any,
) -> Run:
    """Train an algorithm on a benchmark.

    Schedules, warm-up, batch size and capacity are derived from the benchmark and ``total_steps``
    where they are not given, and printed.

    Args:
        benchmark: the tasks; or the id of a Gymnasium environment, ``"Pendulum-v1"``, as the only
            one.
        algorithm: a class such as ``SAC`` or ``PPO``, its name, or ``partial(SAC, actor=...)``.
        total_steps: environment steps after which training ends: ``rollout.total_steps``; updates
            of an offline algorithm.
        seed: of weights, environments and all random numbers, also of this process's own
            generators.
        name: name of the run: its folder is ``ROOT/NAME/version_N``.
        root: folder of all runs.
        ckpt_path: continue from this checkpoint; from the last one of this run's folder; or from
            ``last`` or ``best`` of the newest run of that name.
        init_from: a trained policy, as ``load_policy`` takes it: the run is a new one that starts
            with its weights. What belongs to a task is copied for tasks of the same name. See
            ``algorithms.starting.start_from``.
        init_new_tasks: initial weights of the other tasks: ``fresh``, or the ``mean`` of those of
            the policy's tasks.
        overwrite_metrics: whether the run may continue from an older checkpoint than its last one,
            which deletes the later rows of ``metrics.csv``.
        num_workers: worker processes that step environments, ``rollout.num_workers``; None for the
            cores but one, for all if the algorithm is on-policy.
        callbacks: further callbacks. A progress bar, such as Lightning's ``RichProgressBar``, takes
            the place of this package's.
        loggers: loggers beside ``metrics.csv``.
        sections: the options of the command line by section, each a dictionary:
            ``evaluation={"every": 5_000, "num_episodes": 20}``. ``data`` for ``MultiTaskData``,
            ``rollout`` for ``RolloutCallback``, ``evaluation``, ``metrics``, ``replay``,
            ``checkpoint`` and ``resets`` for the callbacks of these names, ``trainer`` for
            Lightning's ``Trainer``, on one device unless ``devices`` is given. A batch size is
            rounded to a multiple of the trained tasks.

    Returns:
        The run, with its folder, its last evaluation and its policy.

    Raises:
        ConfigurationError: if an option cannot work.
        EnvironmentFaultError: if environments broke more often than they may be rebuilt.
    """
    given = _given_options(sections)
    check_start(init_from, init_new_tasks, ckpt_path)
    seed = _whole("seed", seed, 0, 2**32 - 1, "; for another one in every run, randrange(2**32)")
    _set(given, "data.benchmark", benchmark, "benchmark")
    for option in SEEDS:
        _set(given, option, seed, "seed")
    for option, value, argument in (
        ("rollout.total_steps", total_steps, "total_steps"),
        ("rollout.num_workers", num_workers, "num_workers"),
        ("trainer.callbacks", callbacks, "callbacks"),
        ("trainer.logger", loggers, "loggers"),
    ):
        if value is not None and value != ():
            _set(given, option, value, argument)
    if "total_steps" not in given["rollout"]:
        raise ConfigurationError(
            "total_steps is missing: give the environment steps of the run, or the updates of an"
            " offline algorithm"
        )
    given["trainer"] = TRAINER | given["trainer"]
    options = complete(given)
    data, rollout = options["data"], options["rollout"]

    benchmark = _resolved_benchmark(data.pop("benchmark"))
    make_algorithm = _factory(algorithm)
    given_callbacks = options["trainer"].pop("callbacks")
    callbacks = _list_of(given_callbacks, Callback, "callbacks", "EarlyStopping('eval/return')")
    example = "TensorBoardLogger('logs')"
    hint = "; metrics.csv is always written"
    loggers = _list_of(options["trainer"].pop("logger"), Logger, "loggers", example, hint)
    rollout["listeners"] = _list_of(
        rollout["listeners"], EpisodeListener, "listeners", "MyListener()"
    )
    total_steps = _whole("total_steps", rollout["total_steps"], 1)
    rollout["total_steps"] = total_steps
    rollout["envs_per_task"] = _whole("rollout.envs_per_task", rollout["envs_per_task"], 1)
    check_trainer_options(options["trainer"])
    excluded = data["exclude_from_training"] or ()
    num_tasks = max(1, len(trained_spec(benchmark, excluded).train_tasks))
    num_envs = num_tasks * rollout["envs_per_task"]
    if total_steps < 2 * num_envs and data["demonstrations"] is None:
        raise ConfigurationError(
            f"total_steps is {total_steps}: give at least {2 * num_envs}, two steps of each of the"
            f" {num_envs} environments"
        )

    seed_everything(seed, verbose=False)
    benchmark = with_layers(benchmark, data["wrappers"], data["pixels"])
    # as MultiTaskData does it, so that both have the same spec
    reporting = with_info(benchmark, data["info_keys"], data["store_info"])
    model = make_algorithm(trained_spec(reporting, excluded), seed=seed)
    start = prepare(
        options,
        root=root,
        name=name,
        ckpt_path=ckpt_path,
        init_from=init_from,
        init_new_tasks=init_new_tasks,
        restart_id=find_restart_id(f"{sys.argv} {name}"),
        overwrite_metrics=overwrite_metrics,
    )
    with start.hold():
        _complete_options(options, given, start, model, benchmark)
        _print_derived(options)
        described = {
            "name": name,
            "root": root,
            "seed_everything": seed,
            "model": model.description,
            "init_from": init_from and str(init_from),
            "init_new_tasks": init_new_tasks,
            **options,
            "data": {"benchmark": dict(benchmark.spec.protocol), **data},
            "rollout": {**rollout, **_described_parts(rollout)},
        }
        # the benchmark has its wrappers and pixels already
        of_data = MultiTaskData(benchmark, **{**data, "wrappers": None, "pixels": None})
        parts = {section: kind(**options[section]) for section, kind in CALLBACKS.items()}
        trainer = start.make_trainer(
            {**options["trainer"], "logger": loggers}, [*parts.values()], described, callbacks
        )
        start.fit(trainer, model, of_data)
    return Run(
        start.location.folder,
        dict(parts["evaluation"].session.results),
        LoadedPolicy(model.cpu()),
        benchmark,
        rollout["action_transforms"] or (),
    )


def _given_options(sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the given options of every section."""
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise ConfigurationError(f"train() has no option {unknown[0]}{_similar_option(unknown[0])}")
    given: dict[str, Any] = {section: sections.get(section, {}) for section in SECTIONS}
    complete(given)  # raises for unknown options
    given = {section: dict(options) for section, options in given.items()}
    if given["trainer"].get("default_root_dir") is not None:
        raise ConfigurationError("trainer has default_root_dir: give root and name in its place")
    return given


def _similar_option(name: str) -> str:
    """Return the end of a message about an unknown argument: a question after a similar one."""
    arguments = [*inspect.signature(train).parameters][:-1]
    known = {known: known for known in [*arguments, *SECTIONS]}
    for section in SECTIONS:
        for option in options_of(section):
            known.setdefault(option, f"{section}={{{option!r}: ...}}")
    similar = closest(name, known)
    return f": did you mean {known[similar[0]]}?" if similar else ": see help(train)"


def _set(given: dict[str, dict[str, Any]], option: str, value: Any, argument: str) -> None:
    """Set an option of a section for which ``train`` has an argument."""
    section, name = option.split(".")
    other = given[section].setdefault(name, value)
    if other is not value and other != value:
        raise ConfigurationError(
            f"{argument} is {value!r} and {option} is {other!r}: give one of them"
        )


def _complete_options(
    options: Mapping[str, dict[str, Any]],
    given: Mapping[str, Mapping[str, Any]],
    start: RunStart,
    model: Algorithm,
    benchmark: Benchmark,
) -> None:
    """Derive schedules, batch size, capacity and warm-up where they are not given.

    Args:
        options: all options of the run by section, which are completed.
        given: the given ones.
        start: of the run, with its processes and the checkpoint that it continues from.
        model: the algorithm.
        benchmark: the tasks.
    """
    data, rollout = options["data"], options["rollout"]
    total_steps = rollout["total_steps"]
    num_tasks = len(model.spec.train_tasks)
    num_envs = num_tasks * rollout["envs_per_task"]
    num_episodes = options["evaluation"]["num_episodes"]
    if model.kind == "offline":
        num_episodes = 0  # its training steps no environments, with which they would be compared
    schedules = _schedules(benchmark, num_envs, total_steps, num_episodes)
    for section, every in schedules.items():
        if given[section].get("every") is None:
            options[section]["every"] = every
    if model.kind != "on-policy":
        batch_size = data["batch_size"]
        if batch_size is None:
            batch_size = ROWS_PER_TASK * num_tasks
        batch_size = _whole("data.batch_size", batch_size, 1)
        data["batch_size"] = _multiple(batch_size, num_tasks * start.processes.number)
    if model.kind == "off-policy":
        if data["capacity"] is None:
            limit = min(total_steps + num_envs, TRANSITIONS_PER_TASK * num_tasks)
            capacity = max(_multiple(limit, num_envs), data["batch_size"])
            data["capacity"] = start.location.saved_capacity() or capacity
        if rollout["warmup_steps"] is None:
            # a tenth of the run, at most as many steps as in MetaWorld+'s protocol
            tenth = math.ceil(total_steps / 10 / num_envs) * num_envs
            most = min(WARMUP_VECTOR_STEPS * num_envs, total_steps - num_envs)
            rollout["warmup_steps"] = max(num_envs, min(tenth, most))


def _print_derived(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the options that ``_complete_options`` derives, also those that are given."""
    texts: list[str] = []
    for path in DERIVED_OPTIONS:
        section, name = path.split(".")
        value = options[section][name]
        if value is not None:
            texts.append(f"{path} {value:,}")
    rank_zero_info(", ".join(texts))


def _schedules(
    benchmark: Benchmark, num_envs: int, total_steps: int, num_episodes: int
) -> dict[str, int]:
    """Return the environment steps between two evaluations, rows of metrics and checkpoints."""
    # an evaluation steps environments no more than the training between two evaluations
    steps_of_evaluation = sum(
        num_episodes * benchmark.horizon_of(split) * len(tasks_of(benchmark, split))
        for split in benchmark.splits[1:]
    )
    return {
        "evaluation": _round_up(max(1, steps_of_evaluation, total_steps // 10)),
        "metrics": _round_up(max(num_envs, total_steps // 200)),
        "checkpoint": _round_up(max(num_envs, total_steps // 5)),
    }


def _described_parts(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects among the options of ``rollout`` as ``config.yaml`` names them.

    A run that continues with others warns of them.
    """
    transforms = rollout["action_transforms"] or ()
    described: dict[str, Any] = dict.fromkeys(ROLLOUT_PARTS)
    described["action_transforms"] = [_described(one, vars(one)) for one in transforms] or None
    for name, kind in ROLLOUT_PARTS.items():
        part = rollout[name]
        if part is None:
            continue
        if not isinstance(part, kind):
            raise ConfigurationError(
                f"rollout.{name} is {part!r}: give an object, such as {kind.__name__}()"
            )
        # their other attributes are a state
        arguments = inspect.signature(type(part)).parameters
        described[name] = _described(part, [f"_{argument}" for argument in arguments])
    return described


def _described(part: Any, names: Collection[str]) -> dict[str, Any]:
    """Return an object as ``config.yaml`` names it, with its attributes of these names."""
    kind = type(part)
    attributes = vars(part)
    arguments = {name.removeprefix("_"): attributes[name] for name in names if name in attributes}
    return {
        "class_path": import_path(kind) or callable_name(kind),
        "init_args": plain_values(arguments),
    }


def _resolved_policy(given: Any) -> Policy:
    """Return the policy of a run, of a checkpoint, or an object that acts."""
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
    """Return the tasks."""
    if isinstance(benchmark, Benchmark):
        return benchmark
    if isinstance(benchmark, str):
        return GymnasiumTasks(benchmark)
    if isinstance(benchmark, (gym.Env, gym.vector.VectorEnv)):
        spec = getattr(benchmark, "spec", None)
        task = "make_env" if spec is None else repr(spec.id)
        raise ConfigurationError(
            f"{type(benchmark).__name__} is an environment, and a run makes several: give a"
            f" factory, GymnasiumTasks({{'task': {task}}}), a registered id or a function without"
            " arguments"
        )
    raise ConfigurationError(
        f"the benchmark is {benchmark!r}: give one such as MetaWorld(['reach']) or"
        " GymnasiumTasks(['Pendulum-v1'])"
    )


def _factory(algorithm: Any) -> Callable[..., Algorithm]:
    """Return the class or the function that builds the algorithm."""
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
    """Return a number as an integer."""
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if not number.is_integer() or number < least or (most is not None and number > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ConfigurationError(f"{name} is {value!r}: give a whole number {limit}{hint}")
    return int(number)


def _list_of(given: Any, kind: type, name: str, example: str, hint: str = "") -> list[Any]:
    """Return objects as ``as_list`` does.

    Raises:
        ConfigurationError: if one of them is not of this kind.
    """
    listed = as_list(given)
    if given is True or not all(isinstance(one, kind) for one in listed):
        raise ConfigurationError(
            f"{name} is {given!r}: give a list of objects, such as [{example}]{hint}"
        )
    return listed


def _round_up(number: int) -> int:
    """Return the next round number: 1, 1.5, 2, 3, ... 9 times a power of ten."""
    power = 10 ** (len(str(number)) - 1)
    step = power // 2 if 10 <= number < 2 * power else power
    return math.ceil(number / step) * step


def _multiple(number: int, of: int) -> int:
    """Return the multiple that is nearest to a number, at least one of it."""
    return max(1, round(number / of)) * of
