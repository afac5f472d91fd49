"""The page of a comparison and curves.png: what they show."""

import html
import json
import re

import pytest
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.compare import page
from mtrl_lightning.compare.charts import draw, evaluation_charts
from mtrl_lightning.compare.comparison import compare_runs, summarize
from mtrl_lightning.compare.page import write_page
from mtrl_lightning.compare.record import read_run
from tests.helpers.recorded_runs import make_run, options_of

EVIL = "</table></svg></script><b>x</b>&\"' $\\frac{$ {{ 7*7 }}"


def page_of(folder):
    """Return the text of the page that compares the runs in a folder."""
    comparison = compare_runs([str(folder)])
    path = folder.parent / "page.html"
    write_page(path, comparison, summarize(comparison, 0.8), 0.8)
    return path.read_text()


@pytest.fixture
def run(tmp_path):
    """A run whose task, name and options are markup."""
    scores = {EVIL: (0.0, 0.5, 0.75), "reach": (0.0, 0.5, 0.25)}
    return make_run(tmp_path / "run" / "version_0", scores, options=options_of(name=EVIL))


def shown_by(text):
    """Return the words of a page."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


@pytest.mark.curves
def test_page_has_tables_and_curves(runs, monkeypatch):
    drawn = []
    png = page.png
    monkeypatch.setattr(page, "png", lambda charts: drawn.append(charts) or png(charts))
    text = page_of(runs)
    for row in (
        "eval/success after 300 env steps",
        "actor.class_path mtrl_lightning.networks.MLP mtrl_lightning.networks.MOORE",
        "push 0.20 [0.20, 0.20] 0.95 [0.90, 1.00]",
    ):
        assert row in shown_by(text)
    assert len(re.findall(r"<img[^>]* src=.data:image/png;base64,", text)) == 2
    (by_steps, by_minutes), (push, reach) = drawn
    assert (by_steps.xlabel, by_minutes.xlabel) == ("env steps", "minutes of training")
    assert by_minutes.curves[1].x_N == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert (push.title, push.is_bounded) == ("push", True)
    for chart, value in ((by_steps, [0.0, 0.25, 0.45]), (reach, [0.0, 0.5, 0.75])):
        assert list(chart.curves[0].x_N) == [100, 200, 300]
        assert chart.curves[0].band.value == pytest.approx(value)


def test_page_of_one_run_escapes_names_and_loads_nothing(run):
    text = page_of(run)
    assert EVIL in html.unescape(text)
    assert not re.search(r"https?://|<(script|link|iframe|object|b)\b", text)
    assert "reach 0.25" in shown_by(text)
    assert ">P(better than the first)<" not in text and ">Options that differ<" not in text


def test_compare_imports_no_class_that_a_run_names(run, tmp_path, monkeypatch):
    (tmp_path / "own_options.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    model = {"class_path": "own_options.Own", "init_args": {"a": "own_options.make"}}
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), "model": model}))
    main(["compare", str(run), f"--page={tmp_path / 'page.html'}"])


def drawn(folder, *rows):
    """Return the axes for these rows of ``metrics.jsonl``."""
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return draw(evaluation_charts(read_run(folder))).axes


def test_curves_have_a_row_per_split_and_one_of_all_splits(tmp_path):
    names = ("eval_base/return", "eval_base/return/a", "eval_new/return", "eval_new/return/a")
    rows = [
        {"env_steps": step, **{name: step + place for place, name in enumerate(names)}}
        for step in (10, 20)
    ]
    shown = [
        (axes.get_title(), {line.get_label(): line.get_xydata().tolist() for line in axes.lines})
        for axes in drawn(tmp_path, *rows)
    ]
    assert shown == [
        ("return", {"eval_base": [[10, 10], [20, 20]], "eval_new": [[10, 12], [20, 22]]}),
        ("eval_base/return", {"a": [[10, 11], [20, 21]], "average": [[10, 10], [20, 20]]}),
        ("eval_new/return", {"a": [[10, 13], [20, 23]], "average": [[10, 12], [20, 22]]}),
    ]
