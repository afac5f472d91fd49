"""Representation losses beside SAC's own."""

from mtrl_lightning.auxiliaries.auxiliary import Auxiliary

__all__ = ["Auxiliary"]
