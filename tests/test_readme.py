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
from mtrl_lightning.cli.config_names import config_names
from tests.helpers.command_line import (
    ROOT,
    leave_out_curves,
    parser,
    resolve,
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


NEVER_RUN = {"text", "yaml"}
"""Languages of blocks that show output or a file."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_is_run_or_says_why_not(page):
    wrong = [
        block.group()
        for block in BLOCK.finditer(page.read_text())
        if block["reason"] is None
        and block["language"] not in {"bash", "python", *NEVER_RUN}
        and (block["language"][0] != "{" or block["language"].startswith("{code-block}"))
    ]
    assert wrong == [], "see 'Code blocks in the documents' in CONTRIBUTING.md"


INSTALL = commands(README)[:2]
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
PROGRAMS = [command for command in COMMANDS if command.startswith("python -m benchmarks.")]
BUILD = ["python -m sphinx -n -W --keep-going docs docs/_build"]
"""Run by tests/test_docs.py."""
FUZZ = ["python -m tests.fuzzing --files 3000"]
"""Run with fewer files by tests/test_fuzz.py."""
SHORT = {
    "fit": [
        "--evaluation.num_episodes=1",
        "--evaluation.every=1000000",
        "--checkpoint.every=1000000",
    ],
    "validate": ["--evaluation.num_episodes=1", "--evaluation.num_workers=0"],
    "clear": [],
    "collect": ["--episodes=1", "--num_workers=0", "--", "--data.benchmark.init_args.horizon=5"],
    "compare": [],
    "sweep": [],
    "export": [],
    "list": [],
    "play": ["--width=64", "--height=48", "--num_workers=0"],
}
EXPECTED = {
    "fit": "average",
    "validate": "average",
    "clear": "Nothing was deleted",
    "collect": "Collected in",
    "compare": "comparison: report.html",
    "sweep": "mtrl-lightning fit -c ",
    "export": "Exported",
    "list": "door-open-v3",
    "play": "Videos in",
}
STEPS = [
    "--rollout.warmup_steps=40",
    "--rollout.total_steps=120",
    "--data.batch_size=300",  # a multiple of each number of tasks but DMC21's: see run_new
]
STEPS_ON_POLICY = [
    "--rollout.total_steps=40",
    "--rollout.envs_per_task=2",
    "--model.init_args.num_steps=4",
    "--model.init_args.num_minibatches=2",
]
IN_PROCESS = ["--rollout.num_workers=0", "--evaluation.num_workers=0"]
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
        if words[0] == "play" and "--task" not in words:
            options.append("--task=reach-v3")
        if is_fit:
            options += ["--data.benchmark.init_args.horizon=5", "--trainer.accelerator=cpu"]
            if command != QUICKSTART:
                options += IN_PROCESS
            if command == FIRST:
                options += ["--rollout.num_workers=1"]
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


def test_the_first_two_commands_need_nothing_and_train_and_test():
    first, second = INSTALL
    venv = "python -m venv .venv && .venv/bin/pip install "
    test = ".venv/bin/python -m pytest -n 2"
    assert first.startswith(venv) and first.endswith(f" && .venv/bin/{FIRST}")
    assert second.startswith(venv) and second.endswith(f" && {test}")
    assert "\npython -m pytest -n 2\n" in (ROOT / ".ci" / "run").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for command in INSTALL:
        (extras,) = re.findall(r'-c constraints\.txt -e "\.\[([\w,]+)\]"', command)
        for extra in extras.split(","):
            assert f"\n{extra} = [" in project


@pytest.mark.slow
def test_the_python_code_learns_as_a_script_without_a_main_guard(tmp_path):
    (code,) = blocks(README, "python")
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "drawer-close-v3" in result.stdout
    (success,) = re.findall(r"^runs/run/version_0 (\S+)", result.stdout, re.MULTILINE)
    # both tasks are learned: a random policy has 0.1, and drawer-close alone gives 0.5
    assert float(success) >= 0.7
    assert (tmp_path / "runs/run/version_0/metrics.csv").is_file()


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
    for name, module in {"--to onnx": "onnxruntime", "--to minari": "minari"}.items():
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
    code = blocks(page, "python")
    if not code:
        return
    (networks,) = (c for c in commands(ROOT / "docs" / "custom_networks.md") if "gated" in c)
    if "runs/gated" in "".join(code):
        run_new(networks, tmp_path)
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
        assert program.options_of(given).command == command
        return
    monkeypatch.setattr(sys, "argv", [module, *given])
    try:
        code = program.main()
    except SystemExit as ended:
        code = ended.code
    assert not code


SHORT_RUN = 20_000
"""Environment steps of an example that shows a part of the package and not what is learned."""


@pytest.mark.parametrize("command", [c for c in RUNS if "-c logger/" in c])
def test_examples_of_loggers_are_short(command):
    names = re.findall(r"-c (\S+)", command)
    options = [word for word in command.split() if word.startswith("--rollout.total_steps=")]
    assert resolve(*names, options=options)["rollout"]["total_steps"] <= SHORT_RUN


def test_every_command_is_known():
    assert {*INSTALL, QUICKSTART, *RUNS, *PROGRAMS, *BUILD, *FUZZ} == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_is_named_is_there(page):
    text = page.read_text().replace("docs/_build/", "")
    named = set(re.findall(r"(?:configs|notebooks|benchmarks|examples|docs)/[\w/]+\.\w+", text))
    in_package = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|json))`", text))
    folders = (ROOT, ROOT / "mtrl_lightning")
    missing = [
        name
        for name in named | in_package
        if not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


def test_every_configuration_that_is_named_is_there():
    text = "".join(page.read_text() for page in PAGES)
    groups = "|".join({name.split("/")[0] for name in config_names() if "/" in name})
    named = set(re.findall(rf"-c ((?:{groups})/\w+)(?![\w.*])", text))
    assert len(named) > 40
    assert named - set(config_names()) == set()


def options_of(parsed, prefix=""):
    """Return the names of all options of a printed configuration."""
    for name, value in parsed.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from options_of(value, f"{prefix}{name}.")


FROM_MTRL = (ROOT / "docs" / "from_mtrl.md").read_text()
BESIDE_MTRL = re.findall(r"`mtrl-lightning (fit [^`]+)`", FROM_MTRL)
DOCUMENTED_BY_MTRL = 11
"""Commands of its page "Baselines": five on DMControl, six on MetaWorld."""


def test_the_page_for_users_of_mtrl_begins_with_its_commands_and_names_configurations():
    assert len(BESIDE_MTRL) >= DOCUMENTED_BY_MTRL
    first, second = FROM_MTRL.split("\n## ")[1:3]
    assert first.count("`mtrl-lightning fit ") == len(BESIDE_MTRL)
    assert second.startswith("The options")
    assert not re.search(r"configs/|\w\.yaml", FROM_MTRL)
    assert set(re.findall(r"-c ([\w/]+)", FROM_MTRL)) <= set(config_names())


@pytest.mark.slow
@pytest.mark.parametrize("command", BESIDE_MTRL)
def test_a_command_beside_that_of_mtrl_is_accepted(command):
    config = parser().parse_args([*command.split()[1:], "--seed_everything", "2"])
    assert config.seed_everything == 2 and config.data.benchmark


@pytest.mark.slow
def test_what_the_table_for_users_of_mtrl_names_are_options():
    text = FROM_MTRL
    table = text[text.index("| mtrl | here |") :].split("\n\n")[0]
    here = " ".join(
        row.rsplit(" | ", 1)[1] for row in table.splitlines()[2:] if row.startswith("|")
    )
    begun = ("rollout", "evaluation", "checkpoint", "replay", "data", "model", "trainer")
    named = {
        word
        for word in re.findall(r"`([\w.]+)`", here)
        if "." in word and word.split(".")[0] in begun
    }
    assert len(named) > 25
    found = set()
    for stack in (
        ["network/multi_head_mtrl"],
        ["network/mlp", "encoder/care"],
        ["network/mlp", "encoder/mixture"],
        ["network/mlp", "encoder/task_encoder"],
        ["network/mlp", "encoder/pixels"],
        ["network/mlp", "algorithm/distral"],
        ["network/mlp", "env/hipbmdp"],
    ):
        names = ("base", "env/metaworld_mt10", "algorithm/mtsac", *stack, "gradient/gradnorm")
        found |= set(options_of(resolve(*names)))
    assert named - found == set()
