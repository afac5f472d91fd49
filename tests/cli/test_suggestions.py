"""What is suggested for mistakes, each of which the parser itself refuses."""

import pytest
from jsonargparse import ArgumentError

from mtrl_lightning.cli.suggestions import FROM_MTRL, suggestions
from tests.helpers.command_line import ROOT, config_args, parser

PIXELS_TIP = "an option of data.pixels needs the class that it belongs to: add -c pixels before it"
LONG = "a" * 300
"""More than a file system takes as a name."""
QUICKSTART = config_args("quickstart")


def tips_of(*arguments):
    """Return what is suggested for the error that the parser gives for these arguments."""
    with pytest.raises(ArgumentError) as refused:
        parser().parse_args(arguments)
    return suggestions(refused.value, arguments, parser().option_names())


@pytest.mark.parametrize(
    ("mistake", "tips"),
    [
        (
            ["--rollot.num_workers=3"],
            ["did you mean rollout.num_workers? There is no option rollot.num_workers"],
        ),
        (
            ["--rollout.total_step=5"],
            ["did you mean rollout.total_steps? There is no option rollout.total_step"],
        ),
        (
            ["--seed_e=5", "--overwrite"],
            [
                "did you mean seed_everything? There is no option seed_e",
                "did you mean overwrite_metrics? There is no option overwrite",
            ],
        ),
        (
            ["--evaluation.num_e=5"],
            [
                "did you mean evaluation.num_episodes? There is no option evaluation.num_e",
            ],
        ),
        (
            ["rollout.total_steps=5"],
            ["options begin with two dashes: --rollout.total_steps=VALUE"],
        ),
        (
            ["--data.benchmark.init_args.tasks", "reach", "push"],
            ["several values are one list: --data.benchmark.init_args.tasks '[reach, push]'"],
        ),
        (
            ["--data.benchmark.init_args.tasks", "[reach,", "push]"],
            ["several values are one list: --data.benchmark.init_args.tasks '[reach, push]'"],
        ),
        (["env/toy"], ["configurations are given after -c: -c env/toy"]),
        (["--name", "foo", "env/toy"], ["configurations are given after -c: -c env/toy"]),
        (["--config", "base", "env/toy"], ["configurations are given after -c: -c env/toy"]),
        (["--seed_everything", "1", "2"], []),
        ([LONG], []),
        (
            ["setup=metaworld", "env=metaworld-mt10", "agent.multitask.num_envs=10"],
            [FROM_MTRL],
        ),
        (
            ["--config={rollout: {num_wrokers: 3}}"],
            ["did you mean rollout.num_workers? There is no option rollout.num_wrokers"],
        ),
        (
            ["--model.init_args.discuont=0.9"],
            ["did you mean discount? SAC has no option discuont"],
        ),
        (
            ["--model.init_args.actor.init_args.widht=5"],
            ["did you mean width? MLP has no option widht"],
        ),
        (["--model.init_args.nothing_of_the_kind=1"], []),
        # SAC has it, from which Distral is derived
        (["--model=Distral", "--model.init_args.temperature=1"], []),
        (
            ["--data.benchmark=ToyReech"],
            ["did you mean ToyReach? No class is called ToyReech"],
        ),
        (
            ["--model.init_args.actor=mtrl_lightning.networks.MPL"],
            ["did you mean MLP? No class is called MPL"],
        ),
        (
            ["--trainer.callbacks+=EarlyStoping"],
            ["did you mean EarlyStopping? No class is called EarlyStoping"],
        ),
    ],
)
def test_the_nearest_name_is_suggested(mistake, tips):
    assert tips_of(*QUICKSTART, *mistake) == tips


def test_options_of_a_model_need_an_algorithm():
    tip = "options of a model need its algorithm before them: -c algorithm/mtsac"
    assert tip in tips_of(*config_args("gradient/pcgrad"))


def test_a_run_alone_is_given_to_resume(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    tips = [f"a run continues with --resume {tmp_path}"]
    assert tips_of(*QUICKSTART, str(tmp_path)) == tips
    args = ["--resume", "runs/b", str(tmp_path)]
    error = ArgumentError(None, f"unrecognized arguments: {tmp_path}")
    assert suggestions(error, args, parser().option_names()) == tips


def test_the_page_for_users_of_mtrl_is_there():
    assert (ROOT / FROM_MTRL.split()[-1]).is_file()


@pytest.mark.parametrize(
    ("files", "option", "tips"),
    [
        ([], "--data.pixels.init_args.size=64", [PIXELS_TIP]),
        ([], "--data.pixels.size=64", [PIXELS_TIP]),
        (["pixels"], "--data.pixels.init_args.size=large", []),
    ],
)
def test_options_of_pixels_need_the_file_that_chooses_them(files, option, tips):
    assert tips_of(*QUICKSTART, *config_args(*files), option) == tips


def test_where_a_missing_module_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tip,) = tips_of(*QUICKSTART, "--data.benchmark=mytasks.Own")
    assert "no module mytasks" in tip and str(tmp_path) in tip
