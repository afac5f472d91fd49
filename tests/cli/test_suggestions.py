import pytest

from mtrl_lightning.cli.suggestions import suggestions
from tests.conftest import parser

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


def test_where_a_missing_module_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tip,) = suggestions("No module named 'mytasks'", [])
    assert "no module mytasks" in tip and str(tmp_path) in tip
