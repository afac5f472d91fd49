"""HiP-BMDP families (Zhang et al. 2021): tasks that differ in one parameter of their model.

Zhang, Sodhani, Khetarpal and Pineau 2021, "Learning Robust State Abstractions for Hidden-Parameter
Block MDPs" (arXiv 2007.07206).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mtrl_lightning.checks import above, one_of
from mtrl_lightning.envs.benchmarks.dm_control import MAX_HORIZON, SuiteTasks
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite, load
from mtrl_lightning.errors import ConfigurationError

INTERPOLATION = "eval_interpolation"
EXTRAPOLATION = "eval_extrapolation"
MIN_FINGER_LENGTH = 0.03
"""Distance in metres between the start of the fingertip's capsule and the end of the finger."""


class Family(NamedTuple):
    """Tasks of the suite that differ in one parameter."""

    task: str
    """A domain and one of its tasks."""
    quantity: str
    """Name of the parameter in the names of the tasks."""
    meaning: str
    """Meaning of the parameter, with its unit."""
    edit: Callable[[ET.Element, float], None]
    """Sets the parameter in a model's XML."""
    train: tuple[float, ...]
    """Training values."""
    interpolation: tuple[float, ...]
    """Values between the training values."""
    extrapolation: tuple[float, ...]
    """Values beyond the training values."""
    minimum: float = 0.0
    """Exclusive lower bound of values."""


def _edit_torso(model: ET.Element, length: float) -> None:
    """Lengthen the torso's capsule, without changing legs, head and total mass."""
    _geom(model, "torso").set("fromto", f"{-length!r} 0 0 {length!r} 0 0")


def _edit_friction(model: ET.Element, friction: float) -> None:
    """Set the sliding friction of all geoms, because contacts use the larger of two values."""
    _set_number(_element(model, "./default/geom"), "friction", 0, friction)


def _edit_foot(model: ET.Element, half_length: float) -> None:
    _set_number(_geom(model, "left_foot"), "size", 1, half_length)


def _edit_pole(model: ET.Element, mass: float) -> None:
    _element(model, "./default/default[@class='pole']/geom").set("mass", repr(mass))


def _edit_cart(model: ET.Element, mass: float) -> None:
    _geom(model, "cart").set("mass", repr(mass))


def _edit_spinner(model: ET.Element, half_length: float) -> None:
    """Lengthen both capsules of the spinner; its tip is at their end."""
    for name in ("cap1", "cap2"):
        _set_number(_geom(model, name), "size", 1, half_length)
    _set_number(_named(model, "site", "tip"), "pos", 2, half_length + 0.04)


def _edit_finger(model: ET.Element, length: float) -> None:
    """Lengthen the finger's last link; fingertip and touch sensors are at its end."""
    _set_number(_geom(model, "distal"), "fromto", 5, -length)
    fingertip = _geom(model, "fingertip")
    _set_number(fingertip, "fromto", 2, -(length - MIN_FINGER_LENGTH))
    _set_number(fingertip, "fromto", 5, -(length + 0.001))
    for name in ("touchtop", "touchbottom"):
        _set_number(_named(model, "site", name), "pos", 2, -(length + 0.01))


FAMILIES = {
    "cheetah_torso": Family(
        task="cheetah-run",
        quantity="torso",
        meaning="half the length of the torso, in metres (0.5 in the suite)",
        edit=_edit_torso,
        train=(0.8, 0.9, 1.2, 1.3),
        interpolation=(1.0, 1.1),
        extrapolation=(0.7, 1.4),
    ),
    "walker_friction": Family(
        task="walker-walk",
        quantity="friction",
        meaning="sliding friction of body and floor (0.7 in the suite)",
        edit=_edit_friction,
        train=(1.0, 1.1, 1.4, 1.5),
        interpolation=(1.2, 1.3),
        extrapolation=(0.9, 1.6),
    ),
    "walker_foot": Family(
        task="walker-walk",
        quantity="foot",
        meaning="half the length of the left foot, in metres (0.1 in the suite)",
        edit=_edit_foot,
        train=(0.11, 0.12, 0.15, 0.16),
        interpolation=(0.13, 0.14),
        extrapolation=(0.10, 0.17),
    ),
    "cartpole_pole": Family(
        task="cartpole-swingup",
        quantity="pole",
        meaning="mass of the pole, in kg (0.1 in the suite)",
        edit=_edit_pole,
        train=(0.25, 0.30, 0.45, 0.50),
        interpolation=(0.35, 0.40),
        extrapolation=(0.20, 0.55),
    ),
    "cartpole_cart": Family(
        task="cartpole-swingup",
        quantity="cart",
        meaning="mass of the cart, in kg (1 in the suite)",
        edit=_edit_cart,
        train=(2.5, 3.0, 4.5, 5.0),
        interpolation=(3.5, 4.0),
        extrapolation=(2.0, 5.5),
    ),
    "finger_spinner": Family(
        task="finger-spin",
        quantity="spinner",
        meaning="half the length of the spinner's capsules, in metres (0.09 in the suite)",
        edit=_edit_spinner,
        train=(0.08, 0.09, 0.12, 0.13),
        interpolation=(0.10, 0.11),
        extrapolation=(0.07, 0.14),
    ),
    "finger_length": Family(
        task="finger-spin",
        quantity="length",
        meaning="length of the finger's last link, in metres (0.16 in the suite)",
        edit=_edit_finger,
        train=(0.145, 0.16, 0.205, 0.22),
        interpolation=(0.175, 0.19),
        extrapolation=(0.13, 0.235),
        minimum=MIN_FINGER_LENGTH,
    ),
}
"""The families by name, with their default values."""


class DMControlFamily(SuiteTasks):
    """A task of the DeepMind Control Suite with different bodies.

    The bodies differ in one physical parameter, which is not observed. Each value is a task. A
    value that is both trained and evaluated is the same task.

    The splits are ``train``, ``eval_base``, ``eval_interpolation`` and ``eval_extrapolation``.
    Training samples initial states; test episode ``k`` starts like the first one of dm_control's
    task with ``random=k``.

    Args:
        family: ``cheetah_torso``, ``walker_friction``, ``walker_foot``, ``cartpole_pole``,
            ``cartpole_cart``, ``finger_spinner`` or ``finger_length``.
        train: training values; None for the family's default.
        eval_base: values of the split ``eval_base``; None for the training values. An empty list
            omits this split; likewise for the next two.
        eval_interpolation: values between the training values; None for the family's default
            values in this range.
        eval_extrapolation: values beyond the training values; None for the family's default
            values in this range.
        task: another task of the same domain, such as ``walker-run``; None for the family's
            default.
        action_repeat: control steps per environment step; their rewards are summed. If it does not
            divide the horizon, the last environment step of an episode has fewer.
        horizon: control steps in an episode, at most 1000 (dm_control's default).
        reward_scale: factor of every reward, above 0; the score does not depend on it.
        fast: whether to step with faster code, whose observations and rewards are bit-identical to
            dm_control's. If the installed version was not verified, dm_control's own code is used,
            with a warning.
    """

    def __init__(
        self,
        family: str,
        train: list[float] | None = None,
        eval_base: list[float] | None = None,
        eval_interpolation: list[float] | None = None,
        eval_extrapolation: list[float] | None = None,
        task: str | None = None,
        action_repeat: int = 2,
        horizon: int = MAX_HORIZON,
        reward_scale: float = 1.0,
        fast: bool = True,
    ) -> None:
        one_of(FAMILIES, family=family)
        self.family = FAMILIES[family]
        trained = self.family.train if train is None else train
        by_split = {
            "train": trained,
            "eval_base": trained if eval_base is None else eval_base,
            INTERPOLATION: eval_interpolation or (),
            EXTRAPOLATION: eval_extrapolation or (),
        }
        values = {split: _checked(self.family, split, of) for split, of in by_split.items()}
        if not values["train"]:
            raise ConfigurationError("train is empty: give at least one value to train on")
        if eval_interpolation is None:
            values[INTERPOLATION] = _unseen(self.family.interpolation, values["train"], True)
        if eval_extrapolation is None:
            values[EXTRAPOLATION] = _unseen(self.family.extrapolation, values["train"], False)
        for split, between in ((INTERPOLATION, True), (EXTRAPOLATION, False)):
            unseen = _unseen(values[split], values["train"], between)
            if unseen != values[split]:
                where = "between" if between else "beyond"
                raise ConfigurationError(
                    f"{split} is {list(values[split])}: give values {where} the smallest and the"
                    f" largest of train, {list(values['train'])}, that are not part of train"
                )
        self.splits = tuple(split for split, of in values.items() if of)
        domain, _, _ = self.family.task.partition("-")
        known = ["-".join(pair) for pair in import_suite().ALL_TASKS if pair[0] == domain]
        self._task = self.family.task if task is None else task
        one_of(known, task=self._task, hint=", the tasks of this family's domain")
        task_of: dict[float, int] = {}
        for value in [value for of in values.values() for value in of]:
            task_of.setdefault(value, len(task_of))
        prefix = f"{self._task}-{self.family.quantity}"
        names = [f"{prefix}-{value!r}" for value in task_of]
        self._values = dict(zip(names, task_of, strict=True))
        self._tasks = {split: tuple(task_of[value] for value in of) for split, of in values.items()}
        super().__init__(names, self._tasks["train"], action_repeat, horizon, reward_scale, fast)

    @property
    def protocol(self) -> dict[str, str | int | float]:
        """The task and the varied parameter."""
        return {"task": self._task, "varied": self.family.meaning}

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the tasks of a split, in the order of its values."""
        return self._tasks[split]

    def load(self, name: str) -> Any:
        """Return dm_control's ``Environment`` with the model of one task."""
        return load(self._task, self.fast, partial(_edited, self.family, self._values[name]))


def _unseen(values: Sequence[float], trained: Sequence[float], between: bool) -> tuple[float, ...]:
    """Return the untrained values between the trained ones, or beyond them."""
    low, high = min(trained), max(trained)
    return tuple(v for v in values if v not in trained and (low < v < high) == between)


def _checked(family: Family, split: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return the values of a split after checking that they are valid."""
    for value in values:
        given: dict[str, Any] = {split: value}
        above(family.minimum, finite=True, hint=f": {family.meaning}", **given)
    numbers = tuple(float(value) for value in values)
    if len(set(numbers)) < len(numbers):
        raise ConfigurationError(f"{split} is {list(numbers)}: give each value once")
    return numbers


def _edited(family: Family, value: float, xml: bytes) -> bytes:
    model = ET.fromstring(xml)
    family.edit(model, value)
    return ET.tostring(model)


def _element(model: ET.Element, path: str) -> ET.Element:
    """Return the only element at this path."""
    elements = model.findall(path)
    assert len(elements) == 1, f"{path} is in the model {len(elements)} times"
    return elements[0]


def _named(model: ET.Element, tag: str, name: str) -> ET.Element:
    return _element(model, f"./worldbody//{tag}[@name='{name}']")


def _geom(model: ET.Element, name: str) -> ET.Element:
    return _named(model, "geom", name)


def _set_number(element: ET.Element, attribute: str, index: int, value: float) -> None:
    """Replace one of the numbers of an attribute."""
    numbers = element.attrib[attribute].split()
    numbers[index] = repr(value)
    element.set(attribute, " ".join(numbers))
