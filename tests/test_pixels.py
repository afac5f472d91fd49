"""From pixels that MuJoCo draws to a policy: training, and exact continuation in mid-episode."""

from functools import partial

import pytest

from mtrl_lightning import SAC, train
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.envs import DMControl, Pixels
from mtrl_lightning.networks import MLP, PixelEncoder
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.runs import assert_same


@pytest.mark.slow
def test_run_from_pixels_resumes_in_mid_episode(tmp_path):
    pytest.importorskip("dm_control")
    skip_without_renderer()
    small = partial(MLP, width=8, depth=1)
    encoder = partial(PixelEncoder, channels=4, strides=(2, 2), out_dim=8)
    # episodes of 40 steps, and rings that wrap around
    sizes = {"batch_size": 8, "capacity": 48, "warmup_steps": 10, "chunk_mebibytes": 0.01}
    trained = partial(
        train,
        DMControl(["cartpole-swingup"], horizon=40),
        partial(SAC, encoder=encoder, actor=small, critic=small),
        total_steps=60,
        root=str(tmp_path),
        data={**sizes, "pixels": partial(Pixels, size=16)},
        num_workers=0,
        checkpoint={"every_n_env_steps": 30, "save_top_k": -1},
        evaluation={"every": 1_000, "num_episodes": 1, "num_workers": 0},
        metrics={"every": 30},
        trainer={"enable_progress_bar": False},
    )
    whole = trained()
    end = load_checkpoint(whole.checkpoint)
    assert end["ReplayData"]["replay"]["layout"]["frames"] > 0
    (middle,) = whole.folder.glob("checkpoints/*30.ckpt")
    continued = trained(ckpt_path=str(middle))
    assert continued.folder == whole.folder and continued.evaluation == whole.evaluation
    found = load_checkpoint(continued.checkpoint)
    for part in ("state_dict", "optimizer_states", "ReplayData"):
        assert_same(found[part], end[part])
