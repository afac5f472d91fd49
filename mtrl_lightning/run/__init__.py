"""One run: its parts, its folder and its start."""
