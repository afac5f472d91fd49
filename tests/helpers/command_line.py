"""Run the command line on the toy benchmark, and read configuration files as it does."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from mtrl_lightning import train
from mtrl_lightning.callbacks import curves
from mtrl_lightning.cli.lightning_cli import main
from mtrl_lightning.compare import page
from mtrl_lightning.data import demonstration_data, env_data
from mtrl_lightning.envs.render.opengl import find_renderer
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.fitting import rows_of

ROOT = Path(__file__).parents[2]
SMALL = [
    "--data.batch_size=96",
    "--data.capacity=30000",
    "--data.warmup_steps=300",
    "--data.total_steps=900",
    "--data.num_workers=0",
    "--evaluation.num_workers=0",
    "--evaluation.every=300",
    "--evaluation.num_episodes=2",
    "--metrics.every=150",
    "--checkpoint.every_n_env_steps=300",
    "--model.init_args.actor.init_args.width=16",
    "--model.init_args.critic.init_args.width=16",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]
SHORT = [
    "--data.warmup_steps=60",
    "--data.total_steps=180",
    "--evaluation.every=60",
    "--metrics.every=30",
    "--checkpoint.every_n_env_steps=60",
]
"""A run with 40 updates, whose evaluations and checkpoints are after 63, 120 and 180 steps."""
CONFIGS = ("base", "env/toy", "algorithm/mtsac", "network/mlp", "gradient/mean")


def config_args(*names):
    return [arg for name in names for arg in ("-c", str(ROOT / "configs" / f"{name}.yaml"))]


def without_replay(options):
    """Leave out the options that on-policy algorithms do not have."""
    of_replay = ("--data.batch_size", "--data.capacity", "--data.warmup_steps")
    return [option for option in options if not option.startswith(of_replay)]


def short_train(benchmark, algorithm, *, total_steps, **options):
    """Train an off-policy algorithm as ``train`` does, for a few steps whatever is asked for."""
    short = {
        "data": {"batch_size": 12},
        "evaluation": {"num_episodes": 1, "num_workers": 0},
        "trainer": {"enable_progress_bar": False},
    }
    options |= {section: options.get(section, {}) | given for section, given in short.items()}
    return train(benchmark, algorithm, total_steps=min(total_steps, 120), **options)


class _Composed(Exception):  # noqa: N818
    """Raised once a run is composed and checked."""


@contextmanager
def only_composed():
    """Let ``fit`` end before environments are started or demonstrations are read."""

    def stop(*args, **kwargs):
        raise _Composed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Composed):
        patch.setattr(env_data, "VectorEnv", stop)
        patch.setattr(demonstration_data, "load_demonstrations", stop)
        yield


def leave_out_curves(monkeypatch):
    monkeypatch.setattr(curves, "plot_curves", lambda folder: folder / "curves.png")
    monkeypatch.setattr(curves, "log_image", lambda *args: None)
    monkeypatch.setattr(page, "png", lambda charts: b"")


def skip_without_renderer():
    """Skip a test that draws a MuJoCo simulation where the machine cannot do that."""
    try:
        find_renderer()
    except ConfigurationError as error:
        pytest.skip(str(error))


class CommandLine:
    """Run the command line on the toy benchmark, in this process or as a process of its own."""

    def __init__(self, root, monkeypatch, finished_runs=None):
        self.root, self._monkeypatch = root, monkeypatch
        self._finished_runs = finished_runs
        self.processes = []

    def arguments(self, subcommand, *extra, configs=CONFIGS, small=True):
        return [
            subcommand,
            *config_args(*configs),
            *(SMALL if small else []),
            *([] if "--resume" in str(extra) else [f"--root={self.root}"]),
            *extra,
        ]

    def __call__(self, subcommand, *extra, **kwargs):
        arguments = self.arguments(subcommand, *extra, **kwargs)
        self._monkeypatch.setattr(sys, "argv", ["cli.py", *arguments])
        main(arguments)

    def finished(self, *options, name="run"):
        """Copy a finished run to here, which is trained once for all tests, and print its output.

        What it warned of and logged is not repeated, and its ``config.yaml`` has another ``root``.
        Call it before anything is patched.
        """
        folder, printed = self._finished_runs(name, *options)
        shutil.copytree(folder, self.folder(name), symlinks=True)
        print(printed, end="")

    def process(self, subcommand, *extra, **kwargs):
        command = [
            sys.executable,
            str(ROOT / "cli.py"),
            *self.arguments(subcommand, *extra, **kwargs),
        ]
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
            # a shell's background job ignores Ctrl-C, and so would its children
            "preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        }
        # another test in this process may have started W&B's helper, which would take the run for
        # its own
        environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        self.processes.append(subprocess.Popen(command, cwd=self.root, env=environment, **options))
        return self.processes[-1]

    def folder(self, name="run", version=0):
        return Path(self.root) / name / f"version_{version}"

    def rows(self, name="run", version=0):
        return rows_of(self.folder(name, version))


def fails(command_line, capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as exit_info:
        command_line(*args, **kwargs)
    return exit_info.value.code, capsys.readouterr().err
