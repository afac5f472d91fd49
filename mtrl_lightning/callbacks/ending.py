"""The summary at a run's end: how far it came, why it ended, and the next commands."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer


def end_message(trainer: Trainer, env_steps: int, total_steps: int, unit: str = "env steps") -> str:
    """Return the lines that a run ends with.

    Args:
        trainer: the trainer of the run.
        env_steps: environment steps made, without the steps that filled a lost replay.
        total_steps: environment steps that were asked for.
        unit: their name.
    """
    folder = Path(trainer.default_root_dir)
    lines = [f"The run ended after {env_steps:,} {unit}. Its folder is {folder}"]
    if env_steps < total_steps:
        lines[0] = (
            f"The run ended early, after {env_steps:,} of {total_steps:,} {unit}:"
            f" {stop_reason(trainer)}. Its folder is {folder}"
        )
    if (folder / "report.html").is_file():
        lines.append(f"  its curves and tables: {folder / 'report.html'}")
    if (folder / "config.yaml").is_file():  # which a run from Python does not have
        lines.append(f"  watch the policy:      mtrl-lightning play {folder}")
        lines.append(f"  evaluate it:           mtrl-lightning validate {folder}")
    return "\n".join(lines)


def stop_reason(trainer: Trainer) -> str:
    """Return why the trainer ended before all steps were made."""
    reasons = [_reason_of(callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return "; ".join(filter(None, reasons)) or "a callback asked for it"


def _reason_of(callback: Callback) -> str:
    if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
        text = callback.stopping_reason_message.split(" Signaling")[0].rstrip(". ")
        return f"EarlyStopping: {text}"
    if isinstance(callback, Timer):
        left = callback.time_remaining()
        if left is not None and left <= 0:
            return "Timer: its time is over"
    return ""
