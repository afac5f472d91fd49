"""Print information on the installation and the machine: ``mtrl-lightning doctor``.

It needs only the standard library, so that it also runs with an incomplete installation.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from mtrl_lightning import __version__
from mtrl_lightning.errors import ConfigurationError, installed_versions
from mtrl_lightning.utils.cores import usable_cores

HELP = "Print versions, devices, renderer and packages, for bug reports."
DESCRIPTION = HELP
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
"""Optional packages, and the extra that installs each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(options: argparse.Namespace) -> None:
    """Print the information; the exit code is 1 if a required package is missing."""
    installed = installed_versions((*REQUIRED, *OPTIONAL))
    facts = {
        "mtrl_lightning": f"{__version__} in {Path(__file__).parent.parent}",
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": str(usable_cores()),
    }
    for name in REQUIRED:
        facts[name] = installed.get(name, "missing: reinstall mtrl_lightning, which requires it")
    for name, extra in OPTIONAL.items():
        missing = f'not installed (optional): pip install "mtrl_lightning[{extra}]"'
        facts[name] = installed.get(name, missing)
    if "torch" in installed:
        facts["gpu"] = _gpus()
    if {"mujoco", "gymnasium"} <= installed.keys():
        facts["renderer"] = _renderer()
    for name, fact in facts.items():
        print(f"{name:<16}{fact}")
    sys.exit(0 if installed.keys() >= set(REQUIRED) else 1)


def _gpus() -> str:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or f"none for this PyTorch, built for CUDA {torch.version.cuda}"


def _renderer() -> str:
    from mtrl_lightning.envs.render.opengl import VARIABLE, find_renderer

    try:
        name = find_renderer()
    except ConfigurationError as error:  # only videos and pixels need one
        return f"none: {error}"
    return f"{VARIABLE}={name}" if name else "MuJoCo's own"
