"""Train and evaluate in a source checkout: ``python cli.py fit -c quickstart``.

The same program as ``mtrl-lightning`` and ``python -m mtrl_lightning``.
"""

from mtrl_lightning.__main__ import main

if __name__ == "__main__":
    main()
