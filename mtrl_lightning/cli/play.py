"""Write videos of a trained policy: ``mtrl-lightning play runs/quickstart/version_0``.

The policy and the tasks are those of the run. PyTorch is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl_lightning.checks import at_least
from mtrl_lightning.cli.run_config import TRUST, read_run_config
from mtrl_lightning.errors import ConfigurationError, causes
from mtrl_lightning.formats import text_table
from mtrl_lightning.runs import (
    best_checkpoint,
    config_file_of,
    ensure_writable,
    output_folder,
    run_folder_of,
)

if TYPE_CHECKING:
    from mtrl_lightning.envs import Benchmark
    from mtrl_lightning.rollout import ActionTransform
    from mtrl_lightning.video import Recording

HELP = "Write videos of test episodes with a run's best checkpoint, one for each task."
DESCRIPTION = (
    "Run test episodes with the best actions of a checkpoint, print their results, and write a"
    " video (MP4) for each task and one of all tasks side by side. RUN is the folder of a run,"
    " whose best checkpoint is taken, a checkpoint, or a policy that comes with this package, such"
    f" as mt10.{TRUST}"
)
LIBRARIES = ("mtrl_lightning", "torch", "lightning")
"""Packages whose classes a checkpoint may use without being named by the run's configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``play``."""
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--task",
        action="append",
        metavar="TASK",
        help="a task to record, such as reach-v3; may be given several times; without it all are"
        " recorded",
    )
    parser.add_argument(
        "--split",
        help="split to record, such as eval_interpolation (default: the first evaluated one)",
    )
    parser.add_argument(
        "--episodes", type=int, default=1, help="test episodes of each task (default: 1)"
    )
    parser.add_argument(
        "--first_episode",
        type=int,
        default=0,
        help="number of the first test episode; an evaluation begins with 0 (default: 0)",
    )
    parser.add_argument(
        "--width", type=int, default=480, help="pixels of an image, even (default: 480)"
    )
    parser.add_argument(
        "--height", type=int, default=360, help="pixels of an image, even (default: 360)"
    )
    parser.add_argument(
        "--fps", type=int, default=30, help="frames per second of the video (default: 30)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="folder of the videos; the default is RUN/videos/step_N, and videos/NAME for a policy"
        " of this package",
    )
    parser.add_argument(
        "--num_workers",
        type=int,
        help="processes that step and draw, by default one per core; 0 for this process",
    )


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a run's checkpoint."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="the run's folder, ROOT/NAME/version_N, or one of its checkpoints; or the name of a"
        " policy of this package, such as mt10 (mtrl-lightning list policies)",
    )
    add_trust_argument(parser)


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the classes that a checkpoint may use."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module or package whose classes the checkpoint may use beside those that the run's"
        " config.yaml names; may be given several times",
    )


def run(options: argparse.Namespace) -> None:
    """Write the videos, and print the results of the episodes and where the videos are.

    Raises:
        ConfigurationError: if an option cannot work.
        EnvironmentFaultError: if an environment breaks.
        OSError: if a file cannot be written.
    """
    at_least(1, prefix="--", episodes=options.episodes)
    at_least(0, prefix="--", first_episode=options.first_episode)
    at_least(0, prefix="--", hint=", 0 for this process", num_workers=options.num_workers)
    checkpoint = chosen_checkpoint(options.run)
    run_folder = run_folder_of(checkpoint)
    config = read_run_config(config_file_of(run_folder))

    from mtrl_lightning.launch.quiet import quiet
    from mtrl_lightning.loading import load_policy
    from mtrl_lightning.progress import progress_bar
    from mtrl_lightning.rollout.action_transforms import with_action_transforms
    from mtrl_lightning.video import (
        VideoFormat,
        check_encoder,
        chosen_split,
        chosen_tasks,
        record_videos,
    )

    check_encoder()
    with quiet():
        benchmark = benchmark_of(config)
        policy = load_policy(checkpoint, trust=[*named_classes(config), *options.trust])
        action_transforms = action_transforms_of(config)
    spec = benchmark.spec
    if policy.task_names != spec.task_names:
        raise ConfigurationError(
            f"{checkpoint} is of the tasks {', '.join(policy.task_names)}, and the run's"
            f" configuration names {', '.join(spec.task_names)}: use the config.yaml of its run"
        )
    split = chosen_split(benchmark, options.split)
    numbers = chosen_tasks(benchmark, options.task, split)
    step = f"step_{policy.env_steps:012d}"
    folder = options.folder or output_folder(run_folder, "videos", step)
    ensure_writable(folder)
    after = f"after {policy.env_steps:,} {policy.step_unit}"
    print(f"{checkpoint}, {after}; split {split}, {len(numbers)} of {spec.num_tasks} tasks")
    if policy.untrained_summary:
        print(policy.untrained_summary)
    total = options.episodes * benchmark.horizon_of(split)
    with progress_bar("steps", total) as bar:
        recording = record_videos(
            with_action_transforms(policy, action_transforms),
            benchmark,
            folder,
            tasks=options.task,
            split=split,
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
    """Return a text table of the episodes that were recorded.

    Args:
        recording: the episodes.
        has_success: whether the benchmark reports success.
        max_return: largest return of an episode, if the benchmark has one.
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


def benchmark_of(config: dict[str, Any]) -> Benchmark:
    """Return the benchmark of a run's configuration.

    Raises:
        ConfigurationError: if it cannot be made.
    """
    from mtrl_lightning.envs import Benchmark
    from mtrl_lightning.envs.benchmarks.benchmark import with_info
    from mtrl_lightning.envs.benchmarks.wrappers import with_layers

    data = _section(config, "data")
    for name in ("wrappers", "info_keys"):
        if not isinstance(data.get(name) or [], list):
            raise ConfigurationError(
                f"data.{name} of the run's configuration is {data[name]!r}, which is no list: use"
                " the config.yaml as the run wrote it"
            )
    benchmark: Benchmark = _instantiated(Benchmark, data.get("benchmark"), "benchmark")
    pixels = data.get("pixels")
    if pixels:
        pixels = _instantiated(Callable[[Benchmark], Benchmark], pixels, "pixels")
    benchmark = with_layers(benchmark, data.get("wrappers"), pixels or None)
    return with_info(benchmark, data.get("info_keys"), data.get("store_info", False))


def action_transforms_of(config: dict[str, Any]) -> list[ActionTransform]:
    """Return the action transforms of a run's configuration.

    Raises:
        ConfigurationError: if they cannot be made.
    """
    from mtrl_lightning.rollout import ActionTransform

    described = _section(config, "rollout").get("action_transforms") or []
    return list(_instantiated(list[ActionTransform], described, "action_transforms"))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options of a section."""
    options = config.get(name)
    if not isinstance(options, dict):
        raise ConfigurationError(
            f"the run's configuration has no options of {name}, but {options!r}: use the"
            " config.yaml as the run wrote it"
        )
    return options


def _instantiated(kind: Any, described: Any, what: str) -> Any:
    """Return what a configuration describes by ``class_path`` and ``init_args``."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{what}", type=kind)
    try:
        return getattr(parser.instantiate_classes(parser.parse_object({what: described})), what)
    except (ArgumentError, ValueError, TypeError) as error:
        for cause in causes(error):
            if isinstance(cause, ConfigurationError):
                raise cause from None
        raise ConfigurationError(
            f"the {what} of the run's configuration cannot be made ({error}): use the version of"
            " the code that the run was made with, in the folder of its modules"
        ) from error


def chosen_checkpoint(run: str) -> Path:
    """Return a checkpoint that is given, or the best one of the run whose folder is given.

    Args:
        run: the folder or the checkpoint; a run without a best checkpoint has its last one taken.
            Or the name of a policy of this package.

    Raises:
        ConfigurationError: if there is none.
    """
    found = best_checkpoint(run)
    if found.name == "last.ckpt":
        from mtrl_lightning.run.checkpoint_file import load_newest_whole

        return load_newest_whole(found, with_replay=False)[0]
    return found


def named_classes(config: dict[str, Any]) -> list[str]:
    """Return the classes and modules that the run's configuration names, beside the libraries'."""
    named: list[str] = []
    for path in _class_paths(_section(config, "model")):
        if path.split(".")[0] not in LIBRARIES:
            named += [path, path.rpartition(".")[0]]
    return named


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if isinstance(config.get("class_path"), str):
            yield config["class_path"]
        for value in config.values():
            yield from _class_paths(value)
    elif isinstance(config, list):
        for value in config:
            yield from _class_paths(value)
