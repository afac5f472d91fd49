"""Checkpoints that are changed, and loaded again."""

import torch


def checkpoint_of(sac, optimizers=()):
    """What Lightning would write, as far as the algorithm has a hand in it."""
    checkpoint = {
        "state_dict": sac.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
    }
    sac.on_save_checkpoint(checkpoint)
    return checkpoint


def save(algorithm, tmp_path, optimizers=(), change=None):
    """Write what a trainer would, as far as an algorithm reads it."""
    checkpoint = checkpoint_of(algorithm, optimizers)
    if change is not None:
        change(checkpoint)
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"
