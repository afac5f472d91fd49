"""A family of bodies from the command line: evaluation modes, continuation, and one mode alone."""

import json
from functools import partial

import numpy as np
import pytest

pytest.importorskip("dm_control")

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import plot_curves, read_metrics
from tests.helpers.runs import assert_continues_exactly

pytestmark = pytest.mark.slow

FAMILY = (
    "base",
    "env/hipbmdp",
    "algorithm/mtsac",
    "network/multi_head",
    "gradient/mean",
)
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


def test_a_family_is_evaluated_in_three_modes_and_continued_exactly(command_line, capsys, caplog):
    """A checkpoint after 50 of 100 steps is in the middle of episodes of 12 steps each."""
    run = partial(command_line, "fit", *SHORT, configs=FAMILY)
    assert_continues_exactly(command_line, run, 50, 100)
    printed = capsys.readouterr().out
    curves = read_metrics(command_line.folder("whole"))
    for split, values in TASKS.items():
        names = [f"cartpole-swingup-pole-{value}" for value in values]
        found = {name.rsplit("/", 1)[1] for name in curves if name.startswith(f"{split}/return/")}
        assert found == set(names)
        steps, average = curves[f"{split}/return"]
        assert steps == [50, 100]
        per_task = np.array([curves[f"{split}/return/{name}"][1] for name in names])
        assert average == pytest.approx(per_task.mean(0))
        assert curves[f"{split}/score"][1] == pytest.approx([value / 24 for value in average])
        assert f"{split} after 100 env steps" in printed
    assert not any(name.startswith("eval/") for name in curves)
    trained = {name.rsplit("/", 1)[1] for name in curves if name.startswith("rollout/return/")}
    assert trained == {"cartpole-swingup-pole-0.25", "cartpole-swingup-pole-0.5"}
    untrained = "cartpole-swingup-pole-0.35, cartpole-swingup-pole-0.2"
    given = "is given the mean over the trained tasks (OneHot, LinearHeads)"
    assert f"Evaluated without training: {untrained}. The policy {given}" in caplog.text

    caplog.clear()
    folder = str(command_line.folder("whole"))
    main(["validate", folder, "--split=eval_interpolation", "--trainer.accelerator=cpu"])
    alone = capsys.readouterr().out
    assert "eval_interpolation after" in alone and "eval_base" not in alone
    assert f"Evaluated without training: {untrained}. The policy {given}" in caplog.text
    with pytest.raises(SystemExit) as ended:
        main(["validate", folder, "--split=interpolation"])
    assert ended.value.code == 2
    assert "unknown split 'interpolation': did you mean eval_interpol" in capsys.readouterr().err


def figure_of(rows, folder, monkeypatch):
    """What ``plot_curves`` draws of the rows of ``metrics.jsonl``; the first row has names."""
    from matplotlib.figure import Figure

    names, *values = rows
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in values]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    figures = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, path, **options: (figures.append(self), path.write_bytes(b"")),
    )
    plot_curves(folder)
    (figure,) = figures
    return figure


def test_the_image_has_a_row_for_each_mode_and_one_that_compares_them(tmp_path, monkeypatch):
    splits = ("eval_base", "eval_extrapolation")
    columns = [f"{split}/return{task}" for split in splits for task in ("", "/a")]
    rows = [[step, *(step + place for place in range(len(columns)))] for step in (10, 20)]
    figure = figure_of([["env_steps", *columns], *rows], tmp_path, monkeypatch)
    shown = [
        (axes.get_title(), {line.get_label(): list(line.get_ydata()) for line in axes.lines})
        for axes in figure.axes
    ]
    assert shown == [
        ("return", {"eval_base": [10, 20], "eval_extrapolation": [12, 22]}),
        ("eval_base/return", {"a": [11, 21], "average": [10, 20]}),
        ("eval_extrapolation/return", {"a": [13, 23], "average": [12, 22]}),
    ]


def test_no_two_tasks_of_an_image_look_the_same(tmp_path, monkeypatch):
    columns = ["eval/score", *(f"eval/score/task-{number}" for number in range(29))]
    figure = figure_of([["env_steps", *columns], [10, *range(30)]], tmp_path, monkeypatch)
    (axes,) = figure.axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len(columns)
    (average,) = (line for line in axes.lines if line.get_label() == "average")
    assert (average.get_color(), average.get_linestyle()) == ("black", "-")
