"""Distributed training of a run by several processes."""
