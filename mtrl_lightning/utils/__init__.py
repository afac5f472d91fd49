"""Shared utilities: counters, devices, text, progress bars."""
