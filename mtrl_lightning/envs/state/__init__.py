"""The whole state of an environment, saved and restored."""
