"""What ``--help`` prints: own texts, own options first, those of Lightning's trainer on request."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from mtrl_lightning.cli.arguments import RESUME
from mtrl_lightning.cli.commands import COMMANDS
from mtrl_lightning.cli.run_config import TRUST
from mtrl_lightning.runs import VALIDATIONS

PROGRAM = "mtrl-lightning"
DESCRIPTION = "Multi-task reinforcement learning: train one agent on many tasks, and evaluate it."
DESCRIPTIONS = {
    "fit": "Train, or continue a run. Options are taken in the order in which they are given: a"
    " later one overrides an earlier one and what the files before it say. Classes have options of"
    " their own: --model.help SAC prints them.",
    "validate": "Run test episodes of every task with a checkpoint, and print a table of success"
    " and return for each evaluated split. RUN is the folder of a run, whose best checkpoint is"
    f" taken, or a checkpoint. The results are added to RUN/{VALIDATIONS}. Options change how it is"
    " evaluated: --evaluation.num_episodes 50 runs more test episodes, and"
    " --data.benchmark.init_args.goal_seed 1 draws other goals of MetaWorld's tasks than those of"
    f" training (goal_seed 0).{TRUST}",
}
SHORT = {
    "fit": "Train, or continue a run.",
    "validate": "Evaluate the best checkpoint of a run, or any other, on every task.",
}
"""The subcommands in the list of ``mtrl-lightning --help``."""
USAGE = {
    "fit": "mtrl-lightning fit -c NAME_OR_FILE [-c ...] [--OPTION VALUE ...]\n"
    "       mtrl-lightning fit --resume RUN [--OPTION VALUE ...]",
    "validate": "mtrl-lightning validate RUN [--tasks TASK ...] [--OPTION VALUE ...]\n"
    "       mtrl-lightning validate -c NAME_OR_FILE [-c ...] --ckpt_path CKPT_PATH",
}
CONFIG = (
    "a configuration by name, such as quickstart or env/toy (mtrl-lightning list prints all), or a"
    " YAML file. A file of this path takes precedence over a name."
)
RESUME_HELP = (
    "continue this run, runs/NAME/version_N, from its newest complete checkpoint with its own"
    " configuration; or one of its checkpoints. Options beside it override the configuration."
    f"{TRUST}"
)
CKPT_PATH = {
    "fit": "continue from this checkpoint: a file in a run's checkpoints folder; the run's folder,"
    " for its newest complete checkpoint; last or best, for that of the newest run of --name."
    f" {RESUME} also takes the run's configuration.",
    "validate": "the checkpoint to evaluate: a file in a run's checkpoints folder; the run's"
    " folder, for its newest complete checkpoint; last or best, for that of the newest run of"
    " --name.",
}
TRAINER_HELP = (
    "Show the options of Lightning's Trainer, such as --trainer.accelerator, --trainer.precision"
    " and --trainer.callbacks, and exit."
)
HIDDEN = ("trainer", "linked")
"""Groups that ``--help`` leaves out: Lightning's, and what is set by other options."""
ORDER = ("model", "data", "rollout", "evaluation", "metrics", "checkpoint", "replay", "resets")


class _Rewritten(argparse._HelpAction):
    """An option that is explained in the help and rewritten before the arguments are parsed."""

    def __init__(self, option_strings: list[str], help: str, metavar: str, **_: Any) -> None:
        argparse.Action.__init__(
            self,
            option_strings,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help=help,
            metavar=metavar,
        )

    def __call__(self, *_: Any) -> None:
        """Refuse the option where it was not rewritten."""
        raise argparse.ArgumentError(self, "give the command first: mtrl-lightning fit --resume")


class _TrainerHelp(argparse._HelpAction):
    """Print the options of Lightning's trainer."""

    def __call__(self, parser: Any, *_: Any) -> None:
        """Print them and end the program."""
        with only_groups(parser, trainer_groups(parser)):
            print(LightningArgumentParser.format_help(parser))
        argparse.ArgumentParser.exit(parser)


def arrange_help(parser: ArgumentParser, command: str) -> None:
    """Give the parser of a subcommand our texts.

    Args:
        parser: with all of its options.
        command: ``fit`` or ``validate``.
    """
    parser.description = DESCRIPTIONS[command]
    parser.usage = USAGE[command]
    options = parser._action_groups[1]
    if command == "fit":
        options.add_argument(RESUME, action=_Rewritten, metavar="RUN", help=RESUME_HELP)
    options.add_argument("--trainer.help", action=_TrainerHelp, help=TRAINER_HELP)
    for group in parser._action_groups[2:]:
        for action in [one for one in group._group_actions if one.dest == "ckpt_path"]:
            group._group_actions.remove(action)
            options._group_actions.append(action)
            action.help = CKPT_PATH[command]
    for action in parser._actions:
        if action.dest == "config":
            action.help = CONFIG
            action.metavar = "NAME_OR_FILE"


@contextlib.contextmanager
def only_groups(parser: ArgumentParser, groups: list[Any]) -> Iterator[None]:
    """Let the parser know only these groups of options while it prints its help."""
    former = parser._action_groups
    parser._action_groups = groups
    try:
        yield
    finally:
        parser._action_groups = former


def own_groups(parser: ArgumentParser) -> list[Any]:
    """Return the groups of options in the order of the help, without those of the trainer."""
    shown = [group for group in parser._action_groups if _section(group) not in HIDDEN]
    places = {section: place for place, section in enumerate(ORDER)}
    return sorted(shown, key=lambda group: places.get(_section(group), -1))


def trainer_groups(parser: ArgumentParser) -> list[Any]:
    """Return the groups of options of Lightning's trainer."""
    return [group for group in parser._action_groups if _section(group) == "trainer"]


def _section(group: Any) -> str:
    """Return the section of the configuration that a group of options belongs to."""
    if group.title == "Linked arguments":
        return "linked"
    for action in group._group_actions:
        if action.option_strings and action.option_strings[0].startswith("--"):
            return action.option_strings[0].removeprefix("--").partition(".")[0]
    return ""


def add_other_commands(parser: ArgumentParser) -> None:
    """Name the other commands in the help and in the completion of the program.

    ``__main__`` runs them before a parser is built.
    """
    parser.usage = f"{PROGRAM} COMMAND ..."
    for one in parser._actions:
        if {"--config", "--print_config"} & set(one.option_strings):
            one.help = argparse.SUPPRESS  # they belong after the command
    action = parser._subcommands_action
    assert action is not None, "Lightning has added its subcommands"
    for choice in action._choices_actions:
        choice.help = SHORT[choice.dest]
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = ArgumentParser(description=module.HELP)
        module.add_arguments(command)
        action.add_subcommand(name, command, help=module.HELP)
