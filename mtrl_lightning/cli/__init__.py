"""The command line: what ``fit``, ``validate``, ``list``, ``doctor``, ``clear``, ``completion`` do.

``lightning_cli`` trains and evaluates; the other commands start without PyTorch.
"""
