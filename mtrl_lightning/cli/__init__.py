"""The command line: what ``fit``, ``validate``, ``list``, ``doctor``, ``clear``, ``completion`` do.

``lightning_cli`` trains and evaluates; ``list``, ``doctor`` and ``clear`` start without PyTorch.
"""
