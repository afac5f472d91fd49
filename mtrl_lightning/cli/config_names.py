"""The configuration files that come with the package, and their names.

The name of a file is its path in the folder ``configs`` without ``.yaml``: ``env/toy``. In a source
checkout the folder lies beside the package, and a wheel has it inside. PyTorch is not imported.
"""

from __future__ import annotations

from pathlib import Path

from mtrl_lightning.errors import ConfigurationError, closest

SUFFIX = ".yaml"


def configs_folder() -> Path:
    """Return the folder of the configuration files."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """Return the names of all configuration files, sorted."""
    folder = configs_folder()
    paths = folder.rglob(f"*{SUFFIX}")
    return sorted(path.relative_to(folder).as_posix().removesuffix(SUFFIX) for path in paths)


def find_config(given: str, folder: Path = Path()) -> Path:
    """Return the existing file of this path, or else the configuration file of this name.

    Args:
        given: a path, or a name such as ``env/toy``.
        folder: that a relative path starts from.

    Raises:
        ConfigurationError: if there is neither; the message names the most similar name.
    """
    if (folder / given).is_file():
        return folder / given
    name = given.removesuffix(SUFFIX)
    names = config_names()
    if name in names:
        return configs_folder() / f"{name}{SUFFIX}"
    similar = nearest(name.removeprefix("configs/"), names)
    question = "" if similar is None else f" did you mean {similar}?"
    raise ConfigurationError(
        f"there is no file {folder / given}, and no configuration has this name:{question}"
        " mtrl-lightning list shows all names"
    )


def nearest(wanted: str, names: list[str]) -> str | None:
    """Return the most similar name; the last part of one, ``toy`` of ``env/toy``, counts, too."""
    last_parts = {name.rsplit("/", 1)[-1]: name for name in reversed(names)}
    known = last_parts | {name: name for name in names}
    similar = closest(wanted, known) or closest(wanted.rsplit("/", 1)[-1], known)
    return known[similar[0]] if similar else None
