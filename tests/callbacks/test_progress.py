import re

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


class AddEpisodes(Callback):
    """Add episodes, of which half of those from a reset succeed."""

    def on_train_end(self, trainer, pl_module):
        windows = data_of(trainer).collector.windows
        for success, midway in [(True, True), (True, False), (False, False)] * 20:
            windows.add(Episode(t, 0.0, 5, success, success, midway=midway) for t in (0, 1))


def test_the_bar_counts_env_steps_and_shows_results(tmp_path, capsys):
    fit(tmp_path, AddEpisodes(), EnvStepProgressBar(), enable_progress_bar=True)
    last = bars(capsys)[-1]
    assert re.search(r"100%.*120/120 .*env steps/s", last) and ", success=0.50," in last
    for name in ("eval success", "return"):
        assert re.search(rf"\b{name}=-?\d+\.\d\d", last), last
    options = {"ckpt_path": "last", "total_steps": 160}
    fit(tmp_path, EnvStepProgressBar(), enable_progress_bar=True, **options)
    assert "75%" in (first := bars(capsys)[0]) and "120/160" in first
