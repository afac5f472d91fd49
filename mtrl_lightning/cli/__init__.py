"""The command line: ``lightning_cli`` has ``fit`` and ``validate``, others a module each.

``list``, ``doctor`` and ``clear`` start without PyTorch.
"""
