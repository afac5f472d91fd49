"""Whether fast environments may take the place of upstream's: the same versions and numbers."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping

import numpy as np

from mtrl_lightning.errors import installed_versions


def unchecked_versions(checked: Mapping[str, Collection[str]]) -> list[str]:
    """Return the installed packages whose versions fast environments were not compared with.

    Args:
        checked: the versions that they were compared with, by package.
    """
    return [
        f"{name} {version}"
        for name, version in installed_versions(checked).items()
        if version not in checked[name]
    ]


def reason_for_upstream(
    checked: Mapping[str, Collection[str]], steps_like_upstream: Callable[[], bool]
) -> str:
    """Return why upstream's own code has to be used; empty if it has not.

    Args:
        checked: see ``unchecked_versions``.
        steps_like_upstream: compares the first steps of a task in this process.
    """
    unchecked = unchecked_versions(checked)
    if unchecked:
        return f"ours was not compared with {' and '.join(unchecked)}"
    if steps_like_upstream():
        return ""
    python = platform.python_version()
    return f"ours gives other numbers with Python {python} and NumPy {np.__version__}"
