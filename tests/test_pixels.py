"""From pixels to a policy: training, evaluation, and exact continuation in mid-episode."""

from functools import partial

import pytest

from mtrl_lightning import SAC, train
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.envs import DMControl, Pixels, ToyReach
from mtrl_lightning.networks import MLP, PixelEncoder
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.runs import assert_same

HALF = 30
"""Env steps of one environment to the middle of its second episode."""
DATA = {
    "batch_size": 8,
    "capacity": 48,  # the rings wrap around
    "warmup_steps": 10,
    "chunk_mebibytes": 0.01,
}


def end_of(run):
    """Return what a run's last checkpoint and the replay files that it lists hold."""
    last = load_checkpoint(run.checkpoint)
    replay = last["ReplayData"]["replay"]
    assert replay["layout"]["frames"] > 0
    chunks = replay["all_ranks"]["chunks"]
    files = [(run.folder / "replay" / chunk["file"]).read_bytes() for chunk in chunks]
    parts = ("state_dict", "optimizer_states", "ReplayData")
    return {part: last[part] for part in parts}, files, run.evaluation


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_run_from_pixels_resumes_in_mid_episode(tmp_path, num_workers):
    """Two tasks that draw themselves with workers, else one that MuJoCo draws."""
    data = DATA
    if num_workers:
        benchmark = Pixels(ToyReach(2, horizon=20), size=16)
    else:
        pytest.importorskip("dm_control")
        skip_without_renderer()
        benchmark = DMControl(["cartpole-swingup"], horizon=40)
        data = {**DATA, "pixels": partial(Pixels, size=16)}
    steps = 2 * HALF * benchmark.spec.num_tasks
    small = partial(MLP, width=8, depth=1)
    encoder = partial(PixelEncoder, channels=4, strides=(2, 2), out_dim=8)
    trained = partial(
        train,
        benchmark,
        partial(SAC, encoder=encoder, actor=small, critic=small),
        total_steps=steps,
        root=str(tmp_path),
        data=data,
        num_workers=num_workers,
        checkpoint={"every_n_env_steps": steps // 2, "save_top_k": -1},
        evaluation={"every": 1_000, "num_episodes": 1, "num_workers": 0},
        metrics={"every": HALF},
        trainer={"enable_progress_bar": False},
    )
    whole = trained()
    states, files, evaluation = end_of(whole)
    assert any(key.startswith("eval/return") for key in evaluation)
    (middle,) = whole.folder.glob(f"checkpoints/*{steps // 2}.ckpt")
    continued = trained(ckpt_path=str(middle))
    assert continued.folder == whole.folder
    found = end_of(continued)
    assert_same(found[0], states)
    assert found[1:] == (files, evaluation)
