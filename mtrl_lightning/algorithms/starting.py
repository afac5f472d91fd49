"""Start a run from a trained policy: copy its weights and statistics.

``task_axes`` declares which entries of a tensor belong to single tasks, matched by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.arguments import (
    CLASS_PATH,
    INIT_ARGS,
    OWN_CLASS,
    parameters_of,
    plain,
    short_name,
)
from mtrl_lightning.algorithms.task_match import TaskMatch
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod
from mtrl_lightning.networks import (
    HasTaskAxes,
    OneForAll,
    OnePerTask,
    Standardize,
    TaskAxis,
    TaskConditioning,
)
from mtrl_lightning.networks.network import task_axes
from mtrl_lightning.networks.one_per_task import member_name
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.updates.popart import ReturnScale
from mtrl_lightning.updates.transforms import RewardScale
from mtrl_lightning.utils.text import text_table, whole

NewTasks = Literal["fresh", "mean"]
"""``fresh``: the usual initial weights; ``mean``: the mean of the trained tasks' weights."""
LISTS = ("auxiliaries", "transforms")
"""Attributes of an algorithm whose members are copied separately."""
OWN_PACKAGES = ("mtrl_lightning", "torch")
"""Packages whose modules all declare their per-task parameters."""


class _Misfit(Exception):  # noqa: N818
    """The reason why a module of the checkpoint does not fit."""


class _Row(NamedTuple):
    """A line of the table."""

    part: str
    fate: str
    num_weights: int
    num_copied: int = 0


def start_from(
    algorithm: Algorithm, checkpoint: Mapping[str, Any], new_tasks: NewTasks = "fresh"
) -> str:
    """Initialize an algorithm with the weights and statistics of a trained policy.

    Shared weights and, matched by name, the weights of common tasks are copied. The policy's
    networks must fit. Other modules, such as critics, are copied if they fit and the checkpoint has
    the same algorithm; critics also need returns of the same scale. Counters, optimizers,
    generators and gradient methods are not copied; target networks become copies of their online
    networks.

    Args:
        algorithm: the new run's algorithm.
        checkpoint: a loaded checkpoint.
        new_tasks: initial weights of tasks that the checkpoint lacks or has not trained.

    Returns:
        A table of the copied weights, one line per module.
    """
    one_of(get_args(NewTasks), init_new_tasks=new_tasks)
    spec = EnvSpec.from_dict(checkpoint["mtrl_lightning"]["spec"])
    tasks = TaskMatch.by_name(spec, algorithm.spec)
    tasks.check_sizes()
    start = _Start(algorithm, checkpoint["state_dict"], checkpoint["hyper_parameters"], tasks)
    start.copy_parts(new_tasks == "mean")
    algorithm.load_state_dict(start.state_dict())
    for module in start.copied_modules():
        if isinstance(module, Standardize):
            module.keep_tasks(list(tasks.common))
    if algorithm.targets is not None:
        algorithm.targets.copy()
    return start.table()


class _Start:
    """The state with which an algorithm starts.

    Args:
        algorithm: the new run's algorithm.
        saved: the checkpoint's tensors by name.
        arguments: ``hyper_parameters`` of the checkpoint's algorithm.
        tasks: the tasks of both.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        saved: Mapping[str, Any],
        arguments: Mapping[str, Any],
        tasks: TaskMatch,
    ) -> None:
        self._algorithm = algorithm
        self._current = _tensors(algorithm.state_dict())
        self._saved = _tensors(saved)
        self._arguments = arguments
        self._tasks = tasks
        self._parts = dict(_parts(algorithm))
        acting = algorithm.acting_modules().items()
        self._networks = [name for name, one in acting if not isinstance(one, GradientMethod)]
        # the noise distinguishes clipped Gaussians from other policies with equal output sizes
        self._needed = [name for name in self._networks if name in ("encoder", "actor", "noise")]
        self._copied: list[str] = []
        self._rows: list[_Row] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state with the copied values."""
        state: dict[str, Any] = self._algorithm.state_dict()
        for key, value in state.items():
            if isinstance(value, Mapping):  # an extra state
                state[key] = {n: self._current.get(f"{key}.{n}", v) for n, v in value.items()}
        return state | {key: value for key, value in self._current.items() if key in state}

    def copied_modules(self) -> Iterator[nn.Module]:
        """Yield the modules that have weights or statistics of the checkpoint."""
        for name in self._copied:
            yield from self._parts[name].modules()

    def copy_parts(self, use_mean: bool) -> None:
        """Copy matching values into the state.

        Args:
            use_mean: whether new tasks get the mean of the trained tasks' weights.
        """
        for name in self._parts:
            try:
                self._copy_part(name, use_mean)
            except _Misfit as misfit:
                if name in self._networks:
                    raise self._refusal(str(misfit)) from misfit
                self._add_row(name, self._current, f"fresh: {misfit}")
        for name in dict.fromkeys(map(_part_of, self._saved)):
            if name and name not in self._parts:
                self._leave_out(name)
        networks = tuple(name for name in self._networks if name != "encoder")
        if not any(row.num_copied for row in self._rows if row.part in networks):
            names = self._tasks.there.task_names
            tasks = ", ".join(names[task] for task in self._tasks.there.train_tasks)
            raise self._refusal(
                f"none of its weights belong to a task of this run: train at least one of {tasks}"
            )

    def _copy_part(self, name: str, use_mean: bool) -> None:
        """Copy a part.

        Raises:
            _Misfit: if it does not fit or must not be copied.
        """
        part = self._parts[name]
        current = [key for key in self._current if _part_of(key) == name]
        saved = [key for key in self._saved if _part_of(key) == name]
        if isinstance(part, GradientMethod):
            raise _Misfit("the state of a gradient method is never copied")
        if name not in self._networks and self._is_of_another_algorithm():
            raise _Misfit(f"the checkpoint is of {short_name(self._arguments[OWN_CLASS])}")
        learns_returns = name == "critic" or isinstance(part, ReturnScale | RewardScale)
        if learns_returns and self._has_other_returns():
            raise _Misfit("the policy's returns have a different scale")
        if current and not saved and name not in self._needed:
            self._add_row(name, self._current, "fresh: the checkpoint has none")
            return
        axes = task_axes(part, f"{name}.")
        if not self._tasks.has_same_order:
            _check_declared(part, f"{name}.", axes, self._tasks.here.num_tasks)
        own_to_run = {f"{name}.{buffer}" for buffer in getattr(part, "buffers_of_each_rank", ())}
        # names of the checkpoint's tasks without a network of their own in this run
        left_out = set(map(member_name, self._tasks.there.task_names))
        left_out.difference_update(*(key.split(".") for key in current))
        for key in saved:
            if key not in self._current and left_out.isdisjoint(key.split(".")):
                raise _Misfit(f"this run has no {key} of shape {tuple(self._saved[key].shape)}")
        adopted = {}
        num_copied = 0
        for key in current:
            if key not in own_to_run:
                adopted[key], copied = self._adopted(key, axes.get(key), use_mean)
                num_copied += copied
        self._current |= adopted
        self._copied.append(name)
        self._add_row(name, adopted, "copied", num_copied)

    def _adopted(self, key: str, axis: TaskAxis | None, use_mean: bool) -> tuple[Tensor, int]:
        """Return a tensor for this run, and the number of copied elements.

        Raises:
            _Misfit: if the checkpoint has no tensor of this shape.
        """
        own = self._current[key]
        if axis is not None and axis.task not in (None, *self._tasks.common_names):
            return own, 0
        blocks = axis if axis is not None and axis.task is None else None
        expected = tuple(own.shape) if blocks is None else self._tasks.shape_there(own, blocks)
        if key not in self._saved:
            raise _Misfit(f"the checkpoint has no {key}")
        value = self._saved[key].to(own)
        if tuple(value.shape) != expected:
            raise _Misfit(f"{key} has shape {tuple(value.shape)} instead of {expected}")
        if blocks is None:
            return value, own.numel()
        return self._tasks.adopt(own, value, blocks, use_mean and blocks.has_mean)

    def _leave_out(self, name: str) -> None:
        """Report a module that this run does not have."""
        if name in ("encoder", "noise"):
            raise self._refusal(f"it has the module {name}, which this run lacks")
        if not name.startswith("target_"):
            self._add_row(name, self._saved, "left out: this run has none")

    def _add_row(
        self, name: str, tensors: Mapping[str, Tensor], fate: str, num_copied: int = 0
    ) -> None:
        size = sum(tensor.numel() for key, tensor in tensors.items() if _part_of(key) == name)
        if size:
            self._rows.append(_Row(name, fate, size, num_copied))

    def _is_of_another_algorithm(self) -> bool:
        return bool(self._arguments[OWN_CLASS] != self._algorithm.hyper_parameters[OWN_CLASS])

    def _has_other_returns(self) -> bool:
        """Return whether critics learn returns of a different scale than the checkpoint's."""
        defaults = {n: plain(p.default) for n, p in parameters_of(type(self._algorithm)).items()}
        there = _scale_of_returns({**defaults, **self._arguments})
        return there != _scale_of_returns({**defaults, **self._algorithm.hyper_parameters})

    def _refusal(self, reason: str) -> ConfigurationError:
        given = (self._arguments, self._algorithm.hyper_parameters)
        there, here = (short_name(one[OWN_CLASS]) for one in given)
        kinds = f" (checkpoint: {there}, run: {here})" if self._is_of_another_algorithm() else ""
        return ConfigurationError(
            f"a run cannot start from this policy: {reason}{kinds}. Configure the algorithm and"
            " networks of the policy, as in the config.yaml of its run folder, or remove init_from"
        )

    def table(self) -> str:
        """Return a line for each group of tasks, and one for each module."""
        there = self._tasks.there
        here = self._tasks.here
        new = [here.task_names[task] for task in self._tasks.new]
        trained = {there.task_names[task] for task in there.train_tasks}
        groups = {
            "Tasks copied": [here.task_names[task] for task in self._tasks.common],
            "New tasks": [name for name in new if name not in there.task_names],
            "New tasks, not trained in the checkpoint": [n for n in new if n in there.task_names],
            "Not copied, because not in this run": sorted(trained - set(here.task_names)),
        }
        lines = [f"{group}: {', '.join(names)}" for group, names in groups.items() if names]
        rows = [
            [row.part, row.fate, whole(row.num_copied), f"of {whole(row.num_weights)}"]
            for row in self._rows
        ]
        lines.append(textwrap.indent(text_table(rows, num_texts=2), "  "))
        return "\n".join(lines)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a state, those of extra states as ``KEY.ENTRY``."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        entries = {f"{key}.{n}": v for n, v in value.items()} if isinstance(value, Mapping) else {}
        tensors |= {n: v for n, v in {key: value, **entries}.items() if isinstance(v, Tensor)}
    return tensors


def _parts(algorithm: Algorithm) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of an algorithm by name, without target networks."""
    for name, part in algorithm.named_children():
        if name in LISTS:
            yield from ((f"{name}.{index}", member) for index, member in part.named_children())
        elif algorithm.targets is None or not name.startswith("target_"):
            yield name, part


def _part_of(key: str) -> str:
    """Return the module name of a tensor; empty for the algorithm's own, such as a counter."""
    names = key.split(".")
    return ".".join(names[: 2 if names[0] in LISTS else 1]) if len(names) > 1 else ""


def _check_declared(
    module: nn.Module,
    prefix: str,
    axes: Mapping[str, TaskAxis],
    num_tasks: int,
    is_inside: bool = False,
) -> None:
    """Check that user-defined modules declare which of their tensors belong to single tasks.

    Args:
        module: the module.
        prefix: prefix of its tensors' names.
        axes: all declared axes.
        num_tasks: number of tasks of this run.
        is_inside: whether a parent module declares its tensors. A task conditioning is built
            separately from its network, which cannot declare its tensors.

    Raises:
        _Misfit: if a module does not declare them.
    """
    if isinstance(module, OneForAll | OnePerTask):
        return
    kind = type(module)
    is_input = isinstance(module, TaskConditioning)
    declares = isinstance(module, HasTaskAxes) or (
        isinstance(module, TaskConditioning)
        and type(module).columns is not TaskConditioning.columns
    )
    is_own = kind.__module__.split(".")[0] in OWN_PACKAGES
    if not (is_own or declares or (is_inside and not is_input)):
        raise _Misfit(
            f"the tasks differ, and {kind.__name__} does not declare which of its tensors belong to"
            " single tasks: implement task_axes (networks.HasTaskAxes), returning {} if none do"
        )
    for name, tensor in [] if is_own else module.named_parameters(recurse=False):
        if tensor.shape[:1] == (num_tasks,) and prefix + name not in axes:
            raise _Misfit(f"the tasks differ, and {kind.__name__}.task_axes lacks {name}")
    for name, child in module.named_children():
        if not declares and isinstance(child, TaskConditioning) and child.columns(name):
            raise _Misfit(f"the tasks differ, and {kind.__name__} passes on a one-hot task ID")
        _check_declared(child, f"{prefix}{name}.", axes, num_tasks, is_inside or declares)


def _scale_of_returns(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that determine it: discount, and classes and bounds of modules."""
    given = [arguments.get(name) for name in ("return_scale", "reward_scale", "value")]
    parts = [(one[CLASS_PATH], one.get(INIT_ARGS, {}).get("bound")) for one in given if one]
    return arguments.get("discount"), parts
