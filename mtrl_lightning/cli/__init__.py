"""The command line: ``lightning_cli`` has ``fit``, ``validate`` and ``test``; others have modules.

The program's help, ``list``, ``doctor`` and ``clear`` do not import PyTorch.
"""

PROGRAM = "mtrl-lightning"
TRUST = (
    " The classes named in the run's config.yaml are imported, which executes their code: use only"
    " runs that you trust."
)
"""Part of the help of every command that imports such classes."""
