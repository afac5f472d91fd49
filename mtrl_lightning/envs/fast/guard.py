"""Check whether fast environments may replace the originals: same versions and results."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping

import numpy as np

from mtrl_lightning.errors import installed_versions


def unchecked_versions(checked: Mapping[str, Collection[str]]) -> list[str]:
    """Return the installed packages whose versions fast environments were not verified against.

    Args:
        checked: verified versions by package.
    """
    return [
        f"{name} {version}"
        for name, version in installed_versions(checked).items()
        if version not in checked[name]
    ]


def reason_for_upstream(
    checked: Mapping[str, Collection[str]], steps_like_upstream: Callable[[], bool]
) -> str:
    """Return why the original code must be used; empty if fast environments may be used.

    Args:
        checked: see ``unchecked_versions``.
        steps_like_upstream: compares the first steps of a task in this process.
    """
    unchecked = unchecked_versions(checked)
    if unchecked:
        return f"the fast code was not verified against {' and '.join(unchecked)}"
    if steps_like_upstream():
        return ""
    python = platform.python_version()
    return f"the fast code gives other results with Python {python} and NumPy {np.__version__}"
