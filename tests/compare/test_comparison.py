"""Methods, curves and tables of a comparison by hand, and what cannot be compared."""

import re

import numpy as np
import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.compare.comparison import Comparison, Curves, compare_runs, summarize
from mtrl_lightning.compare.record import RunRecord, read_metrics
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import fails
from tests.helpers.recorded_runs import STEPS, make_run, options_of

RISING = {"reach": (0.0, 0.5, 1.0)}
BOTH = {"reach": (0, 0, 0), "push": (0, 0, 0)}


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
    average = [(0.5 + 2 / 3) / 2, (0.2 + 0.8 / 3) / 2]
    assert [row["average"].value for row in rows] == pytest.approx(average)
    names = ("reached", "env_steps_to_threshold", "minutes_to_threshold", "minutes")
    found = [tuple(row[name] for name in names) for row in rows]
    assert found == [(2, 25.0, 3.5, 6.0), (1, 30.0, 16.0, 12.0)]
    assert [row["better_than_first"] for row in rows] == [None, (0.0, 0.0, 0.0)]
    assert rows[1]["final"][1:] == pytest.approx((0.6, 0.8))


def test_minutes_are_summed_from_the_rates_by_hand():
    def minutes(steps, *rates):
        metrics = {"time/env_steps_per_second": ([600, 1200, 2400], list(rates))} if rates else {}
        return RunRecord(None, {}, {}, metrics).minutes_until(steps)

    found = minutes([300, 1200, 1800, 2400], 10.0, 5.0, 20.0)
    assert found == pytest.approx([0.5, 3.0, 3.5, 4.0])
    assert minutes([600, 1200, 2400], 10.0, 0.0, 20.0) == pytest.approx([1.0, 1.0, 2.0])
    assert minutes([600]) is None


def test_only_complete_lines_are_read(tmp_path):
    folder = make_run(tmp_path / "run", RISING)
    file = folder / "metrics.jsonl"
    complete = read_metrics(folder)
    assert complete["eval/success/reach"] == (list(STEPS), [0.0, 0.5, 1.0])
    content = file.read_text()
    file.write_text(content + '{"env_steps": 400, "eval/success/reach"')
    assert read_metrics(folder) == complete
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
    assert comparison.bands.keys() == {"average", "push", "reach"}
    band = comparison.bands["push"]["moe"]
    assert [values[-1] for values in band] == pytest.approx([0.95, 0.9, 1])
    for file in runs.glob("*/*/*.yaml"):  # only the metrics are required
        file.unlink()
    alone = compare_runs([str(runs / "mlp"), str(runs / "moe")])
    assert [method.label for method in alone.methods] == ["mlp", "moe"]
    assert np.array_equal(alone.curves["moe"].scores_STN, curves.scores_STN)


@pytest.mark.parametrize(
    ("option", "value", "num_methods"),
    [
        ("on_nonfinite", "skip", 1),
        ("actor_optimizer", {"init_args": {"fused": False}}, 1),
        ("actor_optimizer", {"init_args": {"lr": 0.1}}, 2),
    ],
)
def test_options_that_change_no_result_make_no_method(tmp_path, option, value, num_methods):
    one, other = options_of(1), options_of(2)
    other["model"]["init_args"][option] = value
    make_run(tmp_path / "version_1", RISING, options=one)
    make_run(tmp_path / "version_2", RISING, options=other)
    assert len(compare_runs([str(tmp_path)]).methods) == num_methods


def test_a_label_before_the_folder_names_a_method(runs):
    given = [f"ours={runs / 'moe'}", f"base line={runs / 'mlp' / 'version_1'}", str(runs / "mlp")]
    comparison = compare_runs(given)
    assert [method.label for method in comparison.methods] == ["ours", "base line", "mlp"]
    one, two = comparison.warnings
    assert "base line, mlp." in one and "ours." in two


def test_other_evaluation_steps_are_interpolated(tmp_path):
    first, other, longer = (
        tmp_path / name for name in ("a/version_0", "a/version_1", "b/version_0")
    )
    make_run(first, {"reach": (0.0, 0.4, 0.8)}, options=options_of(1))
    steps = (100, 150, 250, 400)
    make_run(other, {"reach": (0.0, 0.2, 0.4, 0.6)}, steps, options_of(2))
    make_run(longer, {"reach": (0.2, 0.6)}, (100, 500), options_of(1, tau=0.1))
    comparison = compare_runs([str(tmp_path / "a"), str(tmp_path / "b")])
    a, b = comparison.curves.values()
    assert comparison.env_steps_N.tolist() == [100, 300]
    assert a.scores_STN[1, 0] == pytest.approx([0.0, 0.4 + 0.2 / 3])
    assert b.scores_STN[0, 0] == pytest.approx([0.2, 0.4])
    assert b.minutes_SN[0] == pytest.approx([1 / 6, 0.5])
    assert list(comparison.curves) == ["a", "a (2)"]
    assert len(comparison.warnings) == 4


def error_of(capsys, *args):
    code, error = fails(main, capsys, ["compare", *map(str, args)])
    assert code == 2
    return error


def test_what_cannot_be_compared_is_refused(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    (runs / "empty").mkdir()
    make_run(runs / "young" / "version_0", {}, options=options_of(1))
    make_run(runs / "mlp" / "version_3", {}, options=options_of(3))
    make_run(runs / "again", BOTH, options=options_of(1))
    make_run(runs / "late", BOTH, (500, 600, 700))
    for args, message in (
        (["nothing"], "nothing"),
        (["mlp", "empty"], "empty"),
        (["mlp", "young"], "young"),
        (["mlp", "again"], "the same seed"),
        (["mlp", "--metric=eval/score"], "eval/score"),
        (["mlp", "late"], "do not overlap"),
    ):
        assert message in error_of(capsys, *args)
    assert "version_3 is excluded" in compare_runs(["mlp"]).warnings[0]


def test_different_protocols_are_refused_by_default(runs, capsys):
    protocol = {"benchmark": "toy", "horizon": 500}
    make_run(runs / "long", {**RISING, "other": (0.0, 0.5, 1.0)}, protocol=protocol)
    printed = error_of(capsys, runs / "mlp", runs / "long")
    assert "horizon is 20 in" in printed and "evaluated tasks is push, reach in" in printed
    comparison = compare_runs([str(runs / "mlp"), str(runs / "long")], across_protocols=True)
    assert comparison.tasks == ("reach",) and "DIFFERENT" in comparison.warnings[0]


def test_compare_prints_tables_and_writes_a_page(runs, tmp_path, capsys):
    page = tmp_path / "pages" / "page.html"
    folders = [runs / "mlp" / "version_1", runs / "moe"]
    main(["compare", *map(str, folders), f"--page={page}", "--threshold=.98"])
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "| mlp | 1 | 0.45 | 0.45 | " in text
    assert "| moe | 2 | 1.00 [0.95, 1.00]" in text and "300 (1 of 2)" in text
    assert "| push | 0.20 | 0.95 [0.90, 1.00] |" in text
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
