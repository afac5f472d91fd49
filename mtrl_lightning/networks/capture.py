"""Whether operations are recorded instead of only computed."""

from __future__ import annotations

import torch


def is_captured() -> bool:
    """Return whether operations are recorded, by a compiler, an export or a trace.

    What is recorded must not depend on the values of tensors.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
