"""Write a policy, or a replay as data sets: ``mtrl-lightning export RUN --to onnx``.

PyTorch is imported when the command runs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mtrl_lightning.cli.commands import TRUST
from mtrl_lightning.cli.loaded_run import add_run_arguments, load_run
from mtrl_lightning.export.names import FORMATS, MINARI, POLICY
from mtrl_lightning.formats import text_table, whole
from mtrl_lightning.runs import (
    best_checkpoint,
    checkpoint_at,
    config_file_of,
    output_folder,
    run_folder_of,
)

CONFIG = "config.yaml"
"""The run's configuration beside the exported policy."""
HELP = "Write a run's policy as ONNX, torch.export or a small checkpoint, or its replay for Minari."
DESCRIPTION = (
    "Write the best actions of a checkpoint's policy as one file, with the task as an input, that"
    " runs without this package, and compare its actions with the policy's. RUN is the folder of a"
    f" run, whose best checkpoint is taken, or a checkpoint.{TRUST} With --to policy, write a"
    " folder without the state of optimizers and environments, which play, validate, load_policy"
    " and fit --init_from take like a run's. With --to minari, write the episodes of the replay of"
    " a run's newest checkpoint, or of the given one, as a data set of each task. These two import"
    " no class."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    add_run_arguments(parser)
    parser.add_argument(
        "--to",
        choices=FORMATS,
        required=True,
        help="onnx (policy.onnx; needs the extra [export]), torch.export (policy.pt2) or policy (a"
        " checkpoint) for the policy; minari (needs the extra [minari]) for the replay",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="folder of the files; the default is RUN/export, RUN/export/policy or"
        " RUN/export/minari, and export/NAME instead of RUN/export for a policy of this package",
    )


def run(options: argparse.Namespace) -> None:
    """Export a policy or a replay."""
    if options.to == POLICY:
        export_weights(options)
    elif options.to == MINARI:
        export_replay(options)
    else:
        export_actions(options)


def export_actions(options: argparse.Namespace) -> None:
    """Write the actions of a checkpoint's policy as a file, and print where it is.

    Raises:
        ConfigurationError: if the policy cannot be exported.
        OSError: if a file cannot be written.
    """
    best_checkpoint(options.run)  # a misspelled run is answered before PyTorch is imported

    from mtrl_lightning.export.policy import export_policy
    from mtrl_lightning.quiet import quiet

    with quiet():
        checkpoint, run_folder, policy, data = load_run(options.run, options.trust)
    folder = options.folder or output_folder(run_folder, "export")
    file, difference = export_policy(policy, options.to, folder, data.action_transforms)
    shutil.copyfile(config_file_of(run_folder), folder / CONFIG)
    after = f"after {policy.env_steps:,} {policy.step_unit}"
    print(f"{checkpoint}, {after}, {len(policy.task_names)} tasks")
    print(f"Largest difference of an action from the policy's: {difference:.1e}")
    print(f"Exported to {file} ({file.stat().st_size / 2**10:,.0f} KiB)")


def export_weights(options: argparse.Namespace) -> None:
    """Write the policy of a checkpoint as one of its own, and print where it is.

    Raises:
        ConfigurationError: if there is no checkpoint or no configuration.
        OSError: if a file cannot be written.
    """
    checkpoint = best_checkpoint(options.run)
    run_folder = run_folder_of(checkpoint)
    folder = options.folder or output_folder(run_folder, "export") / POLICY
    config_file = config_file_of(run_folder)

    from mtrl_lightning.export.policy import export_checkpoint

    file = export_checkpoint(checkpoint, folder)
    shutil.copyfile(config_file, folder / CONFIG)
    print(f"Exported {checkpoint} to {folder} ({file.stat().st_size / 2**10:,.0f} KiB)")


def export_replay(options: argparse.Namespace) -> None:
    """Write the episodes of a run's replay, and print how many there are of each task.

    Raises:
        ConfigurationError: if there is no replay, or it cannot be exported.
        OSError: if a file cannot be written.
    """
    checkpoint_at(options.run)  # a misspelled run is answered before PyTorch is imported

    from mtrl_lightning.export.replay import export_to_minari
    from mtrl_lightning.quiet import quiet

    with quiet():
        folder, exported = export_to_minari(options.run, options.folder)
    lines = [["task", "episodes", "steps"]]
    for name, episodes in exported.items():
        num_steps = sum(one.num_steps for one in episodes)
        lines.append([name, whole(len(episodes)), whole(num_steps)])
    print(text_table(lines, num_texts=1))
    print(f"Exported: Minari reads them with MINARI_DATASETS_PATH={folder}")
