"""The configuration files that come with the package, and their names.

The name of a file is its path in the folder ``configs`` without ``.yaml``: ``env/toy``. In a source
checkout the folder lies beside the package, and a wheel has it inside. PyTorch is not imported.
"""

from __future__ import annotations

from pathlib import Path

from mtrl_lightning.errors import ConfigurationError, closest

SUFFIX = ".yaml"


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
