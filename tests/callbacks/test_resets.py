"""Networks that are reset on a schedule."""

import pytest

from mtrl_lightning.algorithms import PPO, SAC
from mtrl_lightning.callbacks import ResetCallback
from tests.helpers.fitting import fit


@pytest.fixture
def resets(monkeypatch):
    """Return the environment steps of each reset, all updates of which have been made."""
    seen = []

    def reset(algorithm):
        assert algorithm.trainer.datamodule.is_step_finished
        seen.append(algorithm.counters.env_steps)

    for kind in (SAC, PPO):
        monkeypatch.setattr(kind, "reset_networks", reset)
    return seen


@pytest.mark.parametrize(
    ("kind", "data", "every", "expected"),
    [
        ("sac", {}, 30, [90, 120]),  # not at 60, the end of the warm-up, nor at 150, the end
        ("sac", {"updates_per_step": 2}, 31, [94, 124]),  # at the first step past a multiple
        ("ppo", {}, 30, [40, 60, 100, 120]),  # between iterations of 20 steps
    ],
)
def test_networks_are_reset_on_schedule(tmp_path, resets, kind, data, every, expected):
    steps = 150 if kind == "sac" else 140
    fit(tmp_path, ResetCallback(every), kind=kind, total_steps=steps, data=data)
    assert resets == expected


def test_a_resumed_run_keeps_its_schedule_or_starts_one(tmp_path, resets):
    fit(tmp_path / "limited", ResetCallback(30, times=2), total_steps=90)
    assert resets == []
    fit(tmp_path / "limited", ResetCallback(30, times=2), total_steps=180, ckpt_path="last")
    assert resets == [90, 120]
    resets.clear()
    fit(tmp_path / "late", total_steps=100)
    fit(tmp_path / "late", ResetCallback(30), total_steps=140, ckpt_path="last")
    assert resets == [120]
