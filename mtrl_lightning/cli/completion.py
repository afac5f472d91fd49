"""Print a script for tab completion of commands and configurations: ``completion bash``.

The script is ours because jsonargparse's own completion is too slow for a shell: with ``shtab`` the
parser of ``fit`` gave no script in four minutes of processor time, and with ``argcomplete`` each
press of TAB takes about 2.5 s, as it imports PyTorch.
"""

from __future__ import annotations

import argparse

from mtrl_lightning.cli.commands import COMMANDS, PROGRAM, RUN_COMMANDS
from mtrl_lightning.cli.config_names import config_names

HELP = "Print a script with which a shell completes commands and configurations."
DESCRIPTION = f"""{HELP} Store it once:
  bash:  mtrl-lightning completion bash > \\
         ~/.local/share/bash-completion/completions/mtrl-lightning
  zsh:   mtrl-lightning completion zsh > ~/.mtrl-lightning.zsh
         with `source ~/.mtrl-lightning.zsh` after compinit in ~/.zshrc"""
SCRIPT = """_mtrl_lightning() {{
  local names=""
  case "$3" in
    {program}) names="{commands}" ;;
    -c|--config|--env) names="{configs}" ;;
  esac
  COMPREPLY=($(compgen -W "$names" -- "$2"))
}}
complete -o default -F _mtrl_lightning {program}"""
"""Files are completed where no name fits."""
BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
"""By shell, what the script begins with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=sorted(BEFORE), help="the shell of the script")


def run(options: argparse.Namespace) -> None:
    """Print the script."""
    print(
        BEFORE[options.shell]
        + SCRIPT.format(
            program=PROGRAM,
            commands=" ".join([*RUN_COMMANDS, *COMMANDS]),
            configs=" ".join(config_names()),
        )
    )
