"""dm_control's suite: its import, and its domains with a custom physics class."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from mtrl_lightning.envs.fast.dm_control_fast import FastPhysics, replacements
from mtrl_lightning.errors import import_optional

Upstream: Any = object
"""A domain's physics class, which becomes the base class of ours."""

NO_RENDERER = "off"
"""The value of ``MUJOCO_GL`` with which dm_control loads no rendering library."""


@cache
def import_suite() -> ModuleType:
    """Import ``dm_control.suite``.

    dm_control looks for a display on import, and prints a warning without one. This is avoided,
    because dm_control's own rendering is not used.
    """
    import_optional("dm_control", "dmcontrol")
    chosen = os.environ.get("MUJOCO_GL")
    try:
        import mujoco  # noqa: F401  # before changing MUJOCO_GL, which it reads, too

        if chosen is None and not _has_display():
            os.environ["MUJOCO_GL"] = NO_RENDERER
        return importlib.import_module("dm_control.suite")
    finally:
        if chosen is None:
            os.environ.pop("MUJOCO_GL", None)


def _has_display() -> bool:
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@cache
def domain(name: str, fast: bool) -> ModuleType:
    """Return a copy of the suite's module of a domain, such as ``walker``, with our physics.

    dm_control's own module is not modified.

    Args:
        name: name of the domain.
        fast: whether the copy uses faster functions with equal results.
    """
    import_suite()
    file = importlib.import_module(f"dm_control.suite.{name}").__file__
    assert file is not None
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bases: list[type] = [_Physics]
    if name == "quadruped":
        bases.append(_QuadrupedPhysics)
    if fast:
        bases.append(FastPhysics)
        vars(module).update(
            {name: it for name, it in replacements().items() if name in vars(module)}
        )
    module.Physics = type("Physics", (*bases, module.Physics), {})
    return module


def load(task: str, fast: bool, edit: Callable[[bytes], bytes] | None = None) -> Any:
    """Return dm_control's ``Environment`` of a task, such as ``walker-walk``.

    Args:
        task: a domain and one of its tasks.
        fast: whether to use faster functions with equal results.
        edit: modifies the XML of the domain's model before it is compiled; None for no change.
    """
    domain_name, _, task_name = task.partition("-")
    module: Any = domain(domain_name, fast)
    if edit is None:
        return module.SUITE[task_name]()
    original = module.get_model_and_assets

    def get_edited_model_and_assets(*args: Any, **options: Any) -> tuple[bytes, dict[str, Any]]:
        xml, assets = original(*args, **options)
        return edit(xml), assets

    module.get_model_and_assets = get_edited_model_and_assets
    try:
        return module.SUITE[task_name]()
    finally:
        module.get_model_and_assets = original


class _Physics(Upstream):
    """Physics of all domains, preceding the domain's class in the method resolution order."""

    @classmethod
    def from_xml_string(cls, xml_string: Any, assets: dict[str, Any] | None = None) -> Any:
        """Compile a model, or copy a recently compiled one, because tasks share models."""
        model = _compiled(xml_string, frozenset((assets or {}).items()))
        return cls.from_model(copy.copy(model))

    @property
    def contexts(self) -> None:
        """None, because dm_control would otherwise open a renderer in some tasks' resets."""
        return None


@lru_cache(maxsize=2)
def _compiled(xml_string: Any, assets: frozenset[tuple[str, Any]]) -> Any:
    from dm_control.mujoco import wrapper

    return wrapper.MjModel.from_xml_string(xml_string, assets=dict(assets))


class _QuadrupedPhysics(Upstream):
    """Fix for dm_control 1.0.28, which calls a function that NumPy 2.4 has removed."""

    def _get_sensor_names(self, *sensor_types: Any) -> list[str]:
        if sensor_types not in self._sensor_types_to_names:
            (sensor_ids,) = np.nonzero(np.isin(self.model.sensor_type, sensor_types).ravel())
            self._sensor_types_to_names[sensor_types] = [
                self.model.id2name(sensor_id, "sensor") for sensor_id in sensor_ids
            ]
        return self._sensor_types_to_names[sensor_types]
