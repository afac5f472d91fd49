"""A family of bodies from the command line: evaluation modes, and one mode alone."""

import numpy as np
import pytest

pytest.importorskip("dm_control")

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import read_metrics

pytestmark = pytest.mark.slow

FAMILY = ("base", "env/hipbmdp", "algorithm/mtsac", "network/multi_head", "gradient/mean")
SHORT = (
    "--data.benchmark.init_args.train=[0.25,0.5]",
    "--data.benchmark.init_args.eval_interpolation=[0.35]",
    "--data.benchmark.init_args.eval_extrapolation=[0.2]",
    "--data.benchmark.init_args.horizon=24",
    "--data.batch_size=16",
    "--data.warmup_steps=20",
    "--evaluation.every=50",
    "--evaluation.num_episodes=1",
    "--metrics.every=50",
    "--checkpoint.every_n_env_steps=50",
)
TASKS = {"eval_base": (0.25, 0.5), "eval_interpolation": (0.35,), "eval_extrapolation": (0.2,)}


def test_family_is_evaluated_in_three_modes(command_line, capsys):
    command_line("fit", *SHORT, "--data.total_steps=100", configs=FAMILY)
    curves = read_metrics(command_line.folder())
    for split, values in TASKS.items():
        names = [f"cartpole-swingup-pole-{value}" for value in values]
        found = {name.rsplit("/", 1)[1] for name in curves if name.startswith(f"{split}/return/")}
        assert found == set(names)
        steps, average = curves[f"{split}/return"]
        assert steps == [50, 100]
        per_task = np.array([curves[f"{split}/return/{name}"][1] for name in names])
        assert average == pytest.approx(per_task.mean(0))
        assert curves[f"{split}/score"][1] == pytest.approx([value / 24 for value in average])
    assert not any(name.startswith("eval/") for name in curves)
    capsys.readouterr()
    validate = ["validate", str(command_line.folder()), "--trainer.accelerator=cpu"]
    main([*validate, "--split=eval_interpolation"])
    printed = capsys.readouterr().out
    assert "eval_interpolation after" in printed and "eval_base" not in printed
    with pytest.raises(SystemExit, match="2"):
        main([*validate, "--split=interpolation"])
