import re

import pytest
from lightning.pytorch import Callback

from mtrl_lightning.callbacks import EnvStepProgressBar
from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.transitions import Episode
from tests.helpers.fitting import fit


def bars(capsys):
    return [
        line
        for line in capsys.readouterr().err.replace("\r", "\n").splitlines()
        if "env steps" in line and "%|" in line
    ]


@pytest.mark.parametrize("kind", ["sac", "ppo"])
def test_the_bar_counts_env_steps_and_shows_results(tmp_path, capsys, kind):
    fit(tmp_path, EnvStepProgressBar(), kind=kind, enable_progress_bar=True)
    last = bars(capsys)[-1]
    assert re.search(r"100%.*120/120 \[\d+:\d+<00:00, [\d.]+k? env steps/s", last), last
    for name in ("eval success", "success", "return"):
        assert re.search(rf"\b{name}=-?\d+\.\d\d", last), last
    options = {"kind": kind, "ckpt_path": "last", "total_steps": 160}
    fit(tmp_path, EnvStepProgressBar(), enable_progress_bar=True, **options)
    assert "75%" in (first := bars(capsys)[0]) and "120/160" in first


def test_success_in_the_bar_is_of_episodes_from_a_reset(tmp_path, capsys):
    class AddEpisodes(Callback):
        def on_train_end(self, trainer, pl_module):
            windows = data_of(trainer).collector.windows
            for success, midway in [(True, True), (True, False), (False, False)] * 20:
                windows.add(Episode(t, 0.0, 5, success, success, midway=midway) for t in (0, 1))

    fit(tmp_path, AddEpisodes(), EnvStepProgressBar(), enable_progress_bar=True)
    assert ", success=0.50," in bars(capsys)[-1]


def test_a_disabled_bar_is_hidden(tmp_path, capsys):
    bar = EnvStepProgressBar()
    bar.disable()
    fit(tmp_path, bar, kind="ppo", total_steps=20, enable_progress_bar=True)
    assert bars(capsys) == []
