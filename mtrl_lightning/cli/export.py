"""Write a policy as one file, or a replay as data sets: ``mtrl-lightning export RUN --to onnx``.

PyTorch is imported when the command runs.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrl_lightning.cli.play import (
    action_transforms_of,
    add_checkpoint_arguments,
    chosen_checkpoint,
    named_classes,
)
from mtrl_lightning.cli.run_config import TRUST, read_run_config
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.names import FORMATS, MINARI
from mtrl_lightning.formats import text_table, whole
from mtrl_lightning.runs import (
    CARD,
    config_file_of,
    output_folder,
    policy_folder,
    run_folder_of,
)

if TYPE_CHECKING:
    from mtrl_lightning.loading import LoadedPolicy
    from mtrl_lightning.rollout import ActionTransform

CONFIG = "config.yaml"
"""The run's configuration beside the exported policy."""
HELP = "Write a run's policy as ONNX, torch.export or a slim checkpoint, or its replay for Minari."
DESCRIPTION = (
    "Write the best actions of a checkpoint's policy as one file, with the task as an input, that"
    " runs without this package, and compare its actions with the policy's."
    " RUN is the folder of a run, whose best checkpoint is taken, or a"
    f" checkpoint.{TRUST} With --to minari, write the episodes of the replay of a run's newest"
    " checkpoint, or of the given one, as a data set of each task; that imports no class. With"
    " --slim, write a folder without the state of the training, which play, validate, load_policy"
    " and fit --init_from take like a run's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    add_checkpoint_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--slim",
        action="store_true",
        help="write the policy as a folder of weights, config.yaml and policy.json, which says how"
        " it was made and how well it does",
    )
    what.add_argument(
        "--to",
        choices=FORMATS,
        help="onnx (policy.onnx; needs the extra [export]) or torch.export (policy.pt2) for the"
        " policy; minari (needs the extra [minari]) for the replay",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="folder of the files; the default is RUN/export, for a replay RUN/export/minari, for a"
        " slim policy RUN/export/slim, and export/NAME for a policy of this package",
    )


def run(options: argparse.Namespace) -> None:
    """Export a policy or a replay."""
    if options.slim:
        export_slim(options)
    elif options.to == MINARI:
        export_replay(options)
    else:
        export_checkpoint(options)


def export_checkpoint(options: argparse.Namespace) -> None:
    """Write the policy of a checkpoint, and print where it is.

    Raises:
        ConfigurationError: if the policy cannot be exported.
        OSError: if a file cannot be written.
    """
    checkpoint = chosen_checkpoint(options.run)
    run_folder = run_folder_of(checkpoint)
    folder = options.folder or output_folder(run_folder, "export")

    from mtrl_lightning.export.policy import export_policy
    from mtrl_lightning.launch.quiet import quiet

    with quiet():
        policy, action_transforms, config_file = policy_of(checkpoint, options.trust)
    file, difference = export_policy(policy, options.to, folder, action_transforms)
    if config_file is not None:
        shutil.copyfile(config_file, folder / CONFIG)
    after = f"after {policy.env_steps:,} {policy.step_unit}"
    print(f"{checkpoint}, {after}, {len(policy.task_names)} tasks")
    print(f"Largest difference of an action from the policy's: {difference:.1e}")
    print(f"Exported to {file} ({file.stat().st_size / 2**10:,.0f} KiB)")


def export_slim(options: argparse.Namespace) -> None:
    """Write the policy of a checkpoint as a slim one, and print where it is.

    Raises:
        ConfigurationError: if there is no checkpoint or no configuration.
        OSError: if a file cannot be written.
    """
    checkpoint = chosen_checkpoint(options.run)
    run_folder = run_folder_of(checkpoint)
    folder = options.folder or output_folder(run_folder, "export") / "slim"

    from mtrl_lightning.export.slim import write_slim

    file = write_slim(checkpoint, config_file_of(run_folder), folder)
    print(f"Exported {checkpoint} to {folder} ({file.stat().st_size / 2**10:,.0f} KiB)")
    print(f"Record videos of it by mtrl-lightning play {folder}")


def policy_of(
    checkpoint: Path, trust: Sequence[str]
) -> tuple[LoadedPolicy, list[ActionTransform], Path | None]:
    """Return a checkpoint's policy, the transforms of its actions, and its run's configuration.

    Args:
        checkpoint: of a run.
        trust: further modules whose classes it may use.

    Raises:
        ConfigurationError: if it cannot be loaded, or if its action transforms are unknown: those
            of a run that was started from Python, which has no configuration.
    """
    from mtrl_lightning.loading import load_policy

    try:
        config_file = config_file_of(run_folder_of(checkpoint))
    except ConfigurationError:  # started from Python
        _check_no_action_transforms(checkpoint)
        return load_policy(checkpoint, trust=trust), [], None
    config = read_run_config(config_file)
    policy = load_policy(checkpoint, trust=[*named_classes(config), *trust])
    return policy, action_transforms_of(config), config_file


def _check_no_action_transforms(checkpoint: Path) -> None:
    """Refuse a run without a configuration whose action transforms are therefore unknown."""
    from mtrl_lightning.checkpoints import load_checkpoint

    states = load_checkpoint(checkpoint, verify=False).get("callbacks", {})
    transforms = states.get("options", {}).get("rollout.action_transforms")
    if transforms:
        raise ConfigurationError(
            f"the run was started from Python with the action transforms {transforms}, which its"
            " checkpoint cannot rebuild: call mtrl_lightning.export.policy.export_policy with them"
        )


def export_replay(options: argparse.Namespace) -> None:
    """Write the episodes of a run's replay, and print how many there are of each task.

    Raises:
        ConfigurationError: if there is no replay, or it cannot be exported.
        OSError: if a file cannot be written.
    """
    if ((policy_folder(options.run) or Path(options.run)) / CARD).is_file():
        raise ConfigurationError(
            f"{options.run} is a policy alone, without a replay: give the folder of a run"
        )
    from mtrl_lightning.export.replay import export_to_minari
    from mtrl_lightning.launch.quiet import quiet

    with quiet():
        folder, exported = export_to_minari(options.run, options.folder)
    lines = [["data set", "episodes", "steps"]]
    lines += [[name, *map(whole, counts)] for name, *counts in exported]
    print(text_table(lines, num_texts=1))
    print(f"Exported: Minari reads them with MINARI_DATASETS_PATH={folder}")
