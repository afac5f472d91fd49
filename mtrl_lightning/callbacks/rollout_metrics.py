"""Metrics of training episodes, for loggers and the progress bar."""

from __future__ import annotations

from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout import Collector, CorrelatedNoise, PauseSolved, PolicyReuse
from mtrl_lightning.rollout.episodes import EpisodeWindows, named, with_mean
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.utils.counters import Counters


def joined_windows(collector: Collector) -> EpisodeWindows:
    """Return the windows of finished episodes, joined over processes."""
    if distributed.world_size() == 1:
        return collector.windows
    windows = collector.windows
    return EpisodeWindows.joined(distributed.gather(windows.of_tasks()), windows.size)


def episode_metrics(
    spec: EnvSpec, collector: Collector, windows: EpisodeWindows, counters: Counters
) -> dict[str, float]:
    """Return the metrics of finished episodes, including those of ``EpisodeWindows.metrics``.

    ``rollout/episodes`` counts episodes since the run started, ``rollout/repeated_steps`` the steps
    repeated by midway starts, which ``env_steps`` does not include; ``time/seconds_per_episode`` is
    the mean over this process' finished episodes since the last call; ``train/exploration`` is the
    correlation of the noise, ``rollout/success_from_reset`` the success rate without episodes that
    started midway, ``rollout/stepped`` the fraction of environments that are not paused,
    ``rollout/reused`` the fraction in which another task's policy acts, all in this process.
    """
    names = spec.task_names
    counts = {task: float(windows.count_T[task]) for task in spec.train_tasks}
    metrics = named("rollout/episodes", counters.episodes, counts, names)
    metrics |= windows.metrics(spec)
    if collector.envs.midway_starts:
        metrics["rollout/repeated_steps"] = counters.repeated_steps
    if collector.envs.midway_starts and spec.has_success:
        from_reset = windows.success_from_reset()
        if from_reset:
            metrics |= with_mean("rollout/success_from_reset", from_reset, names)
    for extra in collector.extras:
        if isinstance(extra, PolicyReuse):
            metrics |= with_mean("rollout/reused", extra.fractions(), names)
        if isinstance(extra, CorrelatedNoise):
            metrics |= with_mean("train/exploration", extra.correlations(), names)
        if isinstance(extra, PauseSolved):
            metrics |= with_mean("rollout/stepped", collector.stepped_fractions(), names)
    seconds = collector.times.drain()
    if seconds:
        metrics |= with_mean("time/seconds_per_episode", seconds, names)
    return metrics
