"""A run: its parts, its data and its loop."""
