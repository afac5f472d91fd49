"""The configuration files that come with the package, and their names.

The name of a file is its path in the folder ``configs`` without ``.yaml``: ``env/toy``. The folder
is next to the package in a source checkout, and inside it in a wheel. PyTorch is not imported.
"""

from __future__ import annotations

from pathlib import Path

from mtrl_lightning.errors import ConfigurationError, name_hint

SUFFIX = ".yaml"


def configs_folder() -> Path:
    """Return the folder of the configuration files."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
    """Return the names of all configuration files, those without a group first."""
    folder = configs_folder()
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}"))
    return sorted((path.removesuffix(SUFFIX) for path in paths), key=lambda n: ("/" in n, n))


def find_config(given: str, folder: Path = Path()) -> Path:
    """Return the file at this path if it exists, otherwise the configuration with this name.

    Args:
        given: a path, or a name such as ``env/toy``.
        folder: base folder of relative paths.
    """
    if (folder / given).is_file():
        return folder / given
    name = given.removesuffix(SUFFIX)
    names = config_names()
    if name in names:
        return configs_folder() / f"{name}{SUFFIX}"
    raise ConfigurationError(
        f"there is no file {folder / given}, and no configuration has this name (mtrl-lightning"
        f" list shows all): {name_hint(name, names)}"
    )
