"""Whether operations are recorded instead of only computed."""

from __future__ import annotations

import torch


def is_captured() -> bool:
    """Return whether operations are recorded, by a compiler, an export, a trace or a CUDA graph.

    Recorded operations must not depend on the values of tensors.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
