"""Train and evaluate: ``python cli.py fit -c configs/quickstart.yaml``.

``python cli.py fit --help`` explains the options.

The imports are inside, so that ``clear`` starts without PyTorch.
"""

if __name__ == "__main__":
    import sys

    if sys.argv[1:2] == ["clear"]:
        from mtrl_lightning.clear import main
    else:
        from mtrl_lightning.cli import main

    main()
