"""Checkpoints that are changed, and loaded again."""

import torch

from tests.helpers.algorithms import attach, changed, copy_of, train


def checkpoint_of(sac, optimizers=()):
    """What Lightning would write, as far as the algorithm has a hand in it."""
    checkpoint = {
        "state_dict": sac.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
    }
    sac.on_save_checkpoint(checkpoint)
    return checkpoint


def assert_continued_is_the_same(make, tmp_path, half):
    """Check that an algorithm of another seed goes on exactly from a file after half the updates.

    ``make`` makes an algorithm of a seed. Return the one that was never saved, and the other.
    """
    whole, first, second = (make(seed=seed) for seed in (3, 3, 99))
    train(whole, 2 * half)
    optimizers = attach(first)
    train(first, half)
    checkpoint = torch.load(save(first, tmp_path, optimizers), weights_only=True)
    second.on_load_checkpoint(checkpoint)
    second.load_state_dict(checkpoint["state_dict"])
    for optimizer, state in zip(attach(second), checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    train(second, half, first=half)
    assert changed(second, copy_of(whole)) == set()
    assert second.counters == whole.counters
    assert second.drain_metrics() == whole.drain_metrics()
    return whole, second


def save(algorithm, tmp_path, optimizers=(), change=None):
    """Write what a trainer would, as far as an algorithm reads it."""
    checkpoint = checkpoint_of(algorithm, optimizers)
    if change is not None:
        change(checkpoint)
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"
