"""Loggers of metrics."""
