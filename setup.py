"""The packages: those of ``mtrl_lightning/``, and ``configs/``, which the wheel has inside it."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["mtrl_lightning", "mtrl_lightning.*"]),
        "mtrl_lightning.configs",
    ],
    package_dir={"mtrl_lightning.configs": "configs"},
)
