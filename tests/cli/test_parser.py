"""Runs, files and nulls among the arguments of ``fit`` and ``validate``."""

import os
from functools import cache
from pathlib import Path

import pytest
from jsonargparse import ArgumentError

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli.commands import option_tips
from mtrl_lightning.cli.lightning_cli import build_parser
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import config_file_of, find_checkpoint
from tests.helpers.command_line import CONFIGS

CONFIG = f"extends: [{', '.join(CONFIGS)}]\nname: try\nroot: runs\nmetrics: {{every: 3}}\n"
parser = cache(build_parser)


def parse(command, *args):
    return parser(command).parse_args([str(argument) for argument in args])


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was continued once."""
    folder = tmp_path / "try" / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.replace("every: 3", "every: 2"))
    (folder / "config_from_000000000900.yaml").write_text(CONFIG)
    for name in ("best", "last", "step_000000000900"):
        (folder / "checkpoints" / f"{name}.ckpt").touch()
    return folder


@pytest.mark.parametrize("option", ["two words", "one word"])
def test_a_run_is_resumed_with_its_last_configuration_under_all_other_arguments(run, option):
    given = ["--resume", run] if option == "two words" else [f"--resume={run}"]
    config = parse("fit", *given)
    assert (config.ckpt_path, config.name, config.metrics.every) == (str(run), "try", 3)
    assert "resume" not in config, "a run that is repeated from config.yaml continues nothing"
    (run / "own.yaml").write_text("evaluation: {every: 5}\n")
    config = parse("fit", "--metrics.every", 7, *given, "-c", run / "own.yaml")
    assert (config.metrics.every, config.evaluation.every) == (7, 5)


def test_a_policy_to_start_from_and_a_run_to_continue_exclude_each_other(run):
    for continued in (["--resume", run], [f"--ckpt_path={run}", "-c", run / "config.yaml"]):
        with pytest.raises(ConfigurationError, match="init_from"):
            parse("fit", *continued, "--init_from=mt10")
        with pytest.raises(ConfigurationError, match="init_new_tasks"):
            parse("fit", *continued, "--init_new_tasks=mean")
        parse("fit", *continued)
        parse("fit", *continued, "--init_from=None", "--init_new_tasks=fresh")
    with pytest.raises(ConfigurationError, match="init_from"):
        parse("fit", "-c", "quickstart", "--init_new_tasks=mean")
    with pytest.raises(ArgumentError, match="init_new_tasks"):
        parse("fit", "--init_new_tasks=median")


def test_a_run_that_started_from_a_policy_is_resumed_and_validated_as_any_other(run):
    for file in run.glob("*.yaml"):
        file.write_text(CONFIG + "init_from: runs/gone\ninit_new_tasks: mean\n")
    assert parse("fit", "--resume", run).init_from == "runs/gone"
    assert parse("validate", run).ckpt_path == str(run / "checkpoints" / "best.ckpt")
    parse("fit", "-c", run / "config.yaml", f"--ckpt_path={run}")


def test_the_folder_of_a_run_stands_for_its_last_checkpoint(run):
    last = run / "checkpoints" / "last.ckpt"
    assert find_checkpoint(str(run), "", "") == last
    last.unlink()
    assert find_checkpoint(str(run), "", "") == last, "the newest complete one is looked for there"


def test_a_checkpoint_may_stand_for_its_run(run):
    step = run / "checkpoints" / "step_000000000900.ckpt"
    assert parse("fit", f"--resume={step}").ckpt_path == str(step)
    assert parse("validate", step).ckpt_path == str(step)


OPTIONS = [
    [],
    ["--evaluation.num_episodes", "5"],
    ["--overwrite_metrics"],
    ["--no_overwrite_metrics"],
    ["-c", "env/toy", "-c", "quickstart", "--config=network/mlp"],
    ["-c", "quickstart", "--model.init_args.log_std_min", "-5"],
    ["-c", "quickstart", "--model.init_args.log_std_min=-5"],
    ["--trainer.deterministic", "true"],
    ["--overwrite_metrics", "--evaluation.every", "-5", "--no_overwrite_metrics"],
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_validate_takes_the_best_checkpoint_of_a_run_before_and_after_options(run, options):
    best = run / "checkpoints" / "best.ckpt"
    for args in ([run, *options], [*options, run]):
        config = parse("validate", *args)
        assert config.ckpt_path == str(best)
        own = Path(str(config.config[len(CONFIGS)]))  # behind the files that it extends
        assert own.name == "config_from_000000000900.yaml", "all arguments come later"
    best.unlink()
    assert parse("validate", run).ckpt_path == str(run)


def test_an_option_of_a_class_that_the_run_chooses_may_stand_before_the_run(run):
    option = "--model.init_args.discount=0.5"
    for args in ([run, option], [option, run]):
        assert parse("validate", *args).model.init_args.discount == 0.5
    assert parse("fit", option, "--resume", run).model.init_args.discount == 0.5
    with pytest.raises(ArgumentError, match="class_path"):
        parse("validate", option)
    with pytest.raises(ArgumentError, match="class_path"):
        parse("validate", option, "x" * 999)  # longer than a path may be


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_file_beside_a_run_leaves_its_checkpoint_and_its_name(run, command):
    (run / "other.yaml").write_text("name: other\nckpt_path: null\nmetrics: {every: 9}\n")
    given = ["--resume", run] if command == "fit" else [run]
    config = parse(command, *given, "-c", run / "other.yaml")
    best = run / "checkpoints" / "best.ckpt"
    assert config.ckpt_path == str(run if command == "fit" else best)
    assert config.metrics.every == 9
    assert command == "validate" or config.name == "try"


def test_options_that_exist_have_no_tip():
    names = parser("fit").option_names()
    given = ["--no_overwrite_metrics", "--data", "file.yaml", "--rollout.total_step", "5"]
    assert list(option_tips(given, names)) == [
        "tip: did you mean rollout.total_steps? There is no option rollout.total_step"
    ]
    assert "resume" not in parser("validate").option_names()


def test_the_newest_configuration_is_that_written_last(run):
    assert config_file_of(run).name == "config_from_000000000900.yaml"
    older = run / "config_from_000000000300.yaml"  # the run went back to an older checkpoint
    older.write_text("name: try\n")
    written = (run / "config_from_000000000900.yaml").stat().st_mtime_ns
    os.utime(older, ns=(written + 1, written + 1))
    assert config_file_of(run) == older


@pytest.mark.slow
def test_none_is_null():
    files = [word for name in (*CONFIGS[:3], "network/paco") for word in ("-c", name)]
    options = ("rollout.learner_threads", "model.init_args.actor.init_args.max_loss")
    given = [*files, "--name=None-of-these", *(f"--{option}=7" for option in options)]
    config = parse("fit", *given)
    assert config.name == "None-of-these"
    assert [config[option] for option in options] == [7, 7]
    for null in ("None", "null"):
        for words in ((f"--{options[0]}", null), (f"--{options[0]}={null}",)):
            config = parse("fit", *given, *words, f"--{options[1]}={null}")
            assert [config[option] for option in options] == [None, None]
    config = parse("fit", *given, f"--{options[1]}", "None")
    assert [config[option] for option in options] == [7, None]


def test_tasks_before_a_run_do_not_take_it(run):
    best = run / "checkpoints" / "best.ckpt"
    for given in (run, best):
        config = parse("validate", "--tasks", "reach", "door-open", given)
        assert config.tasks == ["reach", "door-open"] and config.ckpt_path == str(best)
    assert parse("validate", run, "--tasks", "reach").tasks == ["reach"]


def test_the_help_of_a_class_needs_no_run(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["validate", "--model.help", "SAC"])
    assert exit_info.value.code == 0 and "--model.tau" in capsys.readouterr().out


def test_a_flag_before_a_run_does_not_take_it(command_line, capsys):
    command_line.finished()
    options = ["--evaluation.num_episodes", "1", "--evaluation.num_workers", "0"]
    main(["validate", *options, "--overwrite_metrics", str(command_line.folder())])
    assert "goal-0" in capsys.readouterr().out
