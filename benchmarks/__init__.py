"""Benchmarks of the program itself: which faults it survives, and how fast it is.

They are no part of the installed package: run them in the repository's folder. Nothing is imported
here, because worker processes import this file.
"""
