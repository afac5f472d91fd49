"""Metrics of training episodes, as they are logged and shown in the progress bar."""

from __future__ import annotations

from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.episodes import EpisodeWindows, named, with_mean
from mtrl_lightning.run.session import Session


def joined_windows(session: Session) -> EpisodeWindows:
    """Return the windows of finished episodes of all processes."""
    windows = session.collector.windows
    if distributed.world_size() == 1:
        return windows
    return EpisodeWindows.joined(distributed.gather(windows.state_dict()))


def fault_metrics(session: Session) -> dict[str, float]:
    """Return the counts of faults since the run began, ``fault/...``."""
    counters = session.counters
    return {
        "fault/worker_restarts": counters.worker_restarts,
        "fault/dropped_transitions": counters.dropped_transitions,
        "fault/skipped_updates": counters.skipped_updates,
    }


def rollout_metrics(session: Session, windows: EpisodeWindows) -> dict[str, float]:
    """Return the metrics of recent episodes; none before the first one has ended.

    ``rollout/return``, ``rollout/length`` and, if the benchmark has it, ``rollout/success`` are
    means over the windows of finished episodes, on average and for each task.
    """
    metrics: dict[str, float] = {}
    summary = windows.summary()
    if not summary:
        return metrics
    spec = session.spec
    measured = ("return", "success", "length") if spec.has_success else ("return", "length")
    for name in measured:
        means = {task: statistics[name]["mean"] for task, statistics in summary.items()}
        metrics |= with_mean(f"rollout/{name}", means, spec.task_names)
    return metrics


def episode_metrics(session: Session, windows: EpisodeWindows) -> dict[str, float]:
    """Return the metrics of finished episodes beside the means of ``rollout_metrics``.

    ``rollout/episodes`` counts them since the run began; ``time/seconds_per_episode`` is the
    mean over this process' finished episodes since the last call; ``train/exploration`` is the
    correlation of the noise, ``rollout/success_from_reset`` the success rate without episodes that
    began midway, ``rollout/stepped`` the fraction of environments that are not paused,
    ``rollout/reused`` the fraction in which another task's policy acts, all in this process; see
    ``EpisodeWindows.metrics`` for the others.
    """
    names = session.spec.task_names
    counts = {task: float(windows.count_T[task]) for task in session.spec.train_tasks}
    metrics = named("rollout/episodes", session.counters.episodes, counts, names)
    metrics |= windows.metrics(names)
    if session.collector.envs.midway_starts and session.spec.has_success:
        from_reset = windows.success_from_reset()
        if from_reset:
            metrics |= with_mean("rollout/success_from_reset", from_reset, names)
    if session.collector.reuse is not None:
        metrics |= with_mean("rollout/reused", session.collector.reuse.fractions(), names)
    exploration = session.collector.exploration
    if exploration is not None:
        metrics |= with_mean("train/exploration", exploration.correlations(), names)
    if session.collector.pausing is not None:
        metrics |= with_mean("rollout/stepped", session.collector.stepped_fractions(), names)
    seconds = session.collector.times.drain()
    if seconds:
        metrics |= with_mean("time/seconds_per_episode", seconds, names)
    return metrics
