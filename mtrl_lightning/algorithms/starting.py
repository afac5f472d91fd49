"""Start a run from a trained policy: what is copied of its weights and statistics.

What belongs to single tasks is known from ``HasTaskAxes`` and ``OnePerTask``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.description import CLASS_PATH, INIT_ARGS, short_name
from mtrl_lightning.algorithms.rebuilding import rebuild_spec
from mtrl_lightning.algorithms.task_match import TaskMatch
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod
from mtrl_lightning.learning.reward_scale import RewardScale
from mtrl_lightning.networks import (
    HasTaskAxes,
    OneForAll,
    OnePerTask,
    Standardize,
    TaskAxis,
    TaskModule,
)
from mtrl_lightning.saved import restoring

NewTasks = Literal["fresh", "mean"]
"""``fresh``: weights as in any new run; ``mean``: the mean of the trained tasks' weights."""
EXTRA_STATE = "_extra_state"
LISTS = ("auxiliaries", "transforms")
"""Attributes of an algorithm whose members are parts of their own."""
OWN_PACKAGES = ("mtrl_lightning", "torch")
"""Packages whose modules all declare what belongs to single tasks."""


class _Misfit(Exception):  # noqa: N818
    """A part of the checkpoint does not fit; the message says why."""


class _Row(NamedTuple):
    """A line of the table."""

    part: str
    num_weights: int
    fate: str


class _Member(NamedTuple):
    """A network that belongs to one task, among others of its kind."""

    prefix: str
    """Start of the names of its tensors."""
    siblings: str
    """Start of the names of all such networks' tensors."""
    task: int
    is_of_trained: bool
    """Whether only trained tasks have such a network."""


class _Layout:
    """What the modules of a part declare about its tensors.

    Args:
        name: of the part.
        part: the part.
    """

    def __init__(self, name: str, part: nn.Module) -> None:
        self.axes: dict[str, TaskAxis] = {}
        """The tasks' axis of each tensor that has one, by its full name."""
        self.members: list[_Member] = []
        """Networks that belong to one task."""
        self.undeclared = ""
        """Why the tasks' weights cannot be told apart; empty if they can."""
        self._add(part, f"{name}.", False, False)

    def _add(self, module: nn.Module, prefix: str, is_declared: bool, is_in_network: bool) -> None:
        kind = type(module)
        if isinstance(module, OneForAll):
            return  # built for a single task, and shared by all
        if isinstance(module, OnePerTask):
            siblings = f"{prefix}members."
            self.members += [
                _Member(f"{siblings}{index}.", siblings, task, module.is_of_trained)
                for index, task in enumerate(module.owners)
            ]
            return
        if isinstance(module, HasTaskAxes):
            self.axes |= {f"{prefix}{name}": axis for name, axis in module.task_axes().items()}
            is_declared = True
        elif any(getattr(child, "is_one_hot", False) for child in module.children()):
            self.undeclared = f"{kind.__name__} gives other networks a one-hot of the task"
        if not is_declared and kind.__module__.split(".")[0] not in OWN_PACKAGES:
            self.undeclared = (
                f"{kind.__name__} does not say which of its weights belong to single tasks, and the"
                " tasks differ: define its method task_axes (networks.HasTaskAxes), which returns"
                " {} if none do"
            )
        is_inside = is_in_network or isinstance(module, TaskModule)
        for name, child in module.named_children():
            self._add(child, f"{prefix}{name}.", is_declared, is_inside)
        if isinstance(module, TaskModule) and not is_in_network:
            self._check_own_parameters(module, prefix)

    def _check_own_parameters(self, network: TaskModule, prefix: str) -> None:
        """Check that what tasks do not share has an axis of tasks."""
        shared = {id(parameter) for parameter in network.shared_parameters()}
        of_members = tuple(member.prefix for member in self.members)
        for name, parameter in network.named_parameters(prefix.removesuffix(".")):
            is_known = name in self.axes or name.startswith(of_members)
            if id(parameter) not in shared and not is_known:
                self.undeclared = (
                    f"{type(network).__name__} does not say where {name} has the weights of single"
                    " tasks: return its axis in the method task_axes (networks.HasTaskAxes)"
                )

    def member_of(self, tensor: str) -> _Member | None:
        """Return the network of one task that a tensor belongs to; None for no such network."""
        return next((one for one in self.members if tensor.startswith(one.prefix)), None)


def start_from(
    algorithm: Algorithm, checkpoint: Mapping[str, Any], new_tasks: NewTasks = "fresh"
) -> str:
    """Give an algorithm the weights and statistics of a trained policy.

    What tasks share is copied, and of the tasks that both have, by name, what is their own. The
    networks that act must fit. All other parts, such as critics, are copied where they fit and the
    checkpoint is of the same algorithm. Counters, optimizers, generators and gradient methods stay
    as they are; targets become copies of the networks that they follow.

    Args:
        algorithm: of a new run.
        checkpoint: a loaded checkpoint, of which ``state_dict`` and ``mtrl_lightning`` are read.
        new_tasks: what tasks start with that the checkpoint does not have or has not trained.

    Returns:
        A table of what was copied, a line for each part.

    Raises:
        ConfigurationError: if the policy does not fit, or nothing of it is this run's.
    """
    one_of(get_args(NewTasks), init_new_tasks=new_tasks)
    with restoring("weights"):
        described = checkpoint["mtrl_lightning"]
        tasks = TaskMatch.by_name(rebuild_spec(described["spec"]), algorithm.spec)
        tasks.check_sizes()
        start = _Start(algorithm, checkpoint["state_dict"], described["algorithm"], tasks)
        start.copy_parts(new_tasks == "mean")
        algorithm.load_state_dict(start.state)
        for module in start.copied_modules():
            if isinstance(module, Standardize):
                module.keep_tasks(list(tasks.common))
        algorithm.set_targets()
    return start.table()


class _Start:
    """The state with which an algorithm starts.

    Args:
        algorithm: of a new run.
        saved: the checkpoint's tensors by name.
        description: of the checkpoint's algorithm.
        tasks: the tasks of both.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        saved: Mapping[str, Any],
        description: Mapping[str, Any],
        tasks: TaskMatch,
    ) -> None:
        self.state: dict[str, Any] = algorithm.state_dict()
        self._algorithm = algorithm
        self._saved = saved
        self._description = description
        self._tasks = tasks
        self._parts = dict(_parts(algorithm))
        acting = algorithm.acting_modules().items()
        self._networks = [name for name, one in acting if not isinstance(one, GradientMethod)]
        self._acting = [*self._networks, *_changes_of_observations(algorithm)]
        optional = set(self._networks) - {"encoder", "actor"}
        self._needed = [name for name in self._acting if name not in optional]
        self._parameters = {name for name, _ in algorithm.named_parameters()}
        self._copied: list[str] = []
        self._rows: list[_Row] = []

    def copied_modules(self) -> Iterator[nn.Module]:
        """Yield the modules that have weights or statistics of the checkpoint."""
        for name in self._copied:
            yield from self._parts[name].modules()

    def copy_parts(self, use_mean: bool) -> None:
        """Copy what fits into the state.

        Args:
            use_mean: whether new tasks get the mean of the trained tasks' weights.

        Raises:
            ConfigurationError: if the policy does not fit, or nothing of it is this run's.
        """
        for name in self._parts:
            try:
                self._copy_part(name, use_mean)
            except _Misfit as misfit:
                if name in self._acting:
                    raise self._refusal(str(misfit)) from misfit
                self._add_row(name, self.state, f"fresh: {misfit}")
        for name in dict.fromkeys(map(_part_of, self._saved)):
            if name and name not in self._parts:
                self._leave_out(name)
        networks = tuple(name for name in self._networks if name != "encoder")
        fates = [row.fate for row in self._rows if row.part.startswith(networks)]
        if not any("copied" in fate for fate in fates):
            raise self._refusal("none of its weights are of a task of this run")

    def _copy_part(self, name: str, use_mean: bool) -> None:
        """Copy a part.

        Raises:
            _Misfit: if it is not to be copied.
        """
        part = self._parts[name]
        own = [key for key in self.state if _part_of(key) == name]
        saved = [key for key in self._saved if _part_of(key) == name]
        if isinstance(part, GradientMethod):
            raise _Misfit("a gradient method's state is a run's own")
        if name not in self._acting and self._is_of_another_algorithm():
            raise _Misfit(f"the checkpoint is of {short_name(self._description)}")
        if own and not saved and name not in self._needed:
            self._add_row(name, self.state, "fresh: the checkpoint has none")
            return
        layout = _Layout(name, part)
        if layout.undeclared and not self._tasks.has_same_order:
            raise _Misfit(layout.undeclared)
        own_to_run = {f"{name}.{buffer}" for buffer in getattr(part, "buffers_of_each_rank", ())}
        names_there = {key: self._name_there(key, layout) for key in own if key not in own_to_run}
        siblings = tuple(member.siblings for member in layout.members)
        for key in saved:
            is_known = key in names_there.values() or key in own_to_run
            if not is_known and not key.startswith(siblings):
                raise _Misfit(f"{key} has the shape {_shape(self._saved[key])} there, none here")
        adopted = {}
        sizes: Counter[tuple[str, str]] = Counter()
        for key, there in names_there.items():
            adopted[key], sizes_of_key = self._adopted(key, there, layout, use_mean)
            sizes.update(sizes_of_key)
        self.state |= adopted
        self._copied.append(name)
        self._rows += [_Row(name + kind, size, fate) for (kind, fate), size in sizes.items()]

    def _name_there(self, key: str, layout: _Layout) -> str | None:
        """Return a tensor's name in the checkpoint; None if it belongs to a new task."""
        member = layout.member_of(key)
        if member is None:
            return key
        task = self._tasks.common.get(member.task)
        if task is None:
            return None
        spec = self._tasks.there
        owners = spec.train_tasks if member.is_of_trained else range(spec.num_tasks)
        return f"{member.siblings}{owners.index(task)}.{key.removeprefix(member.prefix)}"

    def _adopted(
        self, key: str, there: str | None, layout: _Layout, use_mean: bool
    ) -> tuple[Any, dict[tuple[str, str], int]]:
        """Return a tensor's new value, and its numbers of weights by their kind and their fate.

        Raises:
            _Misfit: if the checkpoint has none of this shape.
        """
        own = self.state[key]
        if there is None:
            return own, {(" of one task", "fresh"): _count(own)}
        if key.endswith(EXTRA_STATE):
            return self._adopted_extra_state(key, layout)
        saved = self._checked(there, own, layout.axes.get(key), self._saved)
        axis = layout.axes.get(key)
        is_weight = key in self._parameters
        if axis is None:
            kind = " of one task" if layout.member_of(key) else ""
            return saved, {(kind if is_weight else ", statistics", "copied"): own.numel()}
        use_mean = use_mean and axis.has_mean and is_weight
        num_tasks = self._tasks.here.num_tasks
        of_tasks = own.numel() // own.shape[axis.axis] * axis.block * num_tasks
        kind = ", tasks' own" if is_weight else ", tasks' statistics"
        sizes = {("", "copied"): own.numel() - of_tasks, (kind, self._fate(use_mean)): of_tasks}
        adopted = self._tasks.adopt(own, saved, axis, use_mean)
        return adopted, {name: size for name, size in sizes.items() if size}

    def _adopted_extra_state(
        self, key: str, layout: _Layout
    ) -> tuple[Any, dict[tuple[str, str], int]]:
        """Return an extra state with what is declared of it; the rest is a run's own."""
        declared = [name for name in layout.axes if name.startswith(f"{key}.")]
        if not declared:
            return self.state[key], {}
        adopted = dict(self.state[key])
        saved = {f"{key}.{name}": value for name, value in self._saved.get(key, {}).items()}
        size = 0
        for full_name in declared:
            name = full_name.removeprefix(f"{key}.")
            axis = layout.axes[full_name]
            value = self._checked(full_name, adopted[name], axis, saved)
            adopted[name] = self._tasks.adopt(adopted[name], value, axis, False)
            size += _count(adopted[name])
        return adopted, {(", tasks' statistics", self._fate(False)): size}

    def _checked(
        self, there: str, own: Tensor, axis: TaskAxis | None, saved: Mapping[str, Any]
    ) -> Tensor:
        """Return a tensor of the checkpoint, in the type of this run's.

        Raises:
            _Misfit: if it has another shape.
        """
        expected = self._tasks.shape_there(own, axis)
        value = saved.get(there)
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            shape = _shape(value) if there in saved else "none"
            for_as_many = "" if expected == tuple(own.shape) else ", for as many tasks"
            raise _Misfit(f"{there} has the shape {shape} there, {expected} here{for_as_many}")
        return value.to(own)

    def _leave_out(self, name: str) -> None:
        """Report a part that this run does not have.

        Raises:
            ConfigurationError: if the policy's observations were changed by it.
        """
        # the first transform is the reward scale
        if name == "encoder" or (name.startswith("transforms.") and name != "transforms.0"):
            raise self._refusal(f"it has {name}, and this run has none")
        if not name.startswith("target_"):
            self._add_row(name, self._saved, "left out: this run has none")

    def _add_row(self, name: str, state: Mapping[str, Any], fate: str) -> None:
        size = sum(_count(value) for key, value in state.items() if _part_of(key) == name)
        if size:
            self._rows.append(_Row(name, size, fate))

    def _is_of_another_algorithm(self) -> bool:
        return bool(self._description[CLASS_PATH] != self._algorithm.description[CLASS_PATH])

    def _refusal(self, reason: str) -> ConfigurationError:
        there = {"algorithm": self._description, **self._description[INIT_ARGS]}
        here = {"algorithm": self._algorithm.description, **self._algorithm.description[INIT_ARGS]}
        differing = [
            f"{name} {short_name(there[name])} there, {short_name(here[name])} here"
            for name in ("algorithm", "encoder", "actor")
            if _class(there.get(name)) and _class(there.get(name)) != _class(here.get(name))
        ]
        classes = f" ({'; '.join(differing)})" if differing else ""
        return ConfigurationError(
            f"a run cannot start from this policy: {reason}{classes}. Give the run the networks of"
            " the policy, as in the config.yaml of its folder, or leave out init_from"
        )

    def _fate(self, use_mean: bool) -> str:
        """Return what becomes of the tasks' own weights."""
        num_common = len(self._tasks.common)
        num_new = len(self._tasks.new)
        numbers = {"copied": num_common, "mean of the trained" if use_mean else "fresh": num_new}
        return ", ".join(f"{number} {fate}" for fate, number in numbers.items() if number)

    def table(self) -> str:
        """Return a line for each part, and one for each kind of tasks."""
        there = self._tasks.there
        here = self._tasks.here
        new = [here.task_names[task] for task in self._tasks.new]
        trained = {there.task_names[task] for task in there.train_tasks}
        groups = {
            "Tasks copied": [here.task_names[task] for task in self._tasks.common],
            "New tasks": [name for name in new if name not in there.task_names],
            "New tasks, not trained in the checkpoint": [n for n in new if n in there.task_names],
            "Left out, not in this run": sorted(trained - set(here.task_names)),
        }
        lines = [f"{group}: {', '.join(names)}" for group, names in groups.items() if names]
        width = max(len(row.part) for row in self._rows)
        lines += [f"  {row.part:<{width}} {row.num_weights:>11,}  {row.fate}" for row in self._rows]
        return "\n".join(lines)


def _parts(algorithm: Algorithm) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of an algorithm by name; targets follow others if ``set_targets`` is its."""
    has_targets = type(algorithm).set_targets is not Algorithm.set_targets
    for name, part in algorithm.named_children():
        if name in LISTS:
            yield from ((f"{name}.{index}", member) for index, member in part.named_children())
        elif not (has_targets and name.startswith("target_")):
            yield name, part


def _changes_of_observations(algorithm: Algorithm) -> list[str]:
    """Return the names of the transforms that are no reward scale."""
    transforms = enumerate(algorithm.transforms)
    return [f"transforms.{i}" for i, one in transforms if not isinstance(one, RewardScale)]


def _part_of(key: str) -> str:
    """Return the part of a tensor; empty for one of the algorithm itself, such as a counter."""
    names = key.split(".")
    return ".".join(names[: 2 if names[0] in LISTS else 1]) if len(names) > 1 else ""


def _class(described: Any) -> Any:
    return described.get(CLASS_PATH) if isinstance(described, Mapping) else None


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else "none"


def _count(value: Any) -> int:
    """Return how many numbers a tensor has, or the tensors of an extra state together."""
    values: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    return sum(tensor.numel() for tensor in values if isinstance(tensor, Tensor))
