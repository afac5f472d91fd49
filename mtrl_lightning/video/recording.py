"""Run test episodes of a policy, render their frames, and write videos."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mtrl_lightning.checks import at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, tasks_of
from mtrl_lightning.envs.render.frame_recorder import (
    VideoFormat,
    VideoFrame,
    WithFrameRecorder,
    decompressed,
)
from mtrl_lightning.envs.render.opengl import restored_variables
from mtrl_lightning.envs.vector.vector import VectorEnv, default_num_workers
from mtrl_lightning.rollout import Collector
from mtrl_lightning.rollout.matching import matched_policy
from mtrl_lightning.spec import known_tasks
from mtrl_lightning.transitions import Policy
from mtrl_lightning.utils.devices import one_thread
from mtrl_lightning.video.drawing import Mosaic, labelled
from mtrl_lightning.video.encoding import import_encoder, write_mp4

ALL_TASKS = "all_tasks"
"""Name of the video that shows all tasks side by side."""


class RecordedEpisode(NamedTuple):
    """A recorded test episode."""

    task: str
    number: int
    """Index of the test episode; evaluations start with 0."""
    return_: float
    length: int
    """Environment steps."""
    success: bool
    """Success in any step."""


class Recording(NamedTuple):
    """Videos and their episodes."""

    files: dict[str, Path]
    """A video for each task by name; with several tasks also ``all_tasks``."""
    episodes: list[RecordedEpisode]
    """Episodes by task, in the order in which they appear in the task's video."""


def record_videos(
    policy: Policy,
    benchmark: Benchmark,
    folder: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    split: str | None = None,
    num_episodes: int = 1,
    first_episode: int = 0,
    format: VideoFormat | None = None,
    caption: str = "",
    num_workers: int | None = None,
    timeout: float = 300.0,
    on_step: Callable[[], None] = lambda: None,
) -> Recording:
    """Run test episodes with the deterministic policy, and write a video for each task.

    The episodes are those of an evaluation. Task, episode, step, return and success are drawn on
    the frames. Random generators of training are not used.

    Args:
        policy: a policy, such as ``run.policy`` or the result of ``load_policy``.
        benchmark: the tasks, which are matched with the policy's by name.
        folder: folder of the videos, ``<task>.mp4`` and, with several tasks, ``all_tasks.mp4``; in
            splits other than the first evaluated one, names start with the split.
        tasks: names of the tasks to record; None for all tasks of the split.
        split: split to record; None for the first evaluated one, ``eval``.
        num_episodes: test episodes of each task, concatenated in the video.
        first_episode: index of the first test episode; evaluations start with 0.
        format: size and frames per second; None for 480 x 360 and 30.
        caption: text after the task name.
        num_workers: worker processes that step and render; None for one per core, 0 to use this
            process.
        timeout: seconds after which an unresponsive worker counts as hung.
        on_step: called between two steps; may raise to end the recording.

    Returns:
        The files and the episodes.

    Raises:
        EnvironmentFaultError: if an environment or its worker fails.
    """
    import_encoder()
    at_least(1, num_episodes=num_episodes)
    at_least(0, first_episode=first_episode)
    video = format or VideoFormat()
    split, numbers = _chosen(benchmark, tasks, split)
    spec = benchmark.spec
    if num_workers is None:
        num_workers = default_num_workers(len(numbers), spare=0)
    frames: list[list[list[VideoFrame]]] = [[] for _ in numbers]  # by task and episode
    episodes: list[list[RecordedEpisode]] = [[] for _ in numbers]
    with restored_variables():
        envs = VectorEnv(
            WithFrameRecorder(benchmark, video),
            numbers,
            split,
            num_workers=num_workers,
            timeout=timeout,
        )
        try:
            collector = Collector(envs, matched_policy(policy, spec, numbers))
            collector.reset(seed=[first_episode] * envs.num_envs)
            quota_E = np.full(envs.num_envs, num_episodes)
            with one_thread():
                for _, ended in collector.run_episodes(quota_E, "exploit"):
                    on_step()
                    for of_task, taken in zip(frames, envs.call("take_frames"), strict=True):
                        for frame in taken:
                            if not of_task or of_task[-1][-1].episode != frame.episode:
                                of_task.append([])
                            of_task[-1].append(frame)
                    for env, episode in ended.items():
                        name = spec.task_names[numbers[env]]
                        number = first_episode + len(episodes[env])
                        recorded = (episode.return_, episode.length, episode.success)
                        episodes[env].append(RecordedEpisode(name, number, *recorded))
        finally:
            envs.close()

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "" if split == _chosen(benchmark, None, None)[0] else f"{split}_"
    names = [spec.task_names[task] for task in numbers]
    shown = {name: [index] for index, name in enumerate(names)}
    file_names = _file_names(spec.task_names)
    files = {name: folder / f"{prefix}{file_names[name]}.mp4" for name in names}
    if len(names) > 1:
        shown[ALL_TASKS] = list(range(len(names)))
        files[ALL_TASKS] = folder / f"{prefix}{ALL_TASKS}.mp4"
    for name, indices in shown.items():
        mosaic = Mosaic(len(indices), video.width, video.height)
        images = (
            mosaic.joined(cells)
            for number in range(num_episodes)
            for cells in _side_by_side(
                [
                    _labelled_frames(
                        frames[index][number],
                        mosaic.cell,
                        f"{names[index]}   episode {first_episode + number}   {caption}",
                        spec.max_return,
                    )
                    for index in indices
                ]
            )
        )
        write_mp4(files[name], images, video.fps)
    return Recording(files, [one for of_task in episodes for one in of_task])


def check_recording(
    benchmark: Benchmark,
    tasks: Sequence[str] | None,
    split: str | None,
    format: VideoFormat,
    num_workers: int = 1,
) -> None:
    """Render the first frame of a task, in a worker process if there are workers.

    Raises:
        EnvironmentFaultError: if the environment or its worker fails.
    """
    import_encoder()
    split, numbers = _chosen(benchmark, tasks, split)
    with restored_variables():
        drawing = WithFrameRecorder(benchmark, format)
        envs = VectorEnv(drawing, numbers[:1], split, num_workers=num_workers)
        try:
            envs.reset(seed=0)
        finally:
            envs.close()


def _chosen(
    benchmark: Benchmark, tasks: Sequence[str] | None, split: str | None
) -> tuple[str, list[int]]:
    """Return the split, by default the first evaluated one, and the indices of its tasks."""
    if split is None:
        split = (*benchmark.splits[1:], benchmark.splits[0])[0]
    names = benchmark.spec.task_names
    in_split = tasks_of(benchmark, split)
    if tasks is None:
        return split, list(in_split)
    return split, [names.index(n) for n in known_tasks(tasks, [names[task] for task in in_split])]


def _labelled_frames(
    frames: Sequence[VideoFrame], size: tuple[int, int], title: str, max_return: float | None
) -> Iterator[Image.Image]:
    """Yield an episode's resized frames, labelled with its title and the values of each step."""
    for frame in frames:
        values = [f"step {frame.step}", f"return {frame.return_:.1f}"]
        if max_return is not None:
            values.append(f"score {frame.return_ / max_return:.3f}")
        if frame.success:
            values.append("success")
        image = decompressed(frame.jpeg)
        image = image if image.size == size else image.resize(size)
        yield labelled(image, [title, "   ".join(values)])


def _side_by_side(shown: Sequence[Iterator[Image.Image]]) -> Iterator[list[Image.Image]]:
    """Yield the images of all tasks at each time; shorter episodes repeat their last image."""
    cells: list[Image.Image] = []
    for images in itertools.zip_longest(*shown):
        cells = [image or cells[index] for index, image in enumerate(images)]
        yield cells


def _file_names(tasks: Sequence[str]) -> dict[str, str]:
    """Return the file name of each task, numbered if names would collide."""
    names = {task: re.sub(r"[^-\w.]", "_", task) for task in tasks}
    # some file systems are case-insensitive
    if len({ALL_TASKS, *(name.casefold() for name in names.values())}) <= len(tasks):
        names = {task: f"{number}_{names[task]}" for number, task in enumerate(tasks)}
    return names
