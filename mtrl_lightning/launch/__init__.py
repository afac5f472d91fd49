"""The start of a run: its options, its folder, its processes and callbacks."""
