"""Write videos of a trained policy: ``mtrl-lightning play runs/quickstart/version_0``.

PyTorch is imported when the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mtrl_lightning.cli import TRUST
from mtrl_lightning.cli.loaded_run import add_run_arguments, load_run
from mtrl_lightning.runs import ensure_writable, output_folder
from mtrl_lightning.utils.text import text_table

if TYPE_CHECKING:
    from mtrl_lightning.video import Recording

HELP = "Record videos of test episodes with a run's best checkpoint, one per task."
DESCRIPTION = (
    "Run test episodes with a checkpoint's deterministic policy, print their results, and write a"
    f" video (MP4) per task and one of all tasks side by side.{TRUST}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``play``."""
    add_run_arguments(parser)
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="tasks to record, such as reach-v3 (default: all)",
    )
    parser.add_argument(
        "--split",
        help="split to record, such as eval_interpolation (default: the first evaluated one)",
    )
    parser.add_argument(
        "--episodes", type=int, default=1, help="test episodes per task (default: 1)"
    )
    parser.add_argument(
        "--first_episode",
        type=int,
        default=0,
        help="index of the first test episode; evaluations start with 0 (default: 0)",
    )
    parser.add_argument(
        "--width", type=int, default=480, help="frame width in pixels, even (default: 480)"
    )
    parser.add_argument(
        "--height", type=int, default=360, help="frame height in pixels, even (default: 360)"
    )
    parser.add_argument(
        "--fps", type=int, default=30, help="frames per second of the video (default: 30)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="output folder (default: RUN/videos/env_steps=N; videos/NAME for a policy of this"
        " package)",
    )
    parser.add_argument(
        "--num_workers",
        type=int,
        help="worker processes that step and render (default: one per core); 0 to use this process",
    )


def run(options: argparse.Namespace) -> None:
    """Record the videos, and print the episodes' results and the videos' folder."""
    checkpoint, run_folder, policy, data = load_run(options.run, options.trust)

    from mtrl_lightning.rollout.action_transforms import with_action_transforms
    from mtrl_lightning.utils.progress import progress_bar
    from mtrl_lightning.video import VideoFormat, record_videos

    benchmark, spec = data.benchmark, data.spec
    steps = f"env_steps={policy.env_steps:012d}"
    folder = options.folder or output_folder(run_folder, "videos", steps)
    ensure_writable(folder)
    after = f"after {policy.env_steps:,} {policy.step_unit}"
    print(f"{checkpoint}, {after}")
    if policy.untrained_summary:
        print(policy.untrained_summary)
    total = options.episodes * benchmark.horizon_of(options.split or benchmark.splits[-1])
    with progress_bar("steps", total) as bar:
        recording = record_videos(
            with_action_transforms(policy, data.action_transforms),
            benchmark,
            folder,
            tasks=options.tasks,
            split=options.split,
            num_episodes=options.episodes,
            first_episode=options.first_episode,
            format=VideoFormat(options.width, options.height, options.fps),
            caption=after,
            num_workers=options.num_workers,
            on_step=bar.update,
        )
    print(table(recording, spec.has_success, spec.max_return))
    print(f"Videos in {folder}: {', '.join(path.name for path in recording.files.values())}")


def table(recording: Recording, has_success: bool, max_return: float | None = None) -> str:
    """Return a text table of the recorded episodes.

    Args:
        recording: the episodes.
        has_success: whether the benchmark reports success.
        max_return: largest possible episode return, if known.
    """
    header = ["task", "episode", "return", "length"]
    header += ["score"] * (max_return is not None) + ["success"] * has_success
    lines = [header]
    for episode in recording.episodes:
        line = [episode.task, str(episode.number), f"{episode.return_:.1f}", str(episode.length)]
        if max_return is not None:
            line.append(f"{episode.return_ / max_return:.3f}")
        if has_success:
            line.append("yes" if episode.success else "no")
        lines.append(line)
    return text_table(lines, num_texts=1)
