import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT, config_args
from tests.test_benchmarks_learning import TINY

COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]
RUNS = [command for command in COMMANDS if command.startswith("mtrl-lightning")]
PROGRAMS = [
    command
    for command in COMMANDS
    if command.startswith(("python -m mtrl_lightning.", "python -m benchmarks."))
]
SHORT = {
    "fit": [
        "--evaluation.num_episodes=1",
        "--evaluation.every=1000000",
        "--checkpoint.every=1000000",
    ],
    "validate": ["--evaluation.num_episodes=1"],
    "clear": [],
}
SMALL = {  # in full in tests/test_benchmarks*.py
    "snapshots": ["--rows=20000", "--every=1000", "--repeats=1"],
    "faults": ["--help"],
    "stepping": ["--tasks=1", "--workers=0", "--env_steps=5", "--repeats=1"],
    "updating": ["--num_tasks=2", "--rows=4", "--width=8", "--updates=2", "--repeats=1", "--grow"],
    "gradients": ["--tasks=2", "--rows=4", "--width=8", "--depth=1", "--updates=1", "--repeats=1"],
    "replay": ["--tasks=3", "--rows=4", "--capacity=60", "--width=8", "--calls=2", "--repeats=1"],
    "end_to_end": ["--help"],
    "on_policy": ["--help"],
}
EXPECTED = {"fit": "average", "validate": "average", "clear": "To delete"}
STEPS = ["--rollout.warmup_steps=40", "--rollout.total_steps=120"]
STEPS_ON_POLICY = [
    "--rollout.total_steps=40",
    "--rollout.envs_per_task=1",
    "--model.init_args.num_steps=4",
    "--model.init_args.num_minibatches=2",
]


def run(command, *extra, folder):
    words = shlex.split(command)
    assert words.pop(0) == "mtrl-lightning"
    options = [
        *SHORT[words[0]],
        *(["--data.benchmark.init_args.horizon=5"] if words[0] == "fit" else []),
        *extra,
    ]
    result = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *words, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_first_two_commands_need_nothing_and_train_and_test():
    first, second = COMMANDS[:2]
    venv = "python -m venv .venv"
    torch = (
        ".venv/bin/pip install --no-deps -c constraints.txt"
        " --extra-index-url https://download.pytorch.org/whl/cpu torch"
    )
    install = '.venv/bin/pip install -c constraints.txt -e ".[{}]"'
    fit = ".venv/bin/mtrl-lightning fit -c quickstart"
    assert first == " && ".join([venv, torch, install.format("metaworld"), fit])
    assert second == f"{venv} && {install.format('dev')} && .venv/bin/python -m pytest"
    script = (ROOT / ".ci" / "run").read_text()
    for part in (
        "python3 -m venv",
        'pip install -q -c constraints.txt -e ".[dev]"',
        "python -m pytest",
    ):
        assert part in script


def test_the_python_code_runs_as_a_script_without_a_main_guard(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "runs/run/version_0" in result.stdout and "heavy" in result.stdout
    assert (tmp_path / "runs/pendulums/version_0/metrics.csv").is_file()


@pytest.fixture(scope="module")
def quickstart_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    command = COMMANDS[0].split(".venv/bin/")[-1]
    assert "average" in run(command, *STEPS, folder=folder)
    return folder


@pytest.mark.parametrize("command", RUNS)
def test_every_command_runs(quickstart_folder, command):
    continuing = "--resume" in command
    if continuing:
        command = command.replace("500000", "240")
    begins = command.split()[1] == "fit" and not continuing
    steps = STEPS_ON_POLICY if "mtppo" in command else STEPS
    printed = run(command, *(steps if begins else []), folder=quickstart_folder)
    assert EXPECTED[command.split()[1]] in printed


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_program_runs(command, tmp_path):
    module, *given = command.split()[2:]
    name = module.rsplit(".", 1)[1]
    if name == "learning":  # the same variants of a tiny run
        config = tmp_path / "tiny.yaml"
        config.write_text(yaml.safe_dump(TINY))
        first = given.index("--variant")
        given = [word.replace("configs/quickstart.yaml", str(config)) for word in given]
        given[first:first] = ["--seeds=1", f"--folder={tmp_path / 'out'}"]
    line = [sys.executable, "-m", module, *given, *SMALL.get(name, [])]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_command_is_known():
    assert {*COMMANDS[:2], *RUNS, *PROGRAMS} == set(COMMANDS)


def test_every_file_that_is_named_is_there():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:configs|notebooks|benchmarks)/[\w/]+\.\w+", text))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def options_of(parsed, prefix=""):
    """Return the names of all options of a printed configuration."""
    for name, value in parsed.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from options_of(value, f"{prefix}{name}.")


def test_what_the_table_for_users_of_mtrl_names_are_options():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| mtrl | here |") : text.index("## Results")]
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
        ["network/mlp", "encoder/mixture_cluster"],
        ["network/mlp", "encoder/task_encoder"],
    ):
        configs = (
            "base",
            "env/metaworld_mt10",
            "algorithm/mtsac",
            *stack,
            "gradient/gradnorm",
        )
        line = [sys.executable, "cli.py", "fit", *config_args(*configs), "--print_config"]
        printed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found |= set(options_of(yaml.safe_load(printed)))
    assert named - found == set()
