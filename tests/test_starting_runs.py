"""Runs that start from a trained policy, by ``train`` and by the command line."""

import shutil
from functools import partial

import numpy as np
import pytest
from lightning.pytorch import Callback

from mtrl_lightning import SAC, ToyReach, load_policy
from mtrl_lightning.networks import MultiHead, Standardize
from tests.helpers.runs import assert_same_end, small

pytestmark = pytest.mark.slow

NETWORK = partial(MultiHead, width=16, depth=1)
SMALL = partial(
    SAC, actor=NETWORK, critic=NETWORK, encoder=partial(Standardize, per_task=True, num_updates=5)
)
OBSERVATIONS = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)


class Named(ToyReach):
    """Toy tasks with other names."""

    def __init__(self, *names):
        super().__init__(len(names))
        self._names = names

    @property
    def spec(self):
        """Return the spec with these names."""
        return super().spec._replace(task_names=self._names)


class FirstActions(Callback):
    """Keeps the actions that a run's policy chooses for two tasks before it is trained."""

    def on_train_start(self, trainer, pl_module):
        self.actions = [pl_module.act(OBSERVATIONS, np.full(9, task), "exploit") for task in (0, 2)]


def test_a_run_of_other_tasks_starts_from_a_policy(tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning.pytorch")
    source = small(Named("a", "b", "c"), tmp_path, algorithm=SMALL, name="source", total_steps=300)
    before, first = load_policy(source.folder), FirstActions()
    small(
        Named("c", "d", "a"),
        tmp_path,
        algorithm=SMALL,
        name="next",
        init_from=source.folder,
        total_steps=120,
        callbacks=[first],
    )
    for actions, task in zip(first.actions, ("c", "a"), strict=True):
        expected = before.act(OBSERVATIONS, task)
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-6)
    assert "Tasks copied: c, a\nNew tasks: d" in caplog.text


def test_metaworld_run_starts_from_other_tasks_and_resumes(command_line, caplog):
    fit = partial(
        command_line,
        "fit",
        "--data.benchmark=mtrl_lightning.envs.MetaWorld",
        "--data.benchmark.init_args.horizon=23",
        *(f"--{section}.every=150" for section in ("evaluation", "metrics")),
        "--checkpoint.every_n_env_steps=150",
        configs=("base", "env/toy", "algorithm/mtsac", "network/multi_head", "gradient/mean"),
    )
    three = "--data.benchmark.init_args.tasks=[reach,push,box-close]"
    fit(three, "--name=source", "--data.total_steps=330")
    source = command_line.folder("source")
    start = ["--data.benchmark.init_args.tasks=[box-close,drawer-open]", f"--init_from={source}"]
    start += ["--init_new_tasks=mean", "--data.warmup_steps=40"]
    fit(*start, "--name=whole", "--data.total_steps=300")
    assert "Tasks copied: box-close-v3\nNew tasks: drawer-open-v3" in caplog.text
    fit(*start, "--name=parts", "--data.total_steps=150")
    shutil.rmtree(source)  # it is no longer needed
    parts = command_line.folder("parts")
    command_line("fit", f"--resume={parts}", "--data.total_steps=300", configs=(), small=False)
    assert_same_end(command_line, "whole", "parts")
