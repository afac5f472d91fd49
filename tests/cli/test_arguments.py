import os

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli.arguments import rewritten
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import config_file_of, find_checkpoint
from tests.helpers.command_line import parser


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was continued once."""
    folder = tmp_path / "try" / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "config_from_000000000900.yaml"):
        (folder / name).write_text("name: try\n")
    for name in ("best", "last", "step_000000000900"):
        (folder / "checkpoints" / f"{name}.ckpt").touch()
    return folder


@pytest.mark.parametrize("option", ["two words", "one word"])
def test_a_run_is_resumed_with_its_last_configuration(run, option):
    given = ["--resume", str(run)] if option == "two words" else [f"--resume={run}"]
    config = run / "config_from_000000000900.yaml"
    expected = ["fit", "-c", str(config), f"--ckpt_path={run}"]
    assert rewritten(["fit", *given]) == expected
    after = rewritten(["fit", "--metrics.every", "7", *given, "-c", "own.yaml"])
    assert after == [*expected, "--metrics.every", "7", "-c", "own.yaml"]


def test_the_folder_of_a_run_stands_for_its_last_checkpoint(run):
    last = run / "checkpoints" / "last.ckpt"
    assert find_checkpoint(str(run), "", "") == last
    last.unlink()
    assert find_checkpoint(str(run), "", "") == last, "the newest complete one is looked for there"


def test_a_checkpoint_may_stand_for_its_run(run):
    step = run / "checkpoints" / "step_000000000900.ckpt"
    for args in (["fit", f"--resume={step}"], ["validate", str(step)]):
        assert rewritten(args)[3:] == [f"--ckpt_path={step}"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--evaluation.num_episodes", "5"],
        ["--evaluation.num_episodes=5"],
        ["-c", "env/toy", "--seed_everything", "2"],
    ],
)
def test_validate_takes_the_best_checkpoint_of_a_run_anywhere_among_options(run, options):
    best = run / "checkpoints" / "best.ckpt"
    config = run / "config_from_000000000900.yaml"
    expected = ["validate", "-c", str(config), f"--ckpt_path={best}", *options]
    assert rewritten(["validate", str(run), *options]) == expected
    assert rewritten(["validate", *options, str(run)]) == expected
    best.unlink()
    assert rewritten(["validate", str(run)])[3] == f"--ckpt_path={run}"
    assert rewritten(["validate", *options]) == ["validate", *options]


def test_the_newest_configuration_is_that_written_last(run):
    assert config_file_of(run).name == "config_from_000000000900.yaml"
    older = run / "config_from_000000000300.yaml"  # the run went back to an older checkpoint
    older.write_text("name: try\n")
    written = (run / "config_from_000000000900.yaml").stat().st_mtime_ns
    os.utime(older, ns=(written + 1, written + 1))
    assert config_file_of(run) == older


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fit", "--resume"], "needs the folder of a run"),
        (["fit", "--resume", "--name"], "needs the folder of a run"),
        (["fit", "--resume=nowhere"], "there is no checkpoint nowhere"),
        (["validate", "setup=metaworld", "env=metaworld-mt10"], "docs/from_mtrl.md"),
        (["fit", "--resume={run}", "--ckpt_path=last"], "and --ckpt_path are both given"),
        (["fit", "--resume={run}", "--name", "other"], "--name cannot be given with --resume"),
        (["fit", "--resume={run}", "--root=other"], "--root cannot be given with --resume"),
        (["validate", "{run}", "--ckpt_path", "best"], "and --ckpt_path are both given"),
        (["validate", "{run}/.."], "contains runs but is not the folder of one run"),
        (["validate", "{run}/checkpoints"], "has no checkpoint: give the folder of a run"),
    ],
)
def test_what_is_no_run(run, args, message):
    with pytest.raises(ConfigurationError, match=message):
        rewritten([argument.format(run=run) for argument in args])


def test_a_run_from_python_has_no_configuration(run):
    for path in run.glob("config*.yaml"):
        path.unlink()
    with pytest.raises(ConfigurationError, match="started from Python is continued by"):
        rewritten(["fit", f"--resume={run}"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--rollout.num_workers", "None"], ["--rollout.num_workers", "null"]),
        (["--rollout.num_workers=None"], ["--rollout.num_workers=null"]),
        (["--name=None-of-these"], ["--name=None-of-these"]),
        (
            ["--model.init_args.actor.init_args.max_loss", "None"],
            ['--config={"model": {"init_args": {"actor": {"init_args": {"max_loss": null}}}}}'],
        ),
    ],
)
def test_none_is_null(given, expected):
    assert rewritten(["fit", *given]) == ["fit", *expected]


FLAGS = [["--overwrite_metrics"], ["--no_overwrite_metrics"], ["--print_config"], ["--help"]]
WITH_VALUE = [
    ["--model.help", "SAC"],
    ["--model.init_args.log_std_min", "-5"],
    ["--model.init_args.log_std_min", "-1e-3"],
    ["--model.init_args.log_std_min=-5"],
    ["-c", "-"],
    ["-c", "env/toy", "-c", "quickstart", "--config=network/mlp"],
    ["--trainer.deterministic", "true"],
    ["--rollot.num_wrokers", "3"],
]


@pytest.mark.parametrize("options", [*FLAGS, *WITH_VALUE, [*FLAGS[0], *WITH_VALUE[1], *FLAGS[1]]])
def test_the_parser_tells_which_options_take_the_next_word(run, options):
    flags = parser().flags_of("validate")
    best = run / "checkpoints" / "best.ckpt"
    config = run / "config_from_000000000900.yaml"
    expected = ["validate", "-c", str(config), f"--ckpt_path={best}", *options]
    assert rewritten(["validate", *options, str(run)], flags) == expected
    assert rewritten(["validate", str(run), *options], flags) == expected
    assert rewritten(["validate", *options], flags) == ["validate", *options], "there is no run"


def test_a_run_that_an_option_takes_for_its_value_is_named(run):
    given = ["validate", "--trainer.deterministic", str(run)]
    with pytest.raises(ConfigurationError, match=f"sign, --trainer.deterministic=VALUE {run}"):
        rewritten(given)
    assert rewritten([*given, "--ckpt_path=last"]) == [*given, "--ckpt_path=last"]


def test_tasks_before_a_run_do_not_take_it(run):
    best = run / "checkpoints" / "best.ckpt"
    expected = ["validate", "-c", str(run / "config_from_000000000900.yaml")]
    for given, checkpoint in ((run, best), (best, best)):
        tasks = ["--tasks", "reach", "door-open"]
        found = rewritten(["validate", *tasks, str(given)])
        assert found == [*expected, f"--ckpt_path={checkpoint}", *tasks]


def test_the_help_of_a_class_needs_no_run(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["validate", "--model.help", "SAC"])
    assert exit_info.value.code == 0 and "--model.tau" in capsys.readouterr().out


def test_a_flag_before_a_run_does_not_take_it(command_line, capsys):
    command_line.finished()
    options = ["--evaluation.num_episodes", "1", "--evaluation.num_workers", "0"]
    main(["validate", *options, "--overwrite_metrics", str(command_line.folder())])
    assert "goal-0" in capsys.readouterr().out
