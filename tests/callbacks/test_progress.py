import re

from mtrl_lightning.callbacks import EnvStepProgressBar
from tests.helpers.fitting import fit, rows_of


def test_the_bar_counts_env_steps_and_shows_results(tmp_path, capsys):
    fit(tmp_path, EnvStepProgressBar(), enable_progress_bar=True)
    *_, last = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert re.search(r"100%.*120/120 .*env steps/s", last)
    shown = {key: value for row in rows_of(tmp_path) for key, value in row.items()}
    names = {"eval success": "eval/success", "success": "rollout/success"}
    for name, metric in (names | {"return": "rollout/return"}).items():
        assert f" {name}={shown[metric]:.2f}" in last.replace("[", " "), last
    options = {"ckpt_path": "last", "total_steps": 160}
    fit(tmp_path, EnvStepProgressBar(), enable_progress_bar=True, **options)
    assert re.search(r"75%.* 120/160 ", capsys.readouterr().err)
