"""What is installed: the package with its configurations, without what measures or tests it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import mtrl_lightning
from mtrl_lightning.__main__ import main
from tests.helpers.command_line import ROOT, SMALL

pytestmark = pytest.mark.slow

COPIED = ("mtrl_lightning", "benchmarks", "tests", "configs")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.egg-info")
FILES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "MANIFEST.in",
    "SECURITY.md",
    "setup.cfg",
    "setup.py",
    "constraints.txt",
    "cli.py",
)
PIP = [sys.executable, "-m", "pip"]
OFFLINE = ["--no-deps", "--no-index", "--disable-pip-version-check"]
BUILD = "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def run(line, folder, **environment):
    """Run a program outside the repository and return what it prints, warnings included."""
    names = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in line],
        cwd=folder,
        env={**names, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the repository with ``dist/``, and the output of the build in ``printed.txt``."""
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        shutil.copytree(ROOT / name, source / name, ignore=NOT_COPIED)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    (source / "printed.txt").write_text(run([sys.executable, "-c", BUILD], source))
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    (sdist,) = (source / "dist").glob("*.tar.gz")
    options = ["--no-build-isolation", "--wheel-dir", folder]
    run([*PIP, "wheel", *OFFLINE, *options, sdist], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


def test_the_wheel_has_the_package_and_nothing_else(names):
    top = {name.split("/")[0] for name in names}
    (about,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"mtrl_lightning", about}
    inside = {name.split("/")[1] for name in names if name.startswith("mtrl_lightning/")}
    assert not inside & {"benchmarks", "results", "tests"}
    assert f"{about}/licenses/LICENSE" in names


def test_wheel_has_every_file_and_configuration(names):
    package = ROOT / "mtrl_lightning"
    files = [path for path in package.rglob("*") if path.suffix not in (".pyc", ".md")]
    expected = {path.relative_to(ROOT).as_posix() for path in files if path.is_file()}
    assets = "py.typed", "networks/data/embeddings.json"
    assert {f"mtrl_lightning/{name}" for name in assets} <= expected
    expected |= {
        f"mtrl_lightning/{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.glob("configs/**/*.yaml")
    }
    assert expected - set(names) == set()


def test_the_installed_program_works_outside_the_repository(wheel, tmp_path):
    installed = tmp_path / "installed"
    run([*PIP, "install", *OFFLINE, "--target", installed, wheel], tmp_path)
    program = installed / ("Scripts" if os.name == "nt" else "bin") / "mtrl-lightning"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = {"PYTHONPATH": str(installed)}
    assert "\n  env/toy " in run([program, "list"], elsewhere, **path)
    line = [sys.executable, "-m", "mtrl_lightning", "doctor"]
    printed = run(line, elsewhere, MUJOCO_GL="none", **path)
    assert f"{mtrl_lightning.__version__} in {installed / 'mtrl_lightning'}\n" in printed
    configs = ("base", "env/toy", "algorithm/mtsac", "network/mlp")
    options = [word for name in configs for word in ("-c", name)]
    run([program, "fit", *options, *SMALL, "--data.total_steps=320"], elsewhere, **path)
    assert (elsewhere / "runs" / "run" / "version_0" / "checkpoints" / "last.ckpt").is_file()


def test_wheel_metadata_has_pythons_and_no_pins(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("METADATA"))
        metadata = opened.read(name).decode()
    assert "Requires-Python: <3.14,>=3.11" in metadata
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "==" in line.partition(";")[0]] == []
    pinned = (ROOT / "constraints.txt").read_text()
    assert {"metaworld==", "mujoco==", "dm_control=="} <= set(re.findall(r"^\w+==", pinned, re.M))


def test_the_version_is_the_same_everywhere(capsys):
    version = mtrl_lightning.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mtrl-lightning {version}\n"
