"""A run: its parts, its loop, and where its files are."""
