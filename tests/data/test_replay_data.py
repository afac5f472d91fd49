"""The options of the data modules, and the memory of the replay."""

from unittest.mock import Mock

import lightning
import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.data import ReplayData, RolloutData
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.transitions import transition_fields
from tests.helpers.fitting import SMALL, fit

BENCHMARK = ToyReach()


@pytest.mark.parametrize(
    ("excluded", "trained"),
    [(None, (0, 1, 2)), ([], (0, 1, 2)), (["goal-1"], (0, 2)), (["goal-2", "goal-0"], (1,))],
)
def test_spec_says_which_tasks_are_trained(excluded, trained):
    assert RolloutData(BENCHMARK, exclude_from_training=excluded).spec.train_tasks == trained


@pytest.mark.parametrize(
    ("options", "batch_size", "capacity", "warmup"),
    [
        ({"total_steps": 6_000}, 384, 6_003, 600),
        ({"total_steps": 6_000, "envs_per_task": 2}, 384, 6_006, 600),
        ({"total_steps": 900_000}, 384, 300_000, 12_000),
        ({"total_steps": 100, "batch_size": 60}, 60, 105, 12),
        ({"total_steps": 100, "batch_size": 60, "capacity": 60, "warmup_steps": 9}, 60, 60, 9),
    ],
)
def test_defaults_follow_from_tasks_and_total_steps(options, batch_size, capacity, warmup):
    data = ReplayData(BENCHMARK, **options)
    assert (data.batch_size, data.capacity, data.warmup_steps) == (batch_size, capacity, warmup)


@pytest.mark.parametrize(
    ("device", "options", "free", "kept_on"),
    [
        ("cpu", {}, 10_000, "cpu"),
        ("cuda", {}, 6_000, "cuda"),
        ("cuda", {}, 5_999, "cpu"),
        ("cuda", {"on_device": False}, 10_000, "cpu"),
        ("cuda", {"memory_map": True}, 10_000, "cpu"),
    ],
)
def test_replay_is_on_the_gpu_if_it_takes_half_of_it(
    tmp_path, monkeypatch, device, options, free, kept_on
):
    data = ReplayData(BENCHMARK, batch_size=6, capacity=3_000, num_workers=0, **options)
    available = {"cuda": bytes_needed(transition_fields(data.spec), free), "cpu": 10**12}
    module = "mtrl_lightning.data.replay_data"
    monkeypatch.setattr(f"{module}.free_memory", lambda asked: available[asked.type])
    made = []
    monkeypatch.setattr(f"{module}.ReplayBuffer", lambda *_, **given: made.append(given))
    trainer = lightning.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")
    trainer.strategy.connect(SAC(data.spec, **SMALL))
    data.trainer = trainer
    data.folder = tmp_path
    data.open_buffer(list(data.spec.train_tasks), torch.device(device))
    assert made[0]["device"] == torch.device(kept_on)
    assert made[0]["folder"] == (tmp_path if options.get("memory_map") else None)


def test_what_cannot_be_written_ahead_is_in_the_next_checkpoint(tmp_path, monkeypatch):
    write = Mock(side_effect=OSError("full"))
    monkeypatch.setattr(ReplaySnapshots, "write_full_chunk", write)
    with pytest.warns(UserWarning, match="full"):
        fit(tmp_path)
    saved = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert sum(saved["ReplayData"]["replay"]["per_env"]["added"]) == 120
    assert write.call_count == 3, "once before each checkpoint, at 62, 80 and 120 steps"
