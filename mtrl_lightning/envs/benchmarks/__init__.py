"""Benchmarks: their tasks, and how to make environments of each task."""
