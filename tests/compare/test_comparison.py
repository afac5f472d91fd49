"""Methods, curves and tables of a comparison by hand, and what cannot be compared."""

import re

import numpy as np
import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.compare.comparison import (
    Comparison,
    Curves,
    compare_runs,
    summarize,
    table,
)
from mtrl_lightning.compare.methods import effective
from mtrl_lightning.compare.record import RunRecord, read_metrics
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.utils.text import markdown
from tests.helpers.recorded_runs import STEPS, make_run, options_of


@pytest.fixture
def runs(tmp_path):
    """Two methods of two seeds each on two tasks, ``mlp`` and ``moe``."""
    for seed in (1, 2):
        mlp = {"reach": (0.0, 0.5, 0.6 + seed / 10), "push": (0.0, 0.0, 0.2)}
        moe = {"reach": (0.1, 0.8, 1.0), "push": (0.0, 0.4, 0.8 + seed / 10)}
        make_run(tmp_path / "mlp" / f"version_{seed}", mlp, options=options_of(seed, name="mlp"))
        other = options_of(seed, name="moe", actor="MOORE", critic="MOORE")
        make_run(tmp_path / "moe" / f"version_{seed}", moe, options=other, rate=5.0)
    return tmp_path


def compared(env_steps, **curves):
    return Comparison("eval/success", ("a",), np.array(env_steps), [], curves, {}, [])


def test_rounding_does_not_miss_the_threshold():
    assert np.mean([0.7, 1.0, 0.7]) < 0.8
    exact = Curves(np.array([[[0.7, 1.0], [1.0, 1.0], [0.7, 1.0]]]), None)
    below = exact._replace(scores_STN=exact.scores_STN - 1e-6)
    rows = summarize(compared([10, 20], exact=exact, below=below), 0.8)
    assert [row["env_steps_to_threshold"] for row in rows] == [10.0, 20.0]


def test_a_comparison_by_hand():
    minutes_SN = np.array([[1.0, 2.0, 4.0], [2.0, 3.0, 8.0]])
    first = Curves(np.array([[[0.0, 0.5, 1.0]], [[0.0, 1.0, 1.0]]]), minutes_SN)
    other = Curves(np.array([[[0.0, 0.0, 0.6]], [[0.0, 0.0, 0.8]]]), 2 * minutes_SN)
    rows = summarize(compared([10, 20, 30], a=first, b=other), 0.8)
    assert [row["final"].value for row in rows] == pytest.approx([1.0, 0.7])
    assert [row["average"].value for row in rows] == pytest.approx(
        [(0.5 + 2 / 3) / 2, (0.2 + 0.8 / 3) / 2]
    )
    assert [(row["reached"], row["env_steps_to_threshold"]) for row in rows] == [
        (2, 25.0),
        (1, 30.0),
    ]
    times = [(row["minutes_to_threshold"], row["minutes"]) for row in rows]
    assert times == [(3.5, 6.0), (16.0, 12.0)]
    assert rows[0]["better_than_first"] is None
    assert rows[1]["better_than_first"] == (0.0, 0.0, 0.0)
    lines = markdown(table(rows, 0.8)).splitlines()
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert cells[:4] == ["b", "2", "0.70 [0.60, 0.80]", "0.70 [0.60, 0.80]"]
    assert cells[-4:] == ["0.00 [0.00, 0.00]", "30 (1 of 2)", "16.0", "12.0"]
    assert len({len(line) for line in lines}) == 1, "its columns are aligned"


def test_minutes_are_summed_from_the_rates_by_hand():
    def minutes(steps, **metrics):
        return RunRecord(None, {}, {}, metrics).minutes_until(steps)

    rate = "time/env_steps_per_second"
    curve = ([600, 1200, 2400], [10.0, 5.0, 20.0])
    assert minutes([300, 1200, 1800, 2400], **{rate: curve}) == pytest.approx([0.5, 3.0, 3.5, 4.0])
    curve = ([600, 1200, 2400], [10.0, 0.0, 20.0])
    assert minutes([600, 1200, 2400], **{rate: curve}) == pytest.approx([1.0, 1.0, 2.0])
    assert minutes([600]) is None


def test_only_complete_lines_are_read(tmp_path):
    folder = make_run(tmp_path / "run", {"reach": (0.0, 0.5, 1.0)})
    file = folder / "metrics.jsonl"
    complete = read_metrics(folder)
    assert complete["eval/success/reach"] == (list(STEPS), [0.0, 0.5, 1.0])
    with file.open("a") as end:
        end.write('{"env_steps": 400, "eval/success/reach"')
    assert read_metrics(folder) == complete
    with file.open("a") as end:
        end.write(": 1}\n")
    assert read_metrics(folder)["eval/success/reach"] == ([*STEPS, 400], [0.0, 0.5, 1.0, 1.0])
    content = file.read_text()
    for line in ("{", "4", "{}"):
        file.write_text(f"{content}{line}\n")
        with pytest.raises(ConfigurationError, match="damaged"):
            read_metrics(folder)


def test_runs_are_grouped_by_all_options_but_the_seed(runs):
    comparison = compare_runs([str(runs)])
    assert [method.label for method in comparison.methods] == ["mlp", "moe"]
    assert [[run.seed for run in one.runs] for one in comparison.methods] == [[1, 2], [1, 2]]
    assert (comparison.metric, comparison.tasks) == ("eval/success", ("push", "reach"))
    assert comparison.end == 300 and len(comparison.warnings) == 1
    curves = comparison.curves["moe"]
    assert curves.scores_STN[1].tolist() == [[0.0, 0.4, 1.0], [0.1, 0.8, 1.0]]
    assert curves.minutes_SN[0] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert "wide" not in str(effective(comparison.methods[0].runs[0]))
    assert comparison.bands.keys() == {"average", "push", "reach"}
    band = comparison.bands["push"]["moe"]
    assert [values[-1] for values in band] == pytest.approx([0.95, 0.9, 1])


@pytest.mark.parametrize(
    ("section", "option", "value", "num_methods"),
    [
        ("model", "compile", "default", 1),
        ("model", "on_nonfinite", "skip", 1),
        ("model", "actor_optimizer", {"init_args": {"fused": False}}, 1),
        ("model", "actor_optimizer", {"init_args": {"lr": 0.1}}, 2),
        ("data", "learner_threads", 2, 1),
        ("data", "updates_per_step", 2, 2),
    ],
)
def test_options_that_change_no_result_make_no_method(
    tmp_path, section, option, value, num_methods
):
    for seed in (1, 2):
        options = options_of(seed)
        options[section].setdefault("init_args", {}).update({option: value} if seed == 2 else {})
        make_run(tmp_path / f"version_{seed}", {"reach": (0.0, 0.5, 1.0)}, options=options)
    assert len(compare_runs([str(tmp_path)]).methods) == num_methods


def test_a_label_before_the_folder_names_a_method(runs):
    given = [f"ours={runs / 'moe'}", f"base line={runs / 'mlp' / 'version_1'}", str(runs / "mlp")]
    comparison = compare_runs(given)
    assert [method.label for method in comparison.methods] == ["ours", "base line", "mlp"]
    one, two = comparison.warnings
    assert one.startswith("one seed, no interval: base line, mlp.")
    assert two.startswith("two seeds, an interval that is much too narrow: ours.")


def test_other_evaluation_steps_are_interpolated(tmp_path):
    make_run(tmp_path / "a" / "version_0", {"reach": (0.0, 0.4, 0.8)}, options=options_of(1))
    make_run(
        tmp_path / "a" / "version_1",
        {"reach": (0.0, 0.2, 0.4, 0.6)},
        (100, 150, 250, 400),
        options_of(2),
    )
    longer = options_of(1, tau=0.1)
    make_run(tmp_path / "b" / "version_0", {"reach": (0.2, 0.6)}, (100, 500), longer)
    comparison = compare_runs([str(tmp_path / "a"), str(tmp_path / "b")])
    first, second = comparison.curves.values()
    assert comparison.env_steps_N.tolist() == [100, 300]
    assert first.scores_STN[1, 0] == pytest.approx([0.0, 0.4 + 0.2 / 3])
    assert second.scores_STN[0, 0] == pytest.approx([0.2, 0.4])
    assert second.minutes_SN[0] == pytest.approx([1 / 6, 0.5])
    assert list(comparison.curves) == ["a", "a (2)"]
    messages = ("no interval: a (2).", "narrow: a.", "after 300 env steps", "interpolated")
    for warning, message in zip(comparison.warnings, messages, strict=True):
        assert message in warning


def error_of(capsys, *args):
    with pytest.raises(SystemExit) as exit_info:
        main(["compare", *map(str, args)])
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nothing" in error_of(capsys, "nothing")
    (tmp_path / "empty").mkdir()
    assert "empty" in error_of(capsys, "mlp", "empty")
    make_run(tmp_path / "young" / "version_0", {}, options=options_of(1))
    assert "young" in error_of(capsys, "mlp", "young")
    make_run(tmp_path / "mlp" / "version_3", {}, options=options_of(3))
    assert "version_3 is left out" in compare_runs(["mlp"]).warnings[0]
    make_run(tmp_path / "again", {"reach": (0, 0, 0), "push": (0, 0, 0)}, options=options_of(1))
    assert "the same seed" in error_of(capsys, "mlp", "again")
    assert "eval/score" in error_of(capsys, "mlp", "--metric=eval/score")
    late = make_run(tmp_path / "late", {"reach": (0, 0, 0), "push": (0, 0, 0)}, (500, 600, 700))
    assert "none in common" in error_of(capsys, "mlp", late.name)


@pytest.mark.parametrize("others", ["moe", "moe/version_1"])
def test_one_seed_is_compared_without_an_interval(runs, tmp_path, capsys, others):
    page = f"--page={tmp_path / 'page.html'}"
    main(["compare", str(runs / "mlp" / "version_1"), str(runs / others), page])
    printed = capsys.readouterr()
    assert "warning: one seed, no interval: mlp" in printed.err
    assert ("an interval that is much too narrow: moe" in printed.err) == (others == "moe")
    text = re.sub(" +", " ", printed.out)
    assert "| mlp | 1 | 0.45 | 0.45 | " in text
    assert ("| moe | 2 | 1.00 [0.95, 1.00]" in text) == (others == "moe")


def test_different_protocols_are_refused_by_default(runs, capsys):
    scores = {"reach": (0.0, 0.5, 1.0), "other": (0.0, 0.5, 1.0)}
    for seed in (1, 2):
        make_run(
            runs / "long" / f"version_{seed}",
            scores,
            options=options_of(seed, tau=0.1),
            protocol={"benchmark": "toy", "horizon": 500},
        )
    printed = error_of(capsys, runs / "mlp", runs / "long")
    assert "horizon is 20 in" in printed and "and 500 in" in printed
    assert "evaluated tasks is push, reach in" in printed and "--across_protocols" in printed
    comparison = compare_runs([str(runs / "mlp"), str(runs / "long")], across_protocols=True)
    assert comparison.tasks == ("reach",)
    assert comparison.warnings[0].startswith("RUNS OF DIFFERENT PROTOCOLS ARE COMPARED: horizon")


def test_only_metrics_are_required(runs, tmp_path):
    for name in ("mlp", "moe"):
        for file in runs.glob(f"{name}/*/*.yaml"):
            file.unlink()
    comparison = compare_runs([str(tmp_path / "mlp"), str(tmp_path / "moe")])
    assert [method.label for method in comparison.methods] == ["mlp", "moe"]
    assert comparison.curves["moe"].scores_STN[1].tolist() == [[0.0, 0.4, 1.0], [0.1, 0.8, 1.0]]


def test_the_steps_of_offline_runs_are_called_updates(tmp_path, capsys):
    for seed in (1, 2):
        folder = tmp_path / "bc" / f"version_{seed}"
        rate_name = "time/updates_per_second"
        scores = {"reach": (0.0, 0.5, 1.0)}
        make_run(folder, scores, options=options_of(seed), rate_name=rate_name)
    page = tmp_path / "page.html"
    main(["compare", str(tmp_path / "bc"), f"--page={page}"])
    assert "1 tasks after 300 updates:" in capsys.readouterr().out
    text = page.read_text()
    assert "updates to 0.8" in text and "env steps" not in text


def test_compare_prints_a_table_and_writes_what_it_says(runs, tmp_path, capsys):
    page = tmp_path / "pages" / "page.html"
    main(["compare", str(runs / "mlp"), str(runs / "moe"), f"--page={page}", "--threshold=.98"])
    printed = capsys.readouterr()
    text = re.sub(" +", " ", printed.out)
    assert "| moe | 2 | 1.00 [0.95, 1.00]" in text and "300 (1 of 2)" in text
    assert "| push | 0.20 [0.20, 0.20] | 0.95 [0.90, 1.00] |" in text
    assert "| model.init_args.actor.class_path | mtrl_lightning.networks.MLP | " in text
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
