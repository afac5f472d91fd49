import pytest
from jsonargparse import ArgumentError

from mtrl_lightning.cli.suggestions import suggestions
from tests.conftest import ROOT, parser

PIXELS_TIP = "an option of data.pixels needs the class that it belongs to: add -c pixels before it"
FIT = "Subcommand 'fit' does not accept option"
MODEL = "Problem with given class_path 'mtrl_lightning.algorithms.SAC':"


@pytest.mark.parametrize(
    ("message", "tips"),
    [
        (
            "unrecognized arguments: --rollot.num_workers=3",
            ["did you mean rollout.num_workers? There is no option rollot.num_workers"],
        ),
        (
            f"{FIT} 'rollout.num_wrokers'",
            ["did you mean rollout.num_workers? There is no option rollout.num_wrokers"],
        ),
        (
            f"{MODEL} Option 'discuont' is not accepted",
            ["did you mean discount? SAC has no option discuont"],
        ),
        (
            f"{MODEL} Option 'nothing_of_the_kind' is not accepted",
            [],
        ),
        (  # SAC has it, from which Distral is derived
            f"{MODEL.replace('SAC', 'Distral')} Option 'temperature' is not accepted",
            [],
        ),
        (
            "Expected a dot import path string: ToyReech",
            ["did you mean ToyReach? No class is called ToyReech"],
        ),
        (
            "module 'mtrl_lightning.networks' has no attribute 'MPL'",
            ["did you mean MLP? No class is called MPL"],
        ),
        (
            "Expected a dot import path string: EarlyStoping",
            ["did you mean EarlyStopping? No class is called EarlyStoping"],
        ),
        (
            "argument subcommand: invalid choice: 'fti' (choose from 'fit', 'validate')",
            ["did you mean fit? There is no command fti"],
        ),
        (
            "the following arguments are required: validate.data.benchmark, validate.model",
            ["give the run to evaluate: validate runs/NAME/version_0"],
        ),
    ],
)
def test_the_nearest_name_is_suggested(message, tips):
    parsers = parser()._subcommands_action._name_parser_map.values()
    assert suggestions(message, parsers) == tips


@pytest.mark.parametrize(
    ("files", "option", "tips"),
    [
        ([], "--data.pixels.init_args.size=64", [PIXELS_TIP]),
        ([], "--data.pixels.size=64", [PIXELS_TIP]),
        (["pixels"], "--data.pixels.init_args.size=large", []),
    ],
)
def test_options_of_pixels_need_the_file_that_chooses_them(files, option, tips):
    whole = parser()
    given = [f"-c={ROOT / 'configs' / name}.yaml" for name in ("quickstart", *files)]
    with pytest.raises(ArgumentError) as refused:
        whole.parse_args(["fit", *given, option])
    parsers = whole._subcommands_action._name_parser_map.values()
    assert suggestions(str(refused.value), parsers) == tips


def test_where_a_missing_module_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tip,) = suggestions("No module named 'mytasks'", [])
    assert "no module mytasks" in tip and str(tmp_path) in tip
