"""The page of a comparison and curves.png: what they hold, and what a browser makes of a page."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.compare import charts
from mtrl_lightning.compare.charts import Chart, Curve
from mtrl_lightning.compare.comparison import compare_runs, summarize
from mtrl_lightning.compare.page import average_charts, task_charts, write_page
from mtrl_lightning.compare.statistics import Estimate
from tests.helpers.report_folders import make_run, options_of

EVIL = "</table></svg></script><b>x</b>&\"' $\\frac{$ {{ 7*7 }}"


class Parsed(HTMLParser):
    """Tags with their attributes, and texts, of a page."""

    def __init__(self, text):
        super().__init__()
        self.attributes, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.attributes.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts += [data.strip()] if data.strip() else []


def page_of(*given, threshold=0.8):
    """Return the text of the page that compares runs."""
    comparison = compare_runs([str(folder) for folder in given])
    path = given[0].parent / "page.html"
    write_page(path, comparison, summarize(comparison, threshold), threshold)
    return path.read_text()


@pytest.fixture
def run(tmp_path):
    """A run whose task, name and options are markup."""
    scores = {EVIL: (0.0, 0.5, 0.75), "reach": (0.0, 0.5, 0.25)}
    return make_run(tmp_path / "run" / "version_0", scores, options=options_of(name=EVIL))


@pytest.fixture
def compared(tmp_path):
    """Two methods of two seeds."""
    for seed in (1, 2):
        scores = {"reach": (0.0, 0.5, 0.6 + seed / 10), "push": (0.0, 0.0, 0.2)}
        for tau in (0.1, 0.2):
            options = options_of(seed, name=f"tau_{tau}", tau=tau)
            make_run(tmp_path / "all" / f"tau_{tau}" / f"version_{seed}", scores, options=options)
    return tmp_path / "all"


@pytest.mark.curves
def test_the_page_holds_curves_tables_and_warnings(compared):
    parsed = Parsed(page_of(compared))
    shown = " ".join(parsed.texts)
    assert "eval/success after 300 env steps" in shown
    assert "two seeds, an interval that is much too narrow: tau_0.1, tau_0.2" in shown
    assert "model.init_args.tau 0.1 0.2" in shown
    row = parsed.texts.index("push")
    assert parsed.texts[row : row + 3] == ["push", "0.20 [0.20, 0.20]", "0.20 [0.20, 0.20]"]
    images = [one for tag, one in parsed.attributes if tag == "img"]
    average = "eval/success, interquartile mean"
    assert [image["alt"] for image in images] == [average, average, "push", "reach"]
    assert all(image["src"].startswith("data:image/png;base64,") for image in images)
    lines = [one for tag, one in parsed.attributes if tag == "line"]
    assert [line["stroke"] for line in lines[:2]] == ["#1f77b4", "#ff7f0e"]


def test_charts_of_a_comparison_hold_the_methods_curves(compared):
    comparison = compare_runs([str(compared)])
    by_steps, by_minutes = average_charts(comparison)
    assert (by_steps.xlabel, by_minutes.xlabel) == ("env steps", "minutes of training")
    push, reach = task_charts(comparison)
    for curve in reach.curves:
        assert list(curve.x_N) == [100, 200, 300]
        assert curve.band.value == pytest.approx([0.0, 0.5, 0.75])
        assert (curve.band.low[-1], curve.band.high[-1]) == pytest.approx((0.7, 0.8))
    assert (push.title, push.is_bounded) == ("push", True)


def test_one_run_has_a_page_that_says_that_there_is_no_interval(run):
    parsed = Parsed(page_of(run))
    shown = " ".join(parsed.texts)
    assert f"one seed, no interval: {EVIL}" in shown
    row = parsed.texts.index("reach")
    assert parsed.texts[row + 1] == "0.25"
    assert "P(better than the first)" not in parsed.texts
    assert "Options that differ" not in parsed.texts


def test_nothing_that_a_run_names_is_markup_and_nothing_is_loaded(run):
    text = page_of(run)
    assert EVIL not in text and "<b>" not in text
    assert not re.search(r"https?://", text)
    parsed = Parsed(text)
    assert not {tag for tag, _ in parsed.attributes} & {"script", "link", "iframe", "object", "b"}
    assert all(not name.startswith("on") for _, one in parsed.attributes for name in one)
    assert EVIL in parsed.texts


def test_a_cell_names_its_column_where_the_header_is_hidden(compared):
    parsed = Parsed(page_of(compared))
    named = {one["data-column"] for tag, one in parsed.attributes if tag == "td"}
    assert {"method", "seeds", "at the end", "task", "option", "run"} <= named


def axes_of(monkeypatch, *drawn):
    """Return Matplotlib's axes of charts."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: figures.append(self))
    charts._save(drawn, None, columns=3, dpi=90)
    return figures[0].axes


@pytest.mark.curves
def test_a_line_is_where_its_values_are(monkeypatch):
    curves = [
        Curve("a", [0, 100, 300], Estimate([0.0, 0.5, 0.25]), 1),
        Curve("mean", [0, 100, 300], Estimate([1, 1, 1], [0, 0, 0], [2, 2, 2])),
    ]
    (axes,) = axes_of(monkeypatch, Chart(EVIL, curves, is_bounded=True))
    a, mean = axes.lines
    assert (a.get_color(), a.get_linestyle()) == ("C1", "-") and mean.get_color() == "black"
    np.testing.assert_array_equal(a.get_xydata(), [[0, 0.0], [100, 0.5], [300, 0.25]])
    assert len(axes.collections) == 1 and axes.get_ylim() == (-0.03, 1.03)
    assert axes.get_title() == EVIL


@pytest.mark.curves
def test_a_single_value_is_a_point(monkeypatch):
    (axes,) = axes_of(monkeypatch, Chart("a", [Curve("a", [3], Estimate([0.5]), 0)]))
    assert axes.lines[0].get_marker() == "."


@pytest.mark.parametrize(
    "changed",
    [
        {"resets": None},
        {"evaluation": 3},
        {"seed_everything": [1]},
        {"name": {"a": 1}},
        {"data": {"wrappers": [{1: 2, 3.5: [None]}]}},
    ],
)
def test_options_of_any_form_are_compared(changed, run):
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), **changed}))
    assert "eval/success after 300 env steps" in page_of(run)


def test_a_page_imports_nothing_that_a_run_names(run, tmp_path, monkeypatch):
    (tmp_path / "own_options.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    model = {"class_path": "own_options.Own", "init_args": {"a": "own_options.make"}}
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), "model": model}))
    main(["compare", str(run), f"--page={tmp_path / 'page.html'}"])


def in_chromium(path, width):
    """Return a page's DOM in a window of this width."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += [f"--user-data-dir={path.parent / 'profile'}", "--no-first-run", "--dump-dom"]
    line = [program, *options, f"--window-size={width},900", path.as_uri()]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("Chromium did not end within two minutes: this machine is too busy for it")
    assert done.returncode == 0, done.stderr
    return done.stdout


MEASURE = """<script>window.addEventListener("load", () => {
  const ends = [...document.body.querySelectorAll("*")].map((e) => e.getBoundingClientRect().right);
  document.title = `${document.documentElement.scrollWidth} ${Math.max(...ends)} ${innerWidth}`;
});</script>"""


@pytest.mark.slow
@pytest.mark.curves
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_window(width, compared):
    page = compared.parent / "used.html"
    page.write_text(page_of(compared).replace("</body>", f"{MEASURE}</body>"))
    (found,) = re.findall(r"<title>([\d. ]+)</title>", in_chromium(page, width))
    scrolled, furthest, window = map(float, found.split())
    assert scrolled <= window and furthest <= window
