"""The commands beside fit and validate, and what surrounds all of them."""

import importlib.metadata
import logging
import os
import subprocess
import sys
import tomllib
import warnings

import pytest
from lightning.pytorch import Trainer

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import EnvStepWandbLogger
from mtrl_lightning.cli import config_list, doctor
from mtrl_lightning.cli.commands import COMMANDS
from mtrl_lightning.cli.config_names import FORMER_NAMES, config_names, find_config
from mtrl_lightning.envs.render import opengl
from mtrl_lightning.errors import ConfigurationError, requirement
from mtrl_lightning.launch.quiet import LOGGER, quiet
from mtrl_lightning.runs import policies
from tests.helpers.command_line import CONFIGS, ROOT, SMALL, config_args

OWN_TASKS = """
from mtrl_lightning.envs import ToyReach

class Own(ToyReach):
    "Two points."
"""


def test_a_configuration_has_a_name_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("env/toy", "env/toy.yaml"):
        assert find_config(given).samefile(ROOT / "configs" / "env" / "toy.yaml")
    assert find_config("quickstart").samefile(ROOT / "configs" / "quickstart.yaml")
    assert {"base", "network/moore", "experiment/mt10_paco"} <= set(config_names())


def test_an_existing_file_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # no file
    assert find_config("quickstart").samefile(ROOT / "configs" / "quickstart.yaml")
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").touch()
    assert find_config("quickstart").samefile(tmp_path / "quickstart")


def test_list_has_a_line_for_every_configuration_and_none_for_former_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["list"])
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line.startswith("  ")]
    names = [*config_names(), *policies()]
    assert sorted(line.split()[0] for line in lines) == sorted(names)
    assert max(len(line) for line in lines) <= 80
    (toy,) = (line for line in lines if line.startswith("  env/toy "))
    assert toy.split(maxsplit=1)[1].startswith("Three points to be moved")
    assert toy.endswith(" ...")
    assert not FORMER_NAMES.keys() & {line.split()[0] for line in lines}
    headings = [line for line in printed if line and not line.startswith(" ")]
    assert headings[:3] == [config_list.COMPLETE, "env", "algorithm"]
    assert headings[-3:-1] == ["logger", "sweep"] and headings[-1].startswith("policies ")


def test_list_of_one_group(capsys):
    main(["list", "gradient"])
    printed = capsys.readouterr().out
    assert printed.startswith("gradient\n") and "  gradient/pcgrad\n" in printed
    assert "env/toy" not in printed
    with pytest.raises(SystemExit) as exit_info:
        main(["list", "gradeint"])
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and "did you mean gradient?" in error
    assert "give one of the groups env, algorithm," in error


def listed(capsys, word):
    main(["list", word])
    lines = capsys.readouterr().out.splitlines()
    return [line.strip() for line in lines if line.startswith("  ") and line[2] != " "]


def test_list_finds_a_part_of_a_name_or_else_of_a_description(capsys):
    assert listed(capsys, "MT10") == [
        name
        for group in ("", "env", "protocol", "experiment")
        for name in names_with("mt10", group)
    ]
    assert listed(capsys, "pcgrad") == [
        "gradient/pcgrad",
        "experiment/mtrl_pcgrad",
    ]
    assert "env/dmc21" in listed(capsys, "control suite")


def names_with(word, group):
    return [name for name in config_names() if word in name and name.rpartition("/")[0] == group]


OPTION_OF = {
    "play": ("first", "first_episode"),
    "collect": ("successes", "successes_only"),
    "compare": ("across", "across_protocols"),
    "sweep": ("dry", "dry_run"),
    "export": ("fold", "folder"),
    "clear": ("replay", "replay_only"),
    "list": ("hel", "help"),
    "doctor": ("hel", "help"),
    "completion": ("hel", "help"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_abbreviated_option_is_refused_with_its_full_name(command, capsys):
    given, meant = OPTION_OF[command]
    needed = {"export": ["--to=onnx"], "compare": ["a"], "sweep": ["a"]}
    needed["collect"] = ["--policy=random", "--env=env/toy", "--episodes=1"]
    shell = ["bash"] if command == "completion" else []
    with pytest.raises(SystemExit) as exit_info:
        main([command, *needed.get(command, shell), f"--{given}"])
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert f"did you mean {meant}? There is no option {given}" in error


def test_a_package_is_installed_in_the_version_that_is_required(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(line for extra in extras for line in extra)]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert requirement("metaworld") == '"metaworld>=3.1,<4"'
    assert requirement("scipy") == '"scipy>=1.11"'
    assert requirement("dm_control") == '"dm_control>=1.0.28,<1.1"'
    assert requirement('"mtrl_lightning[video]"') == '"mtrl_lightning[video]"'
    assert requirement("unknown") == "unknown"
    # as setuptools sorts them in the metadata of an installed package
    required = ["torch<3,>=2.8", "jsonargparse[signatures]<5,>=4.53", 'b!=2,<3,>=1; extra == "x"']
    assert requirement("torch") == '"torch>=2.8,<3"'
    assert requirement("jsonargparse") == '"jsonargparse[signatures]>=4.53,<5"'
    assert requirement("b") == '"b!=2,>=1,<3"'


def test_list_ends_quietly_where_nobody_reads_on():
    line = f"set -o pipefail; '{sys.executable}' -m mtrl_lightning list | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (f"{config_list.COMPLETE}\n", "")


def doctor_prints(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["doctor"])
    return exit_info.value.code, capsys.readouterr().out


@pytest.fixture
def quick_doctor(monkeypatch):
    """A doctor that starts no process."""
    checks = tuple(check for check in doctor.CHECKS if check is not doctor.check_renderer)
    monkeypatch.setattr(doctor, "CHECKS", checks)


def without(monkeypatch, *missing):
    def version(name):
        if name in missing:
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_doctor_names_all_that_matters(quick_doctor, capsys):
    code, printed = doctor_prints(capsys)
    assert code == 0
    for name in (
        "python",
        "torch",
        "mujoco",
        "imageio-ffmpeg",
        "cores",
        "gpu",
        "memory",
        "disk",
        "system",
    ):
        assert f" {name} " in printed


def test_doctor_says_how_to_get_what_is_missing(quick_doctor, capsys, monkeypatch):
    without(monkeypatch, "wandb", "mujoco")
    code, printed = doctor_prints(capsys)
    assert code == 0, "training is possible all the same"
    assert "! wandb          not installed" in printed
    assert 'pip install "mtrl_lightning[wandb]"' in printed
    assert 'pip install "mtrl_lightning[metaworld]"' in printed


def test_doctor_fails_where_nothing_can_be_trained(quick_doctor, capsys, monkeypatch):
    without(monkeypatch, "torch")
    code, printed = doctor_prints(capsys)
    assert code == 1 and "! torch          not installed" in printed
    assert '-> pip install "torch>=' in printed


def test_doctor_finds_a_renderer_that_works(monkeypatch):
    monkeypatch.setattr(opengl, "find_renderer", lambda: "osmesa")
    (finding,) = doctor.check_renderer()
    assert finding.value == "MuJoCo draws images with MUJOCO_GL osmesa" and not finding.fix
    monkeypatch.setattr(opengl, "find_renderer", lambda: "")
    (finding,) = doctor.check_renderer()
    assert finding.value == "MuJoCo draws images"

    def find_none():
        raise ConfigurationError("install one of them")

    monkeypatch.setattr(opengl, "find_renderer", find_none)
    (finding,) = doctor.check_renderer()
    assert finding.fix == "install one of them" and not finding.is_fatal


COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$(($# - 2))
_mtrl_lightning "$2" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""


def test_shells_complete_commands_and_configurations(tmp_path, capsys):
    main(["completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    for words, completed in (
        (["comple"], "completion"),
        (["vali"], "validate"),
        (["fit", "-c", "env/to"], "env/toy env/toy_conflict"),
        (["collect", "--env", "env/to"], "env/toy env/toy_conflict"),
        (["fit", "-c", "env/toy", "-c", "gradient/pcg"], "gradient/pcgrad"),
        (["sweep", "sweep/learn"], "sweep/learning_rates"),
        (["clear", "ru"], ""),
    ):
        line = ["bash", "-c", COMPLETE, "bash", str(script), "mtrl-lightning", *words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert done.stdout.strip() == completed
    main(["completion", "zsh"])
    printed = capsys.readouterr().out
    assert printed.startswith("autoload -U +X bashcompinit") and "env/toy_conflict" in printed


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_the_help_of_the_program_names_every_command(args, capsys):
    main(args)
    text = capsys.readouterr().out
    for command in ("fit", "validate", *COMMANDS):
        assert f"\n    {command}" in text
    assert "Multi-task reinforcement learning" in text and "Trainer" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fti"], "there is no command fti: did you mean fit"),
        (["setup=metaworld", "env=metaworld-mt10"], "docs/from_mtrl.md"),
        (["--name", "a", "fit"], "give the command first, such as mtrl-lightning fit --name"),
    ],
)
def test_a_command_that_does_not_exist(args, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code == 2 and message in capsys.readouterr().err


def test_advertisements_and_harmless_warnings_are_left_out(caplog):
    caplog.set_level(logging.INFO, LOGGER)
    with quiet(), quiet():
        pass
    with quiet(), warnings.catch_warnings(record=True) as warned:
        with quiet():
            Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        logging.getLogger(LOGGER).info("💡 Tip: still left out")
        logging.getLogger(LOGGER).info("benchmark toy")
        warnings.warn("isinstance(treespec, LeafSpec) is deprecated", stacklevel=1)
        warnings.warn("The 'train_dataloader' does not have many workers", stacklevel=1)
        warnings.warn("the replay is empty", stacklevel=1)
    assert "Tip" not in caplog.text and "TPU" not in caplog.text
    assert "benchmark toy" in caplog.text and "GPU available" in caplog.text
    assert [str(warning.message) for warning in warned] == ["the replay is empty"]
    Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert "Tip" in caplog.text, "Lightning advertises in other words now: adapt launch/quiet.py"


def test_wandb_does_not_warn_of_a_setting_that_was_not_given(tmp_path, capfd, monkeypatch):
    wandb = pytest.importorskip("wandb")
    # an earlier test may have silenced W&B, which remembers that
    monkeypatch.setattr("wandb.errors.term._silent", False)
    logger = EnvStepWandbLogger(offline=True, save_dir=str(tmp_path))
    assert "anonymous" not in logger._wandb_init
    wandb.Settings(anonymous=None)
    assert "anonymous" in capfd.readouterr().err, "W&B accepts it now: no need to leave it out"


@pytest.mark.slow
def test_a_module_in_the_working_directory_is_found_also_by_workers(
    command_line, tmp_path, monkeypatch
):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "own_toy_tasks.py").write_text(OWN_TASKS)
    (folder / "json.py").write_text("raise RuntimeError('hides the library')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    benchmark = [
        "--data.benchmark=own_toy_tasks.Own",
        "--data.benchmark.init_args.num_tasks=2",
        "--rollout.num_workers=1",
        "--rollout.total_steps=320",
        "--data.batch_size=64",
    ]
    main(["fit", *config_args(*CONFIGS), *SMALL, f"--root={tmp_path}", *benchmark])
    assert command_line.rows()[-1]["env_steps"] == "320"
    assert sys.path[-1] == os.getcwd()
