"""Run test episodes of a policy, draw their frames, and write videos."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mtrl_lightning.checks import at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, check_split, tasks_of
from mtrl_lightning.envs.render.frame_recorder import (
    VideoFormat,
    VideoFrame,
    WithFrameRecorder,
    decompressed,
)
from mtrl_lightning.envs.render.opengl import restored_variables
from mtrl_lightning.envs.vector.vector import VectorEnv, default_num_workers
from mtrl_lightning.resources import one_thread
from mtrl_lightning.rollout import Collector
from mtrl_lightning.rollout.matching import matched_policy
from mtrl_lightning.spec import known_tasks
from mtrl_lightning.types import Episode, Policy
from mtrl_lightning.video.drawing import Mosaic, labelled
from mtrl_lightning.video.encoding import check_encoder, write_mp4

ALL_TASKS = "all_tasks"
"""Name of the video that shows all tasks side by side."""


class RecordedEpisode(NamedTuple):
    """A test episode that a video shows."""

    task: str
    number: int
    """Number of the test episode: an evaluation's first is 0."""
    return_: float
    length: int
    """Environment steps."""
    success: bool
    """Success in any step."""


class Recording(NamedTuple):
    """Videos and the episodes that they show."""

    files: dict[str, Path]
    """A video for each task by its name; with several tasks also ``all_tasks``."""
    episodes: list[RecordedEpisode]
    """By task, and in the order in which the task's video shows them."""


class _TaskRecording(NamedTuple):
    """Episodes and frames of one task's video."""

    task: str
    episodes: list[Episode]
    frames: list[list[VideoFrame]]
    """By episode."""
    max_return: float | None
    """Largest return of an episode, if the benchmark has one."""


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
    """Run test episodes with the policy's best actions, and write a video for each task.

    The episodes are those of an evaluation. Task, episode, step, return and success are drawn on
    the frames. No generator of training is used.

    Args:
        policy: such as ``run.policy`` or the result of ``load_policy``.
        benchmark: the tasks; some of the policy's, in any order, are matched by name.
        folder: of the videos, ``<task>.mp4`` and, with several tasks, ``all_tasks.mp4``; in other
            splits than the first evaluated one their names begin with the split.
        tasks: names of the tasks that are recorded; None for all of the split.
        split: which environments; None for the first that is evaluated, ``eval``.
        num_episodes: test episodes of each task, one after another in the video.
        first_episode: number of the first one; an evaluation begins with 0.
        format: size and frames per second; None for 480 x 360 and 30.
        caption: text beside the name of the task.
        num_workers: worker processes that step and draw; None for all cores, 0 for this process.
        timeout: seconds to wait for a worker before it counts as hung.
        on_step: called between two steps; may raise to end the recording.

    Returns:
        The files and the episodes.

    Raises:
        ConfigurationError: if a task or the split is unknown, the policy does not know a task, a
            number is out of range, the encoder or the renderer is missing, or an environment draws
            no frames.
        EnvironmentFaultError: if an environment or its worker breaks.
        OSError: if a file cannot be written.
    """
    check_encoder()
    at_least(1, num_episodes=num_episodes)
    at_least(0, first_episode=first_episode)
    video = (format or VideoFormat()).check()
    split = chosen_split(benchmark, split)
    numbers = chosen_tasks(benchmark, tasks, split)
    policy = matched_policy(policy, benchmark.spec, numbers)
    folder = Path(folder)
    if num_workers is None:
        num_workers = default_num_workers(len(numbers), spare=0)
    with restored_variables():
        envs = VectorEnv(
            WithFrameRecorder(benchmark, video),
            numbers,
            split,
            num_workers=num_workers,
            timeout=timeout,
        )
        try:
            with one_thread():
                recordings = _run(policy, envs, num_episodes, first_episode, on_step)
        finally:
            envs.close()
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "" if split == chosen_split(benchmark, None) else f"{split}_"
    file_names = _file_names(benchmark.spec.task_names)
    files: dict[str, Path] = {}
    for recording in recordings:
        files[recording.task] = folder / f"{prefix}{file_names[recording.task]}.mp4"
        images = _images([recording], first_episode, video, caption)
        write_mp4(files[recording.task], images, video.fps)
    if len(recordings) > 1:
        files[ALL_TASKS] = folder / f"{prefix}{ALL_TASKS}.mp4"
        write_mp4(files[ALL_TASKS], _images(recordings, first_episode, video, caption), video.fps)
    return Recording(
        files, [one for recording in recordings for one in _summaries(recording, first_episode)]
    )


def check_drawing(
    benchmark: Benchmark, task: int, split: str, format: VideoFormat, num_workers: int = 1
) -> None:
    """Draw the first frame of a task, in a process of its own if there is a worker.

    Raises:
        ConfigurationError: if it cannot be drawn here.
        EnvironmentFaultError: if the environment or its worker breaks.
    """
    with restored_variables():
        envs = VectorEnv(
            WithFrameRecorder(benchmark, format), [task], split, num_workers=num_workers
        )
        try:
            envs.reset(seed=0)
        finally:
            envs.close()


def chosen_split(benchmark: Benchmark, split: str | None) -> str:
    """Return the split that was chosen; the first that is evaluated if none was.

    Raises:
        ConfigurationError: if there is no such split, with the nearest names.
    """
    if split is None:
        return (*benchmark.splits[1:], benchmark.splits[0])[0]
    check_split(split, benchmark.splits)
    return split


def chosen_tasks(benchmark: Benchmark, tasks: Sequence[str] | None, split: str) -> list[int]:
    """Return the numbers of the split's tasks that were chosen; all of them if none was.

    Raises:
        ConfigurationError: if a task is not in the split, with the nearest names, or named twice.
    """
    names = benchmark.spec.task_names
    in_split = tasks_of(benchmark, split)
    if tasks is None:
        return list(in_split)
    return [names.index(name) for name in known_tasks(tasks, [names[task] for task in in_split])]


def _run(
    policy: Policy,
    envs: VectorEnv,
    num_episodes: int,
    first_episode: int,
    on_step: Callable[[], None],
) -> list[_TaskRecording]:
    """Run the episodes, all tasks at once, and collect their frames."""
    names = [envs.spec_.task_names[task] for task in envs.task_E]
    recordings = [_TaskRecording(name, [], [[]], envs.spec_.max_return) for name in names]
    collector = Collector(envs, policy)
    collector.reset(seed=[first_episode] * envs.num_envs)
    quota_E = np.full(envs.num_envs, num_episodes)
    for _, ended in collector.run_episodes(quota_E, "exploit"):
        on_step()
        for recording, frames in zip(recordings, envs.call("take_frames"), strict=True):
            for frame in frames:
                recording.frames[-1].append(frame)
                if frame.is_last:
                    recording.frames.append([])
        for env, episode in ended.items():
            recordings[env].episodes.append(episode)
    return [recording._replace(frames=recording.frames[:num_episodes]) for recording in recordings]


def _images(
    recordings: Sequence[_TaskRecording], first_episode: int, video: VideoFormat, caption: str
) -> Iterator[Image.Image]:
    """Yield the frames of a video of one or more tasks, side by side.

    Each episode begins for all tasks at once; the last frame of a shorter one stays.
    """
    mosaic = Mosaic(len(recordings), video.width, video.height)
    for episode in range(len(recordings[0].frames)):
        title = (f"episode {first_episode + episode}", caption)
        shown = [_cells(recording, episode, mosaic, title) for recording in recordings]
        cells: tuple[Image.Image | None, ...] = (None,) * len(recordings)
        for images in itertools.zip_longest(*shown):
            # where a task has no further frame, its last one stays
            cells = tuple(image or previous for image, previous in zip(images, cells, strict=True))
            yield mosaic.joined([cell for cell in cells if cell is not None])


def _cells(
    recording: _TaskRecording, episode: int, mosaic: Mosaic, title: tuple[str, ...]
) -> Iterator[Image.Image]:
    """Yield one labelled frame of an episode for each frame of the video."""
    frames = recording.frames[episode]
    indices = [frame.frame_index for frame in frames]
    next_indices = [*indices[1:], indices[-1] + 1]
    for frame, index, next_index in zip(frames, indices, next_indices, strict=True):
        measured = [f"step {frame.step}", f"return {frame.return_:.1f}"]
        if recording.max_return is not None:
            measured.append(f"score {frame.return_ / recording.max_return:.3f}")
        if frame.success:
            measured.append("success")
        image = mosaic.shrunk(decompressed(frame.jpeg))
        image = labelled(image, [(recording.task, *title), measured])
        yield from itertools.repeat(image, next_index - index)


def _summaries(recording: _TaskRecording, first_episode: int) -> Iterator[RecordedEpisode]:
    for index, episode in enumerate(recording.episodes, first_episode):
        yield RecordedEpisode(
            recording.task, index, episode.return_, episode.length, episode.success
        )


def _file_names(tasks: Sequence[str]) -> dict[str, str]:
    """Return a name for each task that a file may have, and that no other task's file has.

    They are those of all tasks of the benchmark: a task's file has the same name whichever others
    are recorded. Some file systems do not distinguish upper and lower case.
    """
    allowed = {task: _allowed_name(task) for task in tasks}
    names: dict[str, str] = {}
    taken = {ALL_TASKS}
    # a task whose name needs no replacement keeps it
    for task in sorted(tasks, key=lambda task: allowed[task] != task):
        numbered = (f"{allowed[task]}_{number}" for number in itertools.count(2))
        candidates = itertools.chain([allowed[task]], numbered)
        names[task] = next(name for name in candidates if name.casefold() not in taken)
        taken.add(names[task].casefold())
    return names


def _allowed_name(task: str) -> str:
    """Return a task's name in letters that a file's name may have."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)
