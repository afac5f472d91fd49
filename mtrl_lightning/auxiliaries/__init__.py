"""Representation losses besides the algorithm's own."""

from mtrl_lightning.auxiliaries.auxiliary import Auxiliary, LossInputs

__all__ = ["Auxiliary", "LossInputs"]
