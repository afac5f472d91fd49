"""Compare and wait for runs; options that several test modules train with."""

import itertools
import os
import time
from functools import partial

import torch

from mtrl_lightning import SAC, train
from mtrl_lightning.checkpoints import data_key, load_checkpoint
from mtrl_lightning.networks import MLP


def wait_for(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)


def signal_in_call(monkeypatch, owner, method, call, number):
    """Send this process a signal in a call of a method, counted from 1."""
    original = getattr(owner, method)
    calls = itertools.count(1)

    def interrupting(*args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, interrupting)


CONNECTORS = [
    "--data.wrappers+={class_path: gymnasium.wrappers.FrameStackObservation,"
    " init_args: {stack_size: 3}}",
    "--data.wrappers+=gymnasium.wrappers.FlattenObservation",
    "--data.wrappers+={class_path: tests.helpers.fakes.Drift, init_args: {step: 0.001}}",
    "--model.init_args.encoder={class_path: mtrl_lightning.networks.Standardize,"
    " init_args: {per_task: true}}",
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.NormalizeReward",
    "--data.action_transforms+={class_path: mtrl_lightning.rollout.ActionNoise,"
    " init_args: {std: 0.1}}",
    "--data.action_transforms+={class_path: tests.helpers.rollout.Scale, init_args: {factor: 0.5}}",
]
"""Everything that changes observations, rewards and actions on their way."""


def assert_same(one, other, path="checkpoint"):
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{path}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert repr(one) == repr(other), path


def without_folder(value, folder):
    """Return a value of a checkpoint without the folder in the paths of files."""
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, dict):
        return {without_folder(k, folder): without_folder(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [without_folder(v, folder) for v in value]
    return value


def end_of(command_line, name="run"):
    """Return a run's last checkpoint without what depends on how often it was saved."""
    end = without_folder(checkpoint(command_line, name), str(command_line.folder(name)))
    callbacks = end["callbacks"]
    del end["epoch"], end["loops"]
    del callbacks["checkpoint"], callbacks["MetricsCallback"]["size"]
    del callbacks["best"]["current_score"]  # which Lightning does not restore
    end[data_key(end)].get("replay", {}).pop("all_ranks", None)
    return end


def assert_same_end(command_line, name, other):
    """Check that two runs end with the same checkpoint and rows of metrics."""
    assert_same(end_of(command_line, name), end_of(command_line, other))
    assert command_line.rows(name) == command_line.rows(other)


def checkpoint(command_line, name="run", which="last"):
    return load_checkpoint(command_line.folder(name) / "checkpoints" / f"{which}.ckpt")


SMALL_SAC = partial(SAC, actor=partial(MLP, width=16), critic=partial(MLP, width=16))
HERE = {"num_workers": 0}
"""Options that step environments in this process."""
QUIET = {"accelerator": "cpu", "enable_progress_bar": False}


def small(benchmark, root, **options):
    """Train a small network for 900 env steps."""
    evaluation = {"num_episodes": 2, **HERE, **options.pop("evaluation", {})}
    return train(
        benchmark,
        options.pop("algorithm", SMALL_SAC),
        root=str(root),
        num_workers=0,
        evaluation=evaluation,
        trainer=QUIET | options.pop("trainer", {}),
        **{"total_steps": 900, **options},
    )
