"""Multi-task reinforcement learning on PyTorch Lightning.

This module imports nothing, so that environment workers start without torch.
"""

__version__ = "0.2.0"
