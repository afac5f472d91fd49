"""What is installed: the package alone, with its data and without what measures or tests it."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT

NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("mtrl_lightning", "benchmarks", "tests", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_COPIED)
    for name in ("pyproject.toml", "README.md", "cli.py"):
        shutil.copy(ROOT / name, source)
    line = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*line, "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


def test_the_wheel_has_the_package_and_nothing_else(wheel_names):
    top = {name.split("/")[0] for name in wheel_names}
    (about,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"mtrl_lightning", about}
    inside = {name.split("/")[1] for name in wheel_names if name.startswith("mtrl_lightning/")}
    assert not inside & {"benchmarks", "results", "tests"}


def test_every_module_and_the_data_are_in_the_wheel(wheel_names):
    package = ROOT / "mtrl_lightning"
    wanted = [*package.rglob("*.py"), *package.glob("networks/data/*.json")]
    missing = {path.relative_to(ROOT).as_posix() for path in wanted} - set(wheel_names)
    assert missing == set()
