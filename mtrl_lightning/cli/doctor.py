"""Print what this machine offers to training, and what to do where something is missing.

``mtrl-lightning doctor`` needs no package but the standard library: it runs where the installation
is incomplete.
"""

from __future__ import annotations

import importlib.metadata
import netrc
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse

from mtrl_lightning import __version__
from mtrl_lightning.cli.commands import CommandParser
from mtrl_lightning.errors import ConfigurationError, requirement

HELP = "Print what this machine offers to training, and what to do where something is missing."
PYTHONS = ((3, 11), (3, 13))
"""The first and the last supported version."""
REQUIRED = ("torch", "lightning", "jsonargparse", "gymnasium", "numpy", "scipy", "psutil")
OPTIONAL = {
    "metaworld": ("metaworld", "the MetaWorld tasks"),
    "dm_control": ("dmcontrol", "the tasks of the DeepMind Control Suite"),
    "mujoco": ("metaworld", "the simulator of both"),
    "wandb": ("wandb", "-c logger/wandb"),
    "tensorboard": ("tensorboard", "-c logger/tensorboard"),
    "imageio-ffmpeg": ("video", "videos"),
    "optuna": ("sweep", "mtrl-lightning sweep"),
    "onnxruntime": ("export", "export --to onnx"),
    "minari": ("minari", "export --to minari"),
}
"""Packages that only some configurations need: the extra that installs each, and what for."""
PYTORCH_SELECTOR = "https://pytorch.org/get-started/locally"
LITTLE_MEMORY = 4.0
"""GiB below which a replay of images or a large network does not fit."""
LITTLE_DISK = 5.0
"""GiB below which the checkpoints and the replay of a long run may not fit."""
GIB = 2**30


class Finding(NamedTuple):
    """What was found out about one thing."""

    name: str
    value: str
    remedy: str = ""
    """What to do; empty where nothing is missing."""
    is_fatal: bool = False
    """Whether nothing can be trained without the remedy."""


def main(args: Sequence[str] | None = None) -> None:
    """Run ``doctor``; it ends with exit code 1 if nothing can be trained on this machine.

    Args:
        args: arguments after ``doctor``; None for those of the process.
    """
    parser = CommandParser("doctor", description=HELP)
    parser.parse_args(sys.argv[2:] if args is None else args)
    is_fatal = False
    for check in CHECKS:
        for finding in check():
            mark = " " if not finding.remedy else "!"
            print(f"{mark} {finding.name:<14} {finding.value}")
            if finding.remedy:
                print(f"{'':<17}-> {finding.remedy}")
            is_fatal |= finding.is_fatal
    sys.exit(1 if is_fatal else 0)


def check_versions() -> Iterator[Finding]:
    """Find the versions of Python and of the packages."""
    yield Finding("mtrl_lightning", f"{__version__} in {Path(__file__).parent.parent}")
    first, last = (".".join(str(part) for part in version) for version in PYTHONS)
    is_supported = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    remedy = "" if is_supported else f"install Python {first} to {last}"
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("python", f"{platform.python_version()}, {system}", remedy, not is_supported)
    for name in REQUIRED:
        version = _version(name)
        remedy = "" if version else f"pip install {requirement(name)}"
        yield Finding(name, version or "not installed", remedy, not version)
    for name, (extra, purpose) in OPTIONAL.items():
        version = _version(name)
        remedy = "" if version else f'for {purpose}: pip install "mtrl_lightning[{extra}]"'
        yield Finding(name, version or "not installed", remedy)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_bfloat16() -> Iterator[Finding]:
    """Time a layer in both precisions on the CPU."""
    if _version("torch") is None:
        return
    from mtrl_lightning.precision import time_products

    times = time_products()
    advice = "bf16-mixed may pay off"
    if times.is_bfloat16_slower:
        advice = "keep 32-true"
    value = f"{times.slowdown:.2f} times float32's time on the CPU: --trainer.precision {advice}"
    yield Finding("bfloat16", value)


def check_gpu() -> Iterator[Finding]:
    """Find the GPUs that PyTorch can use, and those that it cannot."""
    if _version("torch") is None:
        return
    import torch

    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        memory = properties.total_memory / GIB
        yield Finding("gpu", f"{properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}")
    if torch.cuda.device_count():
        return
    if torch.backends.mps.is_available():
        value = "Apple's, which was never tested: --trainer.accelerator cpu trains without it"
        yield Finding("gpu", value)
        return
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        yield Finding("gpu", "none: training runs on the CPU")
    elif torch.version.cuda is None:
        remedy = f"pip uninstall torch, then install its CUDA build: {PYTORCH_SELECTOR}"
        yield Finding("gpu", "present, but this build of PyTorch is for CPUs", remedy)
    else:
        remedy = "run nvidia-smi, and compare its CUDA version and CUDA_VISIBLE_DEVICES"
        yield Finding("gpu", f"not usable by PyTorch for CUDA {torch.version.cuda}", remedy)


def check_renderer() -> Iterator[Finding]:
    """Find what MuJoCo can draw videos with."""
    if _version("mujoco") is None:
        return
    from mtrl_lightning.envs.render.opengl import VARIABLE, find_renderer  # needs Gymnasium

    try:
        name = find_renderer()
    except ConfigurationError as error:
        yield Finding("renderer", "MuJoCo draws no images: only videos need them", str(error))
        return
    is_chosen = bool(os.environ.get(VARIABLE))
    found = f"with {VARIABLE} {name}" + ("" if is_chosen else ", which videos choose themselves")
    yield Finding("renderer", f"MuJoCo draws images {found if name else ''}".rstrip())


def check_machine() -> Iterator[Finding]:
    """Find the cores that this process may use, and the memory and the disk that are free."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    remedy = "step the environments in the learner's process: --rollout.num_workers 0"
    yield Finding("cores", f"{cores}", remedy if cores == 1 else "")
    if _version("psutil") is not None:
        import psutil

        memory = psutil.virtual_memory()
        free = memory.available / GIB
        remedy = "lower data.capacity, or keep the replay on disk: --data.memory_map true"
        value = f"{free:.1f} of {memory.total / GIB:.1f} GiB free"
        yield Finding("memory", value, remedy if free < LITTLE_MEMORY else "")
    usage = shutil.disk_usage(Path.cwd())
    free = usage.free / GIB
    remedy = "give another --root, save less (replay.save_last), or delete runs: clear --help"
    value = f"{free:.1f} of {usage.total / GIB:.1f} GiB free in {Path.cwd()}"
    yield Finding("disk", value, remedy if free < LITTLE_DISK else "")


def check_wandb() -> Iterator[Finding]:
    """Find out whether Weights & Biases has a key on this machine; no connection is opened."""
    if _version("wandb") is None:
        return
    mode = os.environ.get("WANDB_MODE")
    if os.environ.get("WANDB_API_KEY"):
        yield Finding("W&B login", "a key is in WANDB_API_KEY")
    elif _has_netrc_entry():
        yield Finding("W&B login", "a key is in the netrc file")
    elif mode in ("offline", "disabled"):
        yield Finding("W&B login", f"none, and none is needed: WANDB_MODE is {mode}")
    else:
        remedy = "wandb login; or, to store runs here and send them later, WANDB_MODE=offline"
        yield Finding("W&B login", "none", remedy)


def _has_netrc_entry() -> bool:
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    names = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for name in names:
        try:
            found = netrc.netrc(os.path.expanduser(name)).authenticators(urlparse(url).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if found is not None:
            return True
    return False


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_machine,
    check_bfloat16,
    check_gpu,
    check_renderer,
    check_wandb,
)
