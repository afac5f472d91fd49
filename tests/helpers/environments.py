"""States of environments, through a file."""

from __future__ import annotations

import io

import torch


def through_a_file(state):
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
