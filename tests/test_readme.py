import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from tests.test_benchmarks_learning import TINY

COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]
RUNS = [command for command in COMMANDS if command.startswith("python cli.py")]
BENCHMARKS = [command for command in COMMANDS if command.startswith("python -m mtrl_lightning.benchmarks.")]
SHORT = {
    "fit": ["--evaluation.num_episodes=1", "--evaluation.every=1000000", "--checkpoint.every=1000000"],
    "validate": ["--evaluation.num_episodes=1"],
    "clear": [],
}
SMALL = {  # in full in tests/test_benchmarks*.py
    "snapshots": ["--rows=20000", "--every=1000", "--repeats=1"],
    "faults": ["--help"],
    "stepping": ["--tasks=1", "--workers=0", "--env_steps=5", "--repeats=1"],
    "updating": ["--num_tasks=2", "--rows=4", "--width=8", "--updates=2", "--repeats=1"],
    "replay": ["--tasks=3", "--rows=4", "--capacity=60", "--width=8", "--calls=2", "--repeats=1"],
    "end_to_end": ["--help"],
}
EXPECTED = {"fit": "average", "validate": "average", "clear": "To delete"}
STEPS = ["--rollout.warmup_steps=40", "--rollout.total_steps=120"]


def run(command, *extra, folder):
    words = shlex.split(command)
    assert words[:2] == ["python", "cli.py"]
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words[2:]]
    options = [*SHORT[words[0]], *(["--data.benchmark.init_args.horizon=5"] if words[0] == "fit" else []), *extra]
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
    setup = 'python -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[{}]" && .venv/bin/python '
    assert first == setup.format("metaworld") + "cli.py fit -c configs/quickstart.yaml"
    assert second == setup.format("dev") + "-m pytest"
    script = (ROOT / ".ci" / "run").read_text()
    for part in ("python3 -m venv", 'pip install -q -c constraints.txt -e ".[dev]"', "python -m pytest"):
        assert part in script


@pytest.fixture(scope="module")
def quickstart_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    command = COMMANDS[0].split("&& ")[-1].replace(".venv/bin/python", "python")
    assert "average" in run(command, *STEPS, folder=folder)
    return folder


@pytest.mark.parametrize("command", RUNS)
def test_every_command_runs(quickstart_folder, command):
    continuing = "--ckpt_path" in command
    if continuing:
        command = command.replace("500000", "240")
    begins = command.split()[2] == "fit" and not continuing
    printed = run(command, *(STEPS if begins else []), folder=quickstart_folder)
    assert EXPECTED[command.split()[2]] in printed


@pytest.mark.parametrize("command", BENCHMARKS)
def test_every_benchmark_runs(command, tmp_path):
    module, *given = command.split()[2:]
    name = module.rsplit(".", 1)[1]
    if name == "learning":  # the same variants of a tiny run
        config = tmp_path / "tiny.yaml"
        config.write_text(yaml.safe_dump(TINY))
        first = given.index("--variant")
        given = [word.replace("configs/quickstart.yaml", str(config)) for word in given]
        given[first:first] = ["--seeds=1", f"--folder={tmp_path / 'out'}"]
    line = [sys.executable, "-m", module, *given, *SMALL.get(name, [])]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_command_is_known():
    assert {*COMMANDS[:2], *RUNS, *BENCHMARKS} == set(COMMANDS)
