"""Every command and every block of Python of the README and of the pages in docs/ works.

A block that does not run is preceded by ``<!-- not tested: reason -->``. Runs are composed and
checked, but not trained, unless other commands need them.
"""

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest

import mtrl_lightning
from mtrl_lightning.__main__ import main
from tests.helpers.command_line import (
    ROOT,
    leave_out_curves,
    only_composed,
    short_train,
    skip_without_renderer,
)
from tests.helpers.tiers import slow_unless

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(<!-- not tested: (?P<reason>[^>]+) -->\n)?```(?P<language>\S.*?)\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


def blocks(page, language):
    """Return the tested code blocks of a page in this language."""
    return [
        block["code"]
        for block in BLOCK.finditer(page.read_text())
        if block["language"] == language and block["reason"] is None
    ]


def commands(page):
    return [line for block in blocks(page, "bash") for line in block.splitlines()]


INSTALL = commands(README)[:2]
LEARNS, *_ = blocks(ROOT / "docs" / "first_run.md", "python")
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
"""The commands of all pages, each once, in the README's order first."""
FIRST = "mtrl-lightning fit -c mt10_quickstart"
"""The README's first command, after the installation."""
QUICKSTART = "mtrl-lightning fit -c quickstart"
"""Trained for the commands that take its run."""
RUNS = [command for command in COMMANDS if "mtrl-lightning " in command and command not in INSTALL]
PROGRAMS = [command for command in COMMANDS if command.startswith("python -m benchmarks.")]
BUILD = "python -m sphinx -n -W --keep-going docs docs/_build"
EXPECTED = {
    "validate": "average",
    "clear": "Nothing was deleted",
    "collect": "Collected in",
    "compare": "Curves and tables: comparison.html",
    "export": "Exported",
    "play": "Videos in",
}
OPTIONS = {
    "validate": ["--evaluation.num_episodes=1", "--evaluation.num_workers=0"],
    "collect": ["--episodes=1", "--num_workers=0", "--", "--data.benchmark.init_args.horizon=5"],
    "play": ["--width=64", "--height=48", "--num_workers=0"],
}
SMALL = [
    "--data.benchmark.init_args.horizon=5",
    "--data.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.num_episodes=1",
    "--evaluation.every=1000000",
    "--checkpoint.every_n_env_steps=1000000",
    "--trainer.accelerator=cpu",
]
OFF_POLICY = ["--data.total_steps=120", "--data.warmup_steps=40", "--data.batch_size=300"]
ON_POLICY = [
    "--data.total_steps=40",
    "--data.envs_per_task=2",
    "--data.num_workers=1",
    "--data.benchmark.init_args.evaluation_horizon=6",
    "--model.init_args.num_steps=4",
    "--model.init_args.num_minibatches=2",
]


def run(command, *extra, folder):
    """Run a command of the command line in this process, and return what it prints."""
    words = shlex.split(command)
    with pytest.MonkeyPatch.context() as patch:
        leave_out_curves(patch)  # a fixture's runs have them otherwise
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            assert name == "PYTHONPATH"
            patch.syspath_prepend(str(ROOT / value))
        assert words.pop(0) == "mtrl-lightning"
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["mtrl-lightning", *words, *extra])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main()
    return printed.getvalue()


def train(command, folder):
    """Run a command that trains, at a small size."""
    size = ON_POLICY if command == FIRST else OFF_POLICY
    assert "average" in run(command, *SMALL, *size, folder=folder)


@pytest.mark.slow
def test_scripts_of_python_run_without_a_main_guard(tmp_path):
    (code,) = blocks(README, "python")
    code += LEARNS
    smaller = {"6_000": "60", "0_000": "00", "horizon=200": "horizon=20"}
    smaller |= {'"envs_per_task": 10': '"envs_per_task": 2', "num_episodes=5": "num_episodes=1"}
    for large, small in smaller.items():
        assert large in code
        code = code.replace(large, small)
    (tmp_path / "script.py").write_text(code)
    line = [sys.executable, "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert b"drawer-close-v3" in subprocess.check_output(line, cwd=tmp_path, env=environment)
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == 2


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The folder with the run that the pages' commands take."""
    folder = tmp_path_factory.mktemp("readme")
    train(QUICKSTART, folder)
    return folder


FAST = [command for command in commands(README) if "lightning fit" in command]


@pytest.mark.parametrize("command", slow_unless(FAST, [FIRST, *RUNS]), ids=str)
def test_every_command_works(request, tmp_path, command):
    subcommand = command.split("mtrl-lightning ")[1].split()[0]
    if subcommand == "play":
        skip_without_renderer()
    if any(name in command for name in ("env/dm", "env/hipbmdp", "runs/poles")):
        pytest.importorskip("dm_control")
    needed = {"--to onnx": "onnxruntime", "--to minari": "minari", "lightning collect": "minari"}
    for name, module in needed.items():
        if name in command:
            pytest.importorskip(module)
    takes_run = "quickstart" in command.replace("-c quickstart", "").replace("mt10_quickstart", "")
    folder = request.getfixturevalue("quickstart") if takes_run else tmp_path
    if command == FIRST:
        train(command, folder)
    elif subcommand == "fit":
        with only_composed():
            run(command, folder=folder)
    else:
        if "runs/poles" in command:
            train(next(other for other in RUNS if "--name poles" in other), folder)
        tasks = ["--tasks=reach-v3"] if command.startswith("mtrl-lightning play runs") else []
        options = [*tasks, *OPTIONS.get(subcommand, [])]
        assert EXPECTED[subcommand] in run(command, *options, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if blocks(page, "python")], ids=lambda page: page.stem
)
def test_the_python_code_of_a_page_runs(page, tmp_path, monkeypatch):
    code = [block for block in blocks(page, "python") if block != LEARNS]
    if "runs/gated" in "".join(code):
        train(next(command for command in RUNS if "--name gated" in command), tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mtrl_lightning, "train", short_train)
    names = {"load_policy": mtrl_lightning.load_policy, "__name__": page.stem}
    for block in code:
        exec(block, names)


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_program_takes_its_options(command, monkeypatch):
    """They run with small sizes in test_benchmarks.py."""
    module, *given = command.split()[2:]
    program = importlib.import_module(module)
    monkeypatch.setattr(program, "run", lambda parser, args, _: parser.parse_args(args))
    program.main(given)


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    line = [sys.executable, *shlex.split(BUILD)[1:-1], tmp_path / "site", "-d", tmp_path / "trees"]
    subprocess.run(line, cwd=ROOT, check=True)


def test_every_command_is_known():
    assert {*INSTALL, *RUNS, *PROGRAMS, BUILD} == set(COMMANDS)
