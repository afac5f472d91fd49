"""The command line: ``lightning_cli`` has ``fit``, ``validate`` and ``test``, others a module each.

The program's help, ``list``, ``doctor`` and ``clear`` start without PyTorch.
"""

PROGRAM = "mtrl-lightning"
TRUST = (
    " The classes that the run's config.yaml names are imported, so that their code is executed:"
    " use only runs that you trust."
)
"""Part of the help of every command that imports them."""
