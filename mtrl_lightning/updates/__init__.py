"""Optimizer steps from losses: updates, target networks, transforms, normalization, metrics."""
