"""What is installed: the package with its configurations, without what measures or tests it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import mtrl_lightning
from tests.helpers.command_line import ROOT, SMALL

pytestmark = pytest.mark.slow

COPIED = ("mtrl_lightning", "benchmarks", "tests", "configs")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.egg-info")
FILES = (
    *("pyproject.toml", "setup.cfg", "setup.py", "constraints.txt", "cli.py", "MANIFEST.in"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
)
PIP = [sys.executable, "-m", "pip"]
OFFLINE = ["--no-deps", "--no-index", "--disable-pip-version-check"]
BUILD = "import setuptools.build_meta as b; b.build_sdist('dist')"


def run(line, folder, **environment):
    """Run a program outside the repository and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": "", **environment}
    return subprocess.check_output([*map(str, line)], cwd=folder, env=environment, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that is built from the sdist of a copy of the repository."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    for name in COPIED:
        shutil.copytree(ROOT / name, source / name, ignore=NOT_COPIED)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-c", BUILD], source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    options = ["--no-build-isolation", "--wheel-dir", folder]
    run([*PIP, "wheel", *OFFLINE, *options, sdist], folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_the_package_with_every_file_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (name,) = (name for name in names if name.endswith("METADATA"))
        metadata = opened.read(name).decode()
    top = {name.split("/")[0] for name in names}
    (about,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"mtrl_lightning", about} and f"{about}/licenses/LICENSE" in names
    package = ROOT / "mtrl_lightning"
    files = [path for path in package.rglob("*") if path.suffix not in (".pyc", ".md")]
    expected = {path.relative_to(ROOT).as_posix() for path in files if path.is_file()}
    expected |= {
        f"mtrl_lightning/{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.glob("configs/**/*.yaml")
    }
    assert expected - set(names) == set()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "==" in line.partition(";")[0]] == []


def test_installed_program_works_outside_the_repository(wheel, tmp_path):
    installed = tmp_path / "installed"
    run([*PIP, "install", *OFFLINE, "--target", installed, wheel], tmp_path)
    program = installed / ("Scripts" if os.name == "nt" else "bin") / "mtrl-lightning"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = {"PYTHONPATH": str(installed)}
    line = [sys.executable, "-m", "mtrl_lightning", "doctor"]
    printed = run(line, elsewhere, MUJOCO_GL="none", **path)
    assert f"{mtrl_lightning.__version__} in {installed / 'mtrl_lightning'}\n" in printed
    configs = ("base", "env/toy", "algorithm/mtsac", "network/mlp")
    options = [word for name in configs for word in ("-c", name)]
    run([program, "fit", *options, *SMALL, "--data.total_steps=320"], elsewhere, **path)
    assert (elsewhere / "runs" / "run" / "version_0" / "checkpoints" / "last.ckpt").is_file()
