"""The configuration files that come with the package, and their names.

The name of a file is its path in the folder ``configs`` without ``.yaml``: ``env/toy``. In a source
checkout the folder lies beside the package, and a wheel has it inside. PyTorch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mtrl_lightning.errors import ConfigurationError, closest

SUFFIX = ".yaml"


class FormerName(NamedTuple):
    """What took the place of a configuration whose name is no longer listed."""

    configs: tuple[str, ...]
    """The configurations to name instead."""
    options: dict[str, str]
    """Options that follow them."""

    def __str__(self) -> str:
        """Return the words of the command line."""
        configs = [f"-c {name}" for name in self.configs]
        return " ".join([*configs, *(f"--{key} {value}" for key, value in self.options.items())])


FAMILY = "data.benchmark.init_args.family"
ASSIGNMENT = "model.init_args.encoder.init_args.assignment"
BOTH_BENCHMARKS = {
    "metaworld_plus": ("mtsac", "mtmhsac", "wide"),
    "mtrl": (
        "mtrl_aligned_mtl",
        "mtrl_film",
        "mtrl_mtsac",
        "mtrl_multi_head",
        "mtrl_nash_mtl",
        "mtrl_pcgrad",
        "mtrl_separate",
    ),
}
"""Experiments of each protocol that had a file for MT10 and one for MT50."""


def _former_names() -> dict[str, FormerName]:
    names = {
        f"env/hipbmdp_{family}": FormerName(("env/hipbmdp",), {FAMILY: family})
        for family in (
            "cartpole_cart",
            "cartpole_pole",
            "cheetah_torso",
            "finger_length",
            "finger_spinner",
            "walker_foot",
            "walker_friction",
        )
    }
    for former, assignment in {
        "attention": "Attention",
        "cluster": "Clusters",
        "ensemble": "Average",
        "gate": "Gate",
        "identity": "OwnExpert",
    }.items():
        instead = FormerName(("encoder/mixture",), {ASSIGNMENT: assignment})
        names[f"encoder/mixture_{former}"] = instead
    for protocol, experiments in BOTH_BENCHMARKS.items():
        on_mt50 = f"protocol/{protocol}_on_mt50"
        names[f"protocol/{protocol}_mt10"] = FormerName((f"protocol/{protocol}",), {})
        names[f"protocol/{protocol}_mt50"] = FormerName((f"protocol/{protocol}", on_mt50), {})
        for name in experiments:
            now = f"experiment/{name}"
            for former, configs in ((f"mt10_{name}", (now,)), (f"mt50_{name}", (now, on_mt50))):
                names[f"experiment/{former}"] = FormerName(configs, {"name": former})
    return names


FORMER_NAMES = _former_names()
"""Names of 0.2, which 0.3 still takes."""


def configs_folder() -> Path:
    """Return the folder of the configuration files.

    Raises:
        ConfigurationError: if it is missing, as in an incomplete copy of the package.
    """
    package = Path(__file__).parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "base.yaml").is_file():
            return folder
    raise ConfigurationError(
        f"the package in {package} has no configuration files: install it again"
    )


def config_names() -> list[str]:
    """Return the names of all configuration files, sorted."""
    folder = configs_folder()
    paths = folder.rglob(f"*{SUFFIX}")
    return sorted(path.relative_to(folder).as_posix().removesuffix(SUFFIX) for path in paths)


def named_config(name: str) -> Path | None:
    """Return the configuration file of a name, also one given with ``.yaml``; None without one."""
    name = _plain(name)
    return configs_folder() / f"{name}{SUFFIX}" if name in config_names() else None


def former_name(name: str) -> FormerName | None:
    """Return what took the place of a former name, also one given with ``.yaml``; None without."""
    return FORMER_NAMES.get(_plain(name))


def _plain(name: str) -> str:
    return name.replace("\\", "/").removesuffix(SUFFIX)


def find_config(given: str) -> Path:
    """Return the existing file of this path, or else the configuration file of this name.

    Args:
        given: a path, or a name such as ``env/toy``.

    Raises:
        ConfigurationError: if there is neither; the message names the most similar name.
    """
    if Path(given).is_file():
        return Path(given)
    path = named_config(given)
    if path is None:
        raise ConfigurationError(f"File does not exist: {given}{hint_of(given)}")
    return path


def hint_of(name: str) -> str:
    """Return what to add to a message about a name that no configuration file has."""
    names = config_names()
    wanted = _plain(name).removeprefix("configs/")
    if wanted in FORMER_NAMES:
        return f", and this configuration is now {FORMER_NAMES[wanted]}"
    similar = wanted if wanted in names else nearest(wanted, names)
    question = "" if similar is None else f" did you mean {similar}?"
    return f", and no configuration has this name:{question} mtrl-lightning list shows all names"


def nearest(wanted: str, names: list[str]) -> str | None:
    """Return the most similar name; the last part of one, ``toy`` of ``env/toy``, counts, too."""
    last_parts = {name.rsplit("/", 1)[-1]: name for name in reversed(names)}
    for wanted_part in (wanted, wanted.rsplit("/", 1)[-1]):
        for candidates in ({name: name for name in names}, last_parts):
            similar = closest(wanted_part, candidates)
            if similar:
                return candidates[similar[0]]
    return None
