"""Every command and every block of Python of the README and of the pages in docs/ runs.

A block that does not run is preceded by ``<!-- not tested: reason -->``.
"""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mtrl_lightning
from mtrl_lightning.__main__ import main
from tests.helpers.command_line import (
    ROOT,
    leave_out_curves,
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
"""Both are run for those that continue them."""
RUNS = [
    command
    for command in COMMANDS
    if "mtrl-lightning " in command and command not in [*INSTALL, QUICKSTART]
]
MODULES = ("python -m benchmarks.", "python -m mtrl_lightning.")
PROGRAMS = [command for command in COMMANDS if command.startswith(MODULES)]
BUILD = ["python -m sphinx -n -W --keep-going docs docs/_build"]
"""Run by tests/test_docs.py."""
SHORT = {
    "fit": [
        "--evaluation.num_episodes=1",
        "--evaluation.every=1000000",
        "--checkpoint.every_n_env_steps=1000000",
    ],
    "validate": ["--evaluation.num_episodes=1", "--evaluation.num_workers=0"],
    "clear": [],
    "collect": ["--episodes=1", "--num_workers=0", "--", "--data.benchmark.init_args.horizon=5"],
    "compare": [],
    "export": [],
    "play": ["--width=64", "--height=48", "--num_workers=0"],
}
EXPECTED = {
    "fit": "average",
    "validate": "average",
    "clear": "Nothing was deleted",
    "collect": "Collected in",
    "compare": "Curves and tables: comparison.html",
    "export": "Exported",
    "play": "Videos in",
}
STEPS = [
    "--data.warmup_steps=40",
    "--data.total_steps=120",
    "--data.batch_size=300",  # a multiple of each number of tasks but DMC21's: see run_new
]
STEPS_ON_POLICY = [
    "--data.total_steps=40",
    "--data.envs_per_task=2",
    "--model.init_args.num_steps=4",
    "--model.init_args.num_minibatches=2",
]
IN_PROCESS = ["--data.num_workers=0", "--evaluation.num_workers=0"]
"""Starting workers takes seconds: the quickstart has its own, and the first command one."""
NARROW = [f"--model.init_args.{part}.init_args.width=16" for part in ("actor", "critic")]


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
        is_fit = words[0] == "fit"
        options = [*SHORT[words[0]], *extra]
        if words[0] == "play" and "--tasks" not in words:
            options.append("--tasks=reach-v3")
        if is_fit:
            options += ["--data.benchmark.init_args.horizon=5", "--trainer.accelerator=cpu"]
            if command != QUICKSTART:
                options += IN_PROCESS
            if command == FIRST:
                options += ["--data.num_workers=1"]
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["mtrl-lightning", *words, *options])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main()
    return printed.getvalue()


def run_new(command, folder):
    """Run a command that starts a run, at a small size."""
    on_policy = ("mtppo", "mt10_cpu", "mt50_cpu", "mt10_quickstart", "dmc21_cpu")
    is_on_policy = any(name in command for name in on_policy)
    steps = STEPS_ON_POLICY if is_on_policy else STEPS
    if "mt10_quickstart" in command or "mt10_cpu" in command:
        steps = [*steps, "--data.benchmark.init_args.evaluation_horizon=6"]
    narrow = [] if "--init_from mt10" in command else NARROW  # the policy has its own width
    return run(command, *steps, *narrow, folder=folder)


def run_script(code, folder):
    """Run Python code as a script of its own; return what it prints."""
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    result = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_script_with_lightnings_trainer_runs(tmp_path):
    (code,) = blocks(README, "python")
    run_script(code.replace("total_steps=6_000", "total_steps=60"), tmp_path)
    assert list(tmp_path.rglob("metrics.jsonl"))
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_the_python_code_learns_as_a_script_without_a_main_guard(tmp_path):
    printed = run_script(LEARNS, tmp_path)
    assert "drawer-close-v3" in printed
    (success,) = re.findall(r"runs/run/version_0 (\S+)", printed)
    # both tasks are learned: a random policy has 0.1, and drawer-close alone gives 0.5
    assert float(success) >= 0.7
    assert (tmp_path / "runs/run/version_0/metrics.jsonl").is_file()


@pytest.fixture(scope="module")
def quickstart_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for command in (FIRST, QUICKSTART):
        assert "average" in run_new(command, folder)
    return folder


def newest_version(folder, name):
    return max(path.name for path in (folder / "runs" / name).iterdir())


@pytest.mark.parametrize("command", slow_unless(commands(README), RUNS), ids=str)
def test_every_command_runs(quickstart_folder, command):
    subcommand = command.split("mtrl-lightning ")[1].split()[0]
    if subcommand == "play":
        skip_without_renderer()
    if any(name in command for name in ("env/dm", "dmc", "env/hipbmdp", "runs/poles")):
        pytest.importorskip("dm_control")
    needed = {"--to onnx": "onnxruntime", "--to minari": "minari", "lightning collect": "minari"}
    for name, module in needed.items():
        if name in command:
            pytest.importorskip(module)
    if "--resume" in command:
        short = re.sub(r"total_steps \d+", "total_steps 240", command)
        printed = run(short, folder=quickstart_folder)
    elif subcommand == "fit":
        printed = run_new(command, quickstart_folder)
    else:
        if "runs/poles" in command:
            (families,) = (c for c in COMMANDS if "--name poles" in c)
            run_new(families, quickstart_folder)
            command = command.replace("version_0", newest_version(quickstart_folder, "poles"))
        printed = run(command, folder=quickstart_folder)
    assert EXPECTED[subcommand] in printed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_the_python_code_of_a_page_runs(page, tmp_path, monkeypatch):
    code = [block for block in blocks(page, "python") if block != LEARNS]
    if not code:
        return
    (network,) = (command for command in COMMANDS if "--name gated" in command)
    if "runs/gated" in "".join(code):
        run_new(network, tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mtrl_lightning, "train", short_train)
    names = {"load_policy": mtrl_lightning.load_policy, "__name__": page.stem}
    for block in code:
        exec(block, names)


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_program_runs(command, monkeypatch):
    module, *given = command.split()[2:]
    program = importlib.import_module(module)
    assert '\nif __name__ == "__main__":\n' in Path(program.__file__).read_text()
    monkeypatch.chdir(ROOT)
    if module.startswith("benchmarks."):  # they run with small sizes in tests/test_benchmarks*.py
        parsed = []
        monkeypatch.setattr(
            program, "run", lambda parser, args, _: parsed.append(parser.parse_args(args))
        )
        program.main(given)
        assert len(parsed) == 1
        return
    monkeypatch.setattr(sys, "argv", [module, *given])
    try:
        code = program.main()
    except SystemExit as ended:
        code = ended.code
    assert not code


def test_every_command_is_known():
    assert {*INSTALL, QUICKSTART, *RUNS, *PROGRAMS, *BUILD} == set(COMMANDS)
