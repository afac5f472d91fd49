import lightning
import torch

from mtrl_lightning import SAC
from mtrl_lightning.data import ReplayData
from mtrl_lightning.envs import ToyReach
from tests.helpers.fitting import QUIET, SMALL


def test_steps_of_all_environments_count_and_threads_are_set(tmp_path):
    before = torch.get_num_threads()
    threads = 2 if before == 1 else 1
    data = ReplayData(
        ToyReach(2, horizon=5),
        240,
        batch_size=8,
        warmup_steps=80,
        envs_per_task=4,
        num_workers=0,
        learner_threads=threads,
    )
    trainer = lightning.Trainer(**QUIET, default_root_dir=tmp_path)
    trainer.fit(SAC(data.spec, **SMALL), data)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    counted = {name: value for name, value in data.counters.state_dict().items() if value}
    assert counted == {"env_steps": 240, "vector_steps": 30, "updates": 20, "episodes": 48}
