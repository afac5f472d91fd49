"""A run's parts as resharding sees them."""

from __future__ import annotations

from types import SimpleNamespace

from mtrl_lightning.run.session import Session


class Parts(SimpleNamespace):
    """The parts of a run, without the run."""

    reshard = Session.reshard
