"""Print a script for tab completion of the program's arguments: ``mtrl-lightning completion``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mtrl_lightning.cli.commands import CommandParser
from mtrl_lightning.cli.config_names import config_names, is_sweep
from mtrl_lightning.cli.sweep import SWEEP_FILE
from mtrl_lightning.errors import ConfigurationError, import_optional

HELP = "Print a script with which a shell completes commands, options and configurations."
DESCRIPTION = f"""{HELP} Store it once:
  bash:  mtrl-lightning completion bash > \\
         ~/.local/share/bash-completion/completions/mtrl-lightning
  zsh:   mtrl-lightning completion zsh > ~/.zfunc/_mtrl-lightning
         with fpath+=~/.zfunc before compinit in ~/.zshrc"""
FUNCTION = "_mtrl_lightning_configs"
SWEEP_FUNCTION = "_mtrl_lightning_sweeps"
PREAMBLES = {
    "bash": 'FUNCTION() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "FUNCTION() {{ _alternative 'names:configuration:({names})' 'files:file:_files' }}",
}
"""By shell, a function that completes names of configurations, and files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=sorted(PREAMBLES), help="the shell of the script")


def main(args: Sequence[str] | None = None) -> None:
    """Run ``completion``.

    Args:
        args: arguments after ``completion``; None for those of the process.
    """
    parser = CommandParser(
        "completion",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    shell = parser.parse_args(sys.argv[2:] if args is None else args).shell
    try:
        print(script(shell))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def script(shell: str) -> str:
    """Return the script of a shell, ``bash`` or ``zsh``.

    Raises:
        ConfigurationError: if shtab, which writes it, is not installed.
    """
    shtab = import_optional("shtab", "shtab")
    from mtrl_lightning.cli.lightning_cli import build_parser

    parser = build_parser()
    assert parser._subcommands_action is not None, "the program has subcommands"
    for subparser in parser._subcommands_action._name_parser_map.values():
        links = [one for one in subparser._actions if " --> " in "".join(one.option_strings)]
        for action in links:  # jsonargparse's entries for options that are set by others
            subparser._actions.remove(action)
        for action in subparser._actions:
            if action.dest == "config":
                action.complete = {shell: FUNCTION}
            if action.metavar == SWEEP_FILE:
                action.complete = {shell: SWEEP_FUNCTION}
    names = " ".join(name for name in config_names() if not is_sweep(name))
    sweeps = " ".join(name for name in config_names() if is_sweep(name))
    preamble = "\n".join(
        PREAMBLES[shell].replace("FUNCTION", function).format(names=completed)
        for function, completed in ((FUNCTION, names), (SWEEP_FUNCTION, sweeps))
    )
    # jsonargparse's own script has every class within every class: 155 MB
    return shtab.complete(parser, shell, preamble=preamble)
