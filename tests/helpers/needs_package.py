"""A callback whose package is not installed."""

from lightning.pytorch import Callback


class NeedsPackage(Callback):
    """Imports its package when it is built, as Lightning's own do."""

    def __init__(self):
        import not_installed  # noqa: F401
