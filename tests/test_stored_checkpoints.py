"""Runs that version 0.2 saved in mid-episode (format 3, ``tests/data/format_3``) continue."""

import shutil
from pathlib import Path

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.checkpoints import env_steps_of, load_checkpoint
from mtrl_lightning.loading import load_policy

STORED = Path(__file__).parent / "data" / "format_3"
CONTINUED = {"sac": (31, 40, 30), "ppo": (192, 288, 96)}
"""Env steps of the stored run and of its continuation, and updates after that."""


@pytest.mark.parametrize("name", CONTINUED)
def test_a_stored_run_continues(tmp_path, monkeypatch, recwarn, name):
    first, last, updates = CONTINUED[name]
    run = tmp_path / name / "version_0"
    shutil.copytree(STORED / name, run)
    (path,) = (run / "checkpoints").glob("step_*.ckpt")
    shutil.copy(path, path.with_name("last.ckpt"))
    assert env_steps_of(load_checkpoint(path)) == first
    monkeypatch.setattr("sys.argv", ["cli.py"])
    main(["fit", f"--resume={run}", f"--rollout.total_steps={last}"])
    # classes that have moved or have a new name since are the same options
    assert not [w for w in recwarn if "other options than its checkpoint's" in str(w.message)]
    counters = load_checkpoint(path.with_name("last.ckpt"))["mtrl_lightning"]["counters"]
    assert (counters["env_steps"], counters["updates"]) == (last, updates)


@pytest.mark.parametrize("name", CONTINUED)
def test_a_stored_policy_acts(name):
    (path,) = (STORED / name / "checkpoints").glob("step_*.ckpt")
    policy = load_policy(path)
    size = policy.spec.observation_space.shape[0]
    assert policy.act([0.0] * size, 0).shape == policy.spec.action_space.shape
