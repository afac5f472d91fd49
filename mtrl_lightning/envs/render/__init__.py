"""Rendering of environments."""
