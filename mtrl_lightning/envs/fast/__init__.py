"""Faster implementations of parts of MetaWorld and dm_control, with bit-identical results."""
