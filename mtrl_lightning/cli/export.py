"""Write a policy, or a replay as data sets: ``mtrl-lightning export RUN --to onnx``.

PyTorch is imported when the command runs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mtrl_lightning.cli import TRUST
from mtrl_lightning.cli.loaded_run import add_run_arguments, load_run
from mtrl_lightning.export import FORMATS, MINARI, POLICY
from mtrl_lightning.runs import (
    best_checkpoint,
    checkpoint_at,
    config_file_of,
    output_folder,
    run_folder_of,
)
from mtrl_lightning.utils.text import text_table, whole

CONFIG = "config.yaml"
"""The run's configuration, next to the exported policy."""
HELP = "Export a run's policy as ONNX, torch.export or a small checkpoint, or its replay to Minari."
DESCRIPTION = (
    "Export a checkpoint's deterministic policy to one file, with the task as an input, that runs"
    " without this package, and compare its actions with the policy's. RUN is a run folder (its"
    f" best checkpoint is used) or a checkpoint.{TRUST} With --to policy, write a folder without"
    " the state of optimizers and environments, which play, validate, load_policy and fit"
    " --init_from accept like a run folder. With --to minari, write the episodes in the replay of a"
    " run's newest checkpoint, or of the given one, as one data set per task. These two import no"
    " classes."
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
        help="output folder (default: RUN/export, RUN/export/policy or RUN/export/minari; for a"
        " policy of this package, export/NAME instead of RUN/export)",
    )


def run(options: argparse.Namespace) -> None:
    """Export a policy or a replay."""
    if options.to == MINARI:
        export_replay(options)
        return
    # unknown runs fail before PyTorch is imported
    checkpoint = best_checkpoint(options.run)
    run_folder = run_folder_of(checkpoint)
    config_file = config_file_of(run_folder)
    folder = options.folder or output_folder(run_folder, "export")
    if options.to == POLICY:
        from mtrl_lightning.export.policy import export_checkpoint

        folder = options.folder or folder / POLICY
        file = export_checkpoint(checkpoint, folder)
    else:
        from mtrl_lightning.export.policy import export_policy

        policy, data = load_run(options.run, options.trust)[2:]
        file, difference = export_policy(policy, options.to, folder, data.action_transforms)
        after = f"after {policy.env_steps:,} {policy.step_unit}"
        print(f"{checkpoint}, {after}, {len(policy.task_names)} tasks")
        print(f"Largest difference of an action from the policy's: {difference:.1e}")
    shutil.copyfile(config_file, folder / CONFIG)
    print(f"Exported to {file} ({file.stat().st_size / 2**10:,.0f} KiB)")


def export_replay(options: argparse.Namespace) -> None:
    """Write the episodes of a run's replay, and print their number per task."""
    checkpoint_at(options.run)  # unknown runs fail before PyTorch is imported

    from mtrl_lightning.export.replay import export_to_minari

    folder, exported = export_to_minari(options.run, options.folder)
    lines = [["task", "episodes", "steps"]]
    for name, episodes in exported.items():
        num_steps = sum(one.num_steps for one in episodes)
        lines.append([name, whole(len(episodes)), whole(num_steps)])
    print(text_table(lines, num_texts=1))
    print(f"Exported: Minari reads them with MINARI_DATASETS_PATH={folder}")
