"""Sweeps on one machine: a sweep file's configurations trained, compared and plotted."""
