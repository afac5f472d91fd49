"""Checkpoints that are changed, and loaded again."""

from __future__ import annotations

import torch


def checkpoint_of(sac, optimizers=()):
    """What Lightning would write, as far as the algorithm has a hand in it."""
    checkpoint = {
        "state_dict": sac.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "hyper_parameters": dict(sac.hparams),
    }
    sac.on_save_checkpoint(checkpoint)
    return checkpoint


def through_a_file(checkpoint, tmp_path):
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return torch.load(tmp_path / "file.ckpt", weights_only=True)


def load(sac, checkpoint):
    sac.on_load_checkpoint(checkpoint)
    sac.load_state_dict(checkpoint["state_dict"])


def save(algorithm, tmp_path, name="file.ckpt", change=None):
    """Write what a trainer would, as far as an algorithm reads it."""
    checkpoint = {"state_dict": algorithm.state_dict(), "hyper_parameters": {}}
    algorithm.on_save_checkpoint(checkpoint)
    if change is not None:
        change(checkpoint["mtrl_lightning"])
    torch.save(checkpoint, tmp_path / name)
    return tmp_path / name
