"""Merging of configuration files as properties: after ``-c``, and in any nesting of ``extends``."""

import tempfile
from functools import cache
from pathlib import Path

import yaml
from jsonargparse import ActionConfigFile, Namespace

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.cli.config_files import ExtendingConfigFile
from mtrl_lightning.cli.lightning_cli import RunParser
from mtrl_lightning.data import TaskData
from tests.helpers.command_line import ROOT
from tests.helpers.properties import given, settings, st

GROUPS = ("encoder", "network", "gradient", "env")


def names_of(group):
    return [f"{group}/{path.stem}" for path in sorted(ROOT.glob(f"configs/{group}/*.yaml"))]


ALGORITHM = st.sampled_from([name for name in names_of("algorithm") if name != "algorithm/bc"])
FILE = st.sampled_from([name for group in GROUPS for name in names_of(group)])
VALUES = st.dictionaries(
    st.sampled_from(["total_steps", "max_restarts"]), st.integers(1, 99), min_size=1
)
"""What a user's own file has, below ``data.init_args``."""
TREE = st.recursive(FILE | VALUES, lambda nodes: st.lists(nodes, max_size=4), max_leaves=8)
"""A list is a file that extends all of its items."""


@cache
def parser():
    """Return a parser of model and data, which is several times as fast as that of a run."""
    made = RunParser(exit_on_error=False)
    made.add_argument("-c", "--config", action=ActionConfigFile)
    made.add_lightning_class_args(Algorithm, "model", subclass_mode=True, required=False)
    made.add_lightning_class_args(TaskData, "data", subclass_mode=True, required=False)
    made.set_defaults({"data": {"class_path": "mtrl_lightning.data.ReplayData"}})
    made.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")
    return made


def apply(*names):
    """Return the configuration after these files, as ``-c`` leaves it."""
    config = parser().get_defaults()
    option = ExtendingConfigFile(option_strings=["--config"], dest="config")
    for name in names:
        option(parser(), config, name)
    config.pop("config")
    return without_empty(config)


def without_empty(value):
    """Return a configuration as a dictionary; no ``init_args`` and empty ones mean the same."""
    if isinstance(value, Namespace):
        value = {key: without_empty(item) for key, item in vars(value).items()}
        return {key: item for key, item in value.items() if (key, item) != ("init_args", {})}
    return value


def write(folder, node):
    """Return the file of a node, which is written unless the package has it."""
    if isinstance(node, str):
        return node
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.touch()
    is_list = isinstance(node, list)
    content = (
        {"extends": [write(folder, child) for child in node]}
        if is_list
        else {"data": {"init_args": node}}
    )
    path.write_text(yaml.safe_dump(content))
    return str(path)


def leaves(node):
    return [leaf for child in node for leaf in leaves(child)] if isinstance(node, list) else [node]


@settings(max_examples=10)
@given(first=ALGORITHM, second=ALGORITHM, tree=TREE)
def test_files_merge_in_order_and_the_last_of_a_group_wins(first, second, tree):
    values, last = {}, {}
    for leaf in leaves(tree):
        if isinstance(leaf, dict):
            values |= leaf
        else:
            last[leaf.split("/")[0]] = leaf
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given_one_by_one = apply(first, second, *(write(folder, leaf) for leaf in leaves(tree)))
        assert apply(write(folder, [first, [second, tree]])) == given_one_by_one
    expected = apply(second, *last.values())
    assert given_one_by_one["model"] == expected["model"]
    data, expected_data = given_one_by_one["data"], expected["data"]
    assert data["class_path"] == expected_data["class_path"]
    options, expected_options = data.get("init_args", {}), expected_data.get("init_args", {})
    assert options.get("benchmark") == expected_options.get("benchmark")
    assert {name: options[name] for name in values} == values
