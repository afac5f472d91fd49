"""Start a run from a trained policy: copy its weights and statistics.

``HasTaskAxes`` and ``OnePerTask`` declare the parameters of single tasks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.arguments import (
    CLASS_PATH,
    INIT_ARGS,
    OWN_CLASS,
    plain,
    short_name,
)
from mtrl_lightning.algorithms.task_match import TaskMatch
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import text_table, whole
from mtrl_lightning.gradients import GradientMethod
from mtrl_lightning.learning.normalization import NormalizeObservation
from mtrl_lightning.learning.popart import ReturnScale
from mtrl_lightning.learning.transforms import RewardScale
from mtrl_lightning.networks import (
    HasTaskAxes,
    OneForAll,
    OnePerTask,
    Standardize,
    TaskAxis,
    TaskModule,
)
from mtrl_lightning.signatures import parameters_of
from mtrl_lightning.spec import EnvSpec

NewTasks = Literal["fresh", "mean"]
"""``fresh``: weights as in any new run; ``mean``: the mean of the trained tasks' weights."""
EXTRA_STATE = "_extra_state"
LISTS = ("auxiliaries", "transforms")
"""Attributes of an algorithm whose members are parts of their own."""
OWN_PACKAGES = ("mtrl_lightning", "torch")
"""Packages whose modules all declare their parameters of single tasks."""
SAME_NETWORKS = "Give the run the networks of the policy, as in the config.yaml of its folder"
SAME_TASKS = "Give the run the policy's tasks in the policy's order"


class _Misfit(Exception):  # noqa: N818
    """A part of the checkpoint does not fit.

    Args:
        reason: why.
        fix: what to do, if the policy cannot be used without the part.
    """

    def __init__(self, reason: str, fix: str = SAME_NETWORKS) -> None:
        super().__init__(reason)
        self.fix = fix


class _Row(NamedTuple):
    """A line of the table."""

    part: str
    num_weights: int
    fate: str
    num_copied: int = 0
    """How many of the weights are the checkpoint's."""


class _Adopted(NamedTuple):
    """Initial value of a tensor or an extra state."""

    value: Any
    rows: list[_Row]
    """Outcome for its weights."""


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
    """Declarations of a part's modules about its tensors.

    Args:
        name: of the part.
        part: the part.
    """

    def __init__(self, name: str, part: nn.Module) -> None:
        self.axes: dict[str, TaskAxis] = {}
        """The tasks' axis of each tensor that has one, by its full name."""
        self.members: list[_Member] = []
        """Networks that belong to one task."""
        self.undeclared: _Misfit | None = None
        """Why the tasks' weights cannot be distinguished; None if they can."""
        self._add(part, f"{name}.", False, False)

    def _add(self, module: nn.Module, prefix: str, is_declared: bool, is_in_network: bool) -> None:
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
        self._check_declared(module, is_declared)
        is_declared = is_declared or isinstance(module, HasTaskAxes)
        is_inside = is_in_network or isinstance(module, TaskModule)
        for name, child in module.named_children():
            self._add(child, f"{prefix}{name}.", is_declared, is_inside)
        if isinstance(module, TaskModule) and not is_in_network:
            self._check_own_parameters(module, prefix)

    def _check_declared(self, module: nn.Module, is_parent_declared: bool) -> None:
        """Check that a module says which of its tensors have something for each task.

        Args:
            module: the module.
            is_parent_declared: whether a module around it does. A task input is built apart from
                its network, which cannot know of it.
        """
        kind = type(module)
        declares = isinstance(module, HasTaskAxes)
        is_own = kind.__module__.split(".")[0] in OWN_PACKAGES
        if not declares and any(getattr(one, "is_one_hot", False) for one in module.children()):
            self.undeclared = _Misfit(
                f"{kind.__name__} gives other networks a one-hot of the task",
                f"{SAME_TASKS}, or start from a policy with another conditioning",
            )
        if getattr(module, "is_task_input", False):
            is_one_hot = getattr(module, "is_one_hot", False) and not module.state_dict()
            if not (declares or is_own or is_one_hot):
                self.undeclared = _Misfit(
                    f"the task conditioning {kind.__name__} does not say which parts of it"
                    " belong to single tasks, and the tasks differ",
                    "Define its method task_axes (networks.HasTaskAxes), or set is_one_hot = True"
                    f" in the class if each of its features is that of one task. {SAME_TASKS}",
                )
        elif not (declares or is_own or is_parent_declared):
            self.undeclared = _Misfit(
                f"{kind.__name__} does not say which of its weights belong to single tasks, and the"
                " tasks differ",
                "Define its method task_axes (networks.HasTaskAxes), which returns {} if none do."
                f" {SAME_TASKS}",
            )

    def _check_own_parameters(self, network: TaskModule, prefix: str) -> None:
        """Check that unshared tensors have an axis of tasks."""
        shared = {id(parameter) for parameter in network.shared_parameters()}
        of_members = tuple(member.prefix for member in self.members)
        for name, parameter in network.named_parameters(prefix.removesuffix(".")):
            is_known = name in self.axes or name.startswith(of_members)
            if id(parameter) not in shared and not is_known:
                self.undeclared = _Misfit(
                    f"{type(network).__name__} does not say where {name} has the weights of single"
                    " tasks",
                    f"Return its axis in the method task_axes (networks.HasTaskAxes). {SAME_TASKS}",
                )

    def member_of(self, tensor: str) -> _Member | None:
        """Return the network of one task that a tensor belongs to; None for no such network."""
        return next((one for one in self.members if tensor.startswith(one.prefix)), None)


def start_from(
    algorithm: Algorithm, checkpoint: Mapping[str, Any], new_tasks: NewTasks = "fresh"
) -> str:
    """Give an algorithm the weights and statistics of a trained policy.

    Shared weights are copied, and those of tasks that both have, by name. The
    networks that act must fit. All other parts, such as critics, are copied where they fit and the
    checkpoint is of the same algorithm; critics only where returns have the same scale. Counters,
    optimizers, generators and gradient methods stay as they are; targets become copies of the
    networks that they follow.

    Args:
        algorithm: of a new run.
        checkpoint: a loaded checkpoint.
        new_tasks: initial weights of tasks that the checkpoint lacks or has not trained.

    Returns:
        A table of the copied weights, one line per part.

    Raises:
        ConfigurationError: if the policy does not fit, or nothing of it is this run's.
    """
    one_of(get_args(NewTasks), init_new_tasks=new_tasks)
    spec = EnvSpec.from_dict(checkpoint["mtrl_lightning"]["spec"])
    tasks = TaskMatch.by_name(spec, algorithm.spec)
    tasks.check_sizes()
    start = _Start(algorithm, checkpoint["state_dict"], checkpoint["hyper_parameters"], tasks)
    start.copy_parts(new_tasks == "mean")
    algorithm.load_state_dict(start.state)
    for module in start.copied_modules():
        if isinstance(module, Standardize | NormalizeObservation):
            module.keep_tasks(list(tasks.common))
    algorithm.set_targets()
    return start.table()


class _Start:
    """The state with which an algorithm starts.

    Args:
        algorithm: of a new run.
        saved: the checkpoint's tensors by name.
        arguments: of the checkpoint's algorithm, ``hyper_parameters``.
        tasks: the tasks of both.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        saved: Mapping[str, Any],
        arguments: Mapping[str, Any],
        tasks: TaskMatch,
    ) -> None:
        self.state: dict[str, Any] = algorithm.state_dict()
        self._algorithm = algorithm
        self._saved = saved
        self._arguments = arguments
        self._tasks = tasks
        self._parts = dict(_parts(algorithm))
        acting = algorithm.acting_modules().items()
        self._networks = [name for name, one in acting if not isinstance(one, GradientMethod)]
        # transforms that are no reward scale change the policy's observations
        changes = [
            f"transforms.{index}"
            for index, transform in enumerate(algorithm.transforms)
            if not isinstance(transform, RewardScale)
        ]
        self._acting = [*self._networks, *changes]
        # the noise tells a clipped Gaussian from other policies with as many outputs
        optional = set(self._networks) - {"encoder", "actor", "noise"}
        self._needed = [name for name in self._acting if name not in optional]
        self._parameters = {name for name, _ in algorithm.named_parameters()}
        self._copied: list[str] = []
        self._rows: list[_Row] = []

    def copied_modules(self) -> Iterator[nn.Module]:
        """Yield the modules that have weights or statistics of the checkpoint."""
        for name in self._copied:
            yield from self._parts[name].modules()

    def copy_parts(self, use_mean: bool) -> None:
        """Copy matching values into the state.

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
                    raise self._refusal(misfit) from misfit
                self._add_row(name, self.state, f"fresh: {misfit}")
        for name in dict.fromkeys(map(_part_of, self._saved)):
            if name and name not in self._parts:
                self._leave_out(name)
        networks = tuple(name for name in self._networks if name != "encoder")
        if not any(row.num_copied for row in self._rows if row.part.startswith(networks)):
            tasks = ", ".join(
                self._tasks.there.task_names[i] for i in self._tasks.there.train_tasks
            )
            raise self._refusal(
                _Misfit(
                    "none of its weights are of a task of this run",
                    f"Train at least one of its tasks ({tasks})",
                )
            )

    def _copy_part(self, name: str, use_mean: bool) -> None:
        """Copy a part.

        Raises:
            _Misfit: if it is not to be copied.
        """
        part = self._parts[name]
        current = [key for key in self.state if _part_of(key) == name]
        saved = [key for key in self._saved if _part_of(key) == name]
        if isinstance(part, GradientMethod):
            raise _Misfit("a gradient method's state is a run's own")
        if name not in self._acting and self._is_of_another_algorithm():
            raise _Misfit(f"the checkpoint is of {short_name(self._arguments[OWN_CLASS])}")
        learns_returns = name == "critic" or isinstance(part, ReturnScale | RewardScale)
        if learns_returns and self._has_other_returns():
            raise _Misfit("the policy's returns have another scale")
        if current and not saved and name not in self._needed:
            self._add_row(name, self.state, "fresh: the checkpoint has none")
            return
        layout = _Layout(name, part)
        if layout.undeclared and not self._tasks.has_same_order:
            raise layout.undeclared
        own_to_run = {f"{name}.{buffer}" for buffer in getattr(part, "buffers_of_each_rank", ())}
        names_there = {
            key: self._name_there(key, layout) for key in current if key not in own_to_run
        }
        siblings = tuple(member.siblings for member in layout.members)
        for key in saved:
            is_known = key in names_there.values() or key in own_to_run
            if not is_known and not key.startswith(siblings):
                raise _Misfit(f"{key} has the shape {_shape(self._saved[key])} there, none here")
        adopted = {
            key: self._adopted(key, there, layout, use_mean) for key, there in names_there.items()
        }
        self.state |= {key: one.value for key, one in adopted.items()}
        self._copied.append(name)
        rows = [row for one in adopted.values() for row in one.rows]
        self._rows += _summed([row._replace(part=name + row.part) for row in rows])

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

    def _adopted(self, key: str, there: str | None, layout: _Layout, use_mean: bool) -> _Adopted:
        """Return a tensor's new value; its rows name the kind of the weights as their part.

        Raises:
            _Misfit: if the checkpoint has none of this shape.
        """
        current = self.state[key]
        if there is None:
            return _Adopted(current, [_Row(" of one task", _count(current), "fresh")])
        if key.endswith(EXTRA_STATE):
            return self._adopted_extra_state(key, layout)
        axis = layout.axes.get(key)
        saved = self._checked(there, current, axis, self._saved)
        is_weight = key in self._parameters
        if axis is None:
            of_member = " of one task" if layout.member_of(key) else ""
            kind = of_member if is_weight else ", statistics"
            return _Adopted(saved, [_Row(kind, current.numel(), "copied", current.numel())])
        use_mean = use_mean and axis.has_mean and is_weight
        num_tasks = self._tasks.here.num_tasks
        of_tasks = current.numel() // current.shape[axis.axis] * axis.block * num_tasks
        shared = current.numel() - of_tasks
        kind = ", tasks' own" if is_weight else ", tasks' statistics"
        of_new = "mean of the trained" if use_mean else "fresh"
        rows = [
            _Row("", shared, "copied", shared),
            self._row_of_tasks(kind, of_tasks, of_new),
        ]
        return _Adopted(self._tasks.adopt(current, saved, axis, use_mean), rows)

    def _adopted_extra_state(self, key: str, layout: _Layout) -> _Adopted:
        """Return an extra state with its declared entries; the rest is the run's own."""
        adopted = dict(self.state[key])
        saved = {f"{key}.{name}": value for name, value in self._saved.get(key, {}).items()}
        rows = []
        for full_name in [name for name in layout.axes if name.startswith(f"{key}.")]:
            name = full_name.removeprefix(f"{key}.")
            axis = layout.axes[full_name]
            value = self._checked(full_name, adopted[name], axis, saved)
            adopted[name] = self._tasks.adopt(adopted[name], value, axis, False)
            rows.append(self._row_of_tasks(", tasks' statistics", _count(adopted[name])))
        return _Adopted(adopted if rows else self.state[key], rows)

    def _row_of_tasks(self, kind: str, size: int, of_new: str = "fresh") -> _Row:
        """Return the row of weights that belong to single tasks.

        Args:
            kind: of the weights.
            size: their number.
            of_new: initial weights of new tasks.
        """
        num_common = len(self._tasks.common)
        numbers = {"copied": num_common, of_new: len(self._tasks.new)}
        fate = ", ".join(f"{number} {fate}" for fate, number in numbers.items() if number)
        return _Row(kind, size, fate, size // self._tasks.here.num_tasks * num_common)

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
            ConfigurationError: if the policy needs it.
        """
        # the first transform is the reward scale
        if name in ("encoder", "noise") or (
            name.startswith("transforms.") and name != "transforms.0"
        ):
            raise self._refusal(_Misfit(f"it has {name}, and this run has none"))
        if not name.startswith("target_"):
            self._add_row(name, self._saved, "left out: this run has none")

    def _add_row(self, name: str, state: Mapping[str, Any], fate: str) -> None:
        size = sum(_count(value) for key, value in state.items() if _part_of(key) == name)
        if size:
            self._rows.append(_Row(name, size, fate))

    def _is_of_another_algorithm(self) -> bool:
        return bool(self._arguments[OWN_CLASS] != self._algorithm.hyper_parameters[OWN_CLASS])

    def _has_other_returns(self) -> bool:
        """Return whether critics learn returns of another scale than the checkpoint's."""
        defaults = {n: plain(p.default) for n, p in parameters_of(type(self._algorithm)).items()}
        there = _scale_of_returns({**defaults, **self._arguments})
        return there != _scale_of_returns({**defaults, **self._algorithm.hyper_parameters})

    def _refusal(self, misfit: _Misfit) -> ConfigurationError:
        given = (self._arguments, self._algorithm.hyper_parameters)
        there, here = (short_name(one[OWN_CLASS]) for one in given)
        kinds = f" ({there} there, {here} here)" if self._is_of_another_algorithm() else ""
        return ConfigurationError(
            f"a run cannot start from this policy: {misfit}{kinds}. {misfit.fix}, or leave out"
            " init_from"
        )

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
        rows = [[row.part, row.fate, whole(row.num_weights)] for row in self._rows]
        lines.append(textwrap.indent(text_table(rows, num_texts=2), "  "))
        return "\n".join(lines)


def _parts(algorithm: Algorithm) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of an algorithm by name; targets follow others if ``set_targets`` is its."""
    has_targets = type(algorithm).set_targets is not Algorithm.set_targets
    for name, part in algorithm.named_children():
        if name in LISTS:
            yield from ((f"{name}.{index}", member) for index, member in part.named_children())
        elif not (has_targets and name.startswith("target_")):
            yield name, part


def _part_of(key: str) -> str:
    """Return the part of a tensor; empty for one of the algorithm itself, such as a counter."""
    names = key.split(".")
    return ".".join(names[: 2 if names[0] in LISTS else 1]) if len(names) > 1 else ""


def _scale_of_returns(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that decide it: the discount, and classes and bounds of parts."""
    given = [arguments.get(name) for name in ("return_scale", "reward_scale", "value")]
    parts = [(one[CLASS_PATH], one.get(INIT_ARGS, {}).get("bound")) for one in given if one]
    return arguments.get("discount"), parts


def _summed(rows: Sequence[_Row]) -> list[_Row]:
    """Return a row for each part and fate, with the sums of the numbers."""
    sums: dict[tuple[str, str], _Row] = {}
    for row in rows:
        so_far = sums.get((row.part, row.fate), _Row(row.part, 0, row.fate))
        sums[row.part, row.fate] = so_far._replace(
            num_weights=so_far.num_weights + row.num_weights,
            num_copied=so_far.num_copied + row.num_copied,
        )
    return [row for row in sums.values() if row.num_weights]


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else "none"


def _count(value: Any) -> int:
    """Return how many numbers a tensor has, or the tensors of an extra state together."""
    values: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    return sum(tensor.numel() for tensor in values if isinstance(tensor, Tensor))
