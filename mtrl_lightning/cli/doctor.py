"""Print what is installed and what this machine offers, for training and for a bug report.

``mtrl-lightning doctor`` needs no package but the standard library: it runs where the installation
is incomplete.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mtrl_lightning import __version__
from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import ConfigurationError, installed_versions, requirement

HELP = "Print what is installed and what this machine offers, as a bug report needs it."
DESCRIPTION = HELP
FIRST, LAST = 11, 13
"""Supported versions of Python 3."""
REQUIRED = ("torch", "lightning", "jsonargparse", "gymnasium", "numpy", "scipy", "psutil")
OPTIONAL = {
    "metaworld": "metaworld",
    "dm_control": "dmcontrol",
    "mujoco": "metaworld",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "imageio-ffmpeg": "video",
    "optuna": "sweep",
    "onnxruntime": "export",
    "minari": "minari",
}
"""Packages that only some configurations need, and the extra that installs each."""
GIB = 2**30


class Finding(NamedTuple):
    """What was found out about one thing."""

    name: str
    value: str
    fix: str = ""
    """What to do; empty where nothing is missing."""
    is_fatal: bool = False
    """Whether nothing can be trained without the fix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no argument."""


def run(options: argparse.Namespace) -> None:
    """Print the findings; it ends with exit code 1 if nothing can be trained on this machine."""
    is_fatal = False
    for check in CHECKS:
        for finding in check():
            print(f"{'!' if finding.fix else ' '} {finding.name:<14} {finding.value}")
            if finding.fix:
                print(f"{'':<17}-> {finding.fix}")
            is_fatal |= finding.is_fatal
    sys.exit(1 if is_fatal else 0)


def check_versions() -> Iterator[Finding]:
    """Find the versions of Python and of the packages."""
    yield Finding("mtrl_lightning", f"{__version__} in {Path(__file__).parent.parent}")
    is_supported = (3, FIRST) <= sys.version_info[:2] <= (3, LAST)
    fix = "" if is_supported else f"install Python 3.{FIRST} to 3.{LAST}"
    yield Finding("python", platform.python_version(), fix, not is_supported)
    installed = installed_versions((*REQUIRED, *OPTIONAL))
    for name in (*REQUIRED, *OPTIONAL):
        if name in installed:
            yield Finding(name, installed[name])
        elif name in REQUIRED:
            yield Finding(name, "not installed", f"pip install {requirement(name)}", is_fatal=True)
        else:
            fix = f'where it is needed: pip install "mtrl_lightning[{OPTIONAL[name]}]"'
            yield Finding(name, "not installed", fix)


def check_machine() -> Iterator[Finding]:
    """Find the system, the cores of this process, and the memory and the disk that are free."""
    yield Finding("system", platform.platform())
    cores = usable_cores()
    fix = "step the environments in the learner's process: --rollout.num_workers 0"
    yield Finding("cores", f"{cores}", fix if cores == 1 else "")
    if installed_versions(["psutil"]):
        import psutil

        memory = psutil.virtual_memory()
        value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
        yield Finding("memory", value)
    disk = shutil.disk_usage(Path.cwd())
    value = f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free in {Path.cwd()}"
    yield Finding("disk", value)


def check_torch() -> Iterator[Finding]:
    """Find the GPUs that PyTorch can use."""
    if not installed_versions(["torch"]):
        return
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / GIB
        yield Finding("gpu", f"{properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}")
    if not torch.cuda.device_count():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        has_driver = shutil.which("nvidia-smi") is not None
        fix = "there is a driver: compare nvidia-smi with https://pytorch.org/get-started/locally"
        value = f"none that this PyTorch, built {build}, can use: training runs on the CPU"
        yield Finding("gpu", value, fix if has_driver else "")


def check_renderer() -> Iterator[Finding]:
    """Find what MuJoCo can draw videos with."""
    if not installed_versions(["mujoco"]):
        return
    from mtrl_lightning.envs.render.opengl import VARIABLE, find_renderer  # needs Gymnasium

    try:
        name = find_renderer()
    except ConfigurationError as error:
        yield Finding("renderer", "MuJoCo draws no images: only videos need them", str(error))
        return
    yield Finding("renderer", f"MuJoCo draws images{f' with {VARIABLE} {name}' if name else ''}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_machine,
    check_torch,
    check_renderer,
)
