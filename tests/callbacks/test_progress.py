import re
from functools import partial

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from mtrl_lightning import SAC, ToyReach, train
from mtrl_lightning.networks import MLP
from tests.helpers.command_line import SHORT


@pytest.mark.slow
def test_the_bar_counts_env_steps_and_shows_rate_time_left_success_and_return(command_line, capsys):
    options = ["--trainer.enable_progress_bar=true", "--rollout.updates_per_step=2"]
    command_line("fit", *SHORT, *options)
    bar = capsys.readouterr().err.replace("\r", "\n").splitlines()
    last = [line for line in bar if "env steps/s" in line][-1]
    assert re.search(r"100%.*180/180 \[\d+:\d+<00:00, [\d.]+k? env steps/s", last), last
    for name in ("eval success", "success", "return"):
        assert re.search(rf"\b{name}=-?\d+\.\d\d", last), last


@pytest.mark.slow
def test_a_continued_run_begins_where_it_was(command_line, capsys):
    command_line.finished()
    command_line(
        "fit",
        "--trainer.enable_progress_bar=true",
        "--ckpt_path=last",
        "--rollout.total_steps=1000",
    )
    bar = [
        line
        for line in capsys.readouterr().err.replace("\r", "\n").splitlines()
        if "env steps" in line
    ]
    assert "90%" in bar[0] and "900/1.00k" in bar[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_of_lightnings_takes_the_place_of_ours(command_line, tmp_path, kind):
    if kind is RichProgressBar:
        pytest.importorskip("rich")
    shown = []

    class Watching(Callback):
        def on_train_start(self, trainer, pl_module):
            shown.append(type(trainer.progress_bar_callback))

    small = partial(MLP, width=8, depth=1)
    train(
        ToyReach(),
        partial(SAC, actor=small, critic=small),
        total_steps=120,
        root=str(tmp_path),
        callbacks=[kind(), Watching()],
        num_workers=0,
        evaluation={"num_episodes": 1, "num_workers": 0},
    )
    assert shown == [kind]
    bar = [f"--trainer.callbacks+={kind.__name__}", "--trainer.enable_progress_bar=true"]
    command_line("fit", *bar, "--rollout.total_steps=330")
    saved = yaml.safe_load((command_line.folder(version=1) / "config.yaml").read_text())
    (given,) = saved["trainer"]["callbacks"]
    assert given["class_path"].endswith(kind.__name__)
