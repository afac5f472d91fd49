"""Pages of runs and comparisons: what they hold, escaped, and what a browser makes of them."""

import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from mtrl_lightning.callbacks import ReportCallback, report
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.charts import BOTTOM, HEIGHT, TOP, Chart, Curve, svg_uri
from mtrl_lightning.reports.comparison import compare_runs, summarize
from mtrl_lightning.reports.comparison_report import comparison_page
from mtrl_lightning.reports.record import read_run
from mtrl_lightning.reports.render import render
from mtrl_lightning.reports.run_report import run_page, write_report
from mtrl_lightning.reports.statistics import Estimate
from tests.helpers.report_folders import make_run, options_of

EVIL = "</text></svg></script><b>x</b>&\"' $\\frac{$ {{ 7*7 }}"
LOGGED = [
    {
        "env_steps": step,
        "train/temperature/reach": 0.2,
        f"train/temperature/{EVIL}": 0.3,
        "train/critic_conflicts": 0.4,
        "train/critic_loss": 1.0,
        "rollout/return": 5.0,
        "time/update_fraction": share,
        "time/act_fraction": 0.1,
        "fault/worker_restarts": 2,
    }
    for step, share in ((100, 0.5), (300, 0.25))
]
VOID = {"meta", "br", "img"}
METRICS_OF_MANY = ("eval/success", "eval/return", "rollout/return", "train/temperature")
WIDTHS = (400, 1400)


class Parsed(HTMLParser):
    """A page's elements, checked to be closed in their order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.texts = []
        self.attributes = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag = self.open[-1][0] if self.open else ""
        if tag not in ("script", "style") and data.strip():
            self.texts.append(data)


@pytest.fixture
def run(tmp_path):
    scores = {"reach": (0.0, 0.5, 0.25), EVIL: (0.0, 0.25, 0.75)}
    folder = tmp_path / "runs" / "a" / "version_0"
    options = options_of(1, name=EVIL, critic="MultiHead", tau=0.01)
    make_run(folder, scores, options=options, protocol={"horizon": EVIL}, extra=LOGGED)
    return folder


def svg_of(*charts):
    return decoded(svg_uri(charts))


def decoded(uri):
    prefix, _, content = uri.partition(",")
    assert prefix == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def texts_of(svg):
    return Parsed(svg[svg.index("<svg") :]).texts


@pytest.mark.curves
def test_the_page_of_a_run_holds_all_that_was_logged(run):
    for name in ("step_000000000200/reach.mp4", "step_000000000300/all_tasks.mp4"):
        (run / "videos" / name).parent.mkdir(parents=True)
        (run / "videos" / name).touch()
    text = write_report(run).read_text()
    parsed = Parsed(text)
    assert sorted(path.name for path in run.glob("report*")) == ["report.html"]
    shown = " ".join(parsed.texts)
    assert f"{EVIL}/version_0" in shown
    assert "300 of 400 env steps (75%) · 0.5 minutes · seed 1 · written " in shown
    assert "faults survived: worker restarts 2" in shown
    cells = parsed.texts
    place = cells.index("reach", cells.index("task"))
    assert cells[place + 1 : place + 5] == ["0.25", "0.50", "25.00", "50.00"], "last and best"
    assert "tau: 0.01" in shown, "all options"
    charts = [texts_of(decoded(one["src"])) for tag, one in parsed.attributes if tag == "img"]
    titles = [
        ["eval/success", "eval/return"],
        ["rollout/return"],
        ["train/critic_conflicts", "train/critic_loss", "train/temperature"],
        ["time/env_steps_per_second", "share of the time"],
    ]
    known = {title for section in titles for title in section}
    assert [[text for text in texts if text in known] for texts in charts] == titles
    assert {"reach", EVIL, "average"} <= set(charts[0]), "the legend"
    assert {"act", "update"} <= set(charts[3])
    assert "Evaluation" in cells and 'http-equiv="refresh"' not in text
    sources = [one["src"] for tag, one in parsed.attributes if tag == "video"]
    links = [one["href"] for tag, one in parsed.attributes if tag == "a"]
    assert sources == ["videos/step_000000000300/all_tasks.mp4"]
    assert links == ["metrics.csv", "config.yaml", "hparams.yaml", "videos"]


@pytest.mark.curves
def test_nothing_that_a_run_names_is_markup_and_nothing_is_loaded(run):
    page = run_page(read_run(run))
    text = render(page)
    assert [one for one in (EVIL, "<b>") if one in text] == []
    assert text.count("{{ 7*7 }}") > 3
    assert re.findall(r"https?://[^\s\"]+", text) == []
    parsed = Parsed(text)
    tags = {tag for tag, _ in parsed.attributes}
    assert not tags & {"script", "link", "iframe", "object", "b"}
    assert all(not name.startswith("on") for _, one in parsed.attributes for name in one)
    assert all(one["src"].startswith("data:") for tag, one in parsed.attributes if tag == "img")
    (policy,) = re.findall(r'Security-Policy" content="(.*?)"', text)
    assert policy.startswith("default-src 'none';") and "script-src" not in policy
    assert render(page) == text, "the same run gives the same charts"


@pytest.mark.curves
def test_a_label_of_a_chart_is_text():
    svg = svg_of(Chart(EVIL, [Curve("a", [0, 1], Estimate([0, 1]), 0)], xlabel=EVIL))
    assert texts_of(svg).count(EVIL) == 2, "a dollar sign is no formula"


def points_of(svg, color):
    """Coordinates of the line of a color."""
    (path,) = [
        path
        for path, style in re.findall(r'<path d="([^"]*)" clip-path[^>]*style="([^"]*)"', svg)
        if f"stroke: {color};" in style and path.count("L") > 1
    ]
    return np.array(re.findall(r"[ML] (\S+) (\S+)", path), float)


@pytest.mark.curves
def test_a_line_is_where_its_values_are():
    """By hand: values 0, 0.5, 1 and steps 0, 100, 300 have proportional distances."""
    curves = [
        Curve("a", [0, 100, 300], Estimate([0.0, 0.5, 0.25]), 1),
        Curve("mean", [0, 100, 300], Estimate([1, 1, 1])),
    ]
    svg = svg_of(Chart("a", curves, is_bounded=True))
    x, y = points_of(svg, "#ff7f0e").T
    assert (x[2] - x[0]) == pytest.approx(3 * (x[1] - x[0]), abs=0.3)
    assert y[0] > y[2] > y[1], "upwards"
    assert (y[0] - y[1]) == pytest.approx(2 * (y[0] - y[2]), abs=0.3)
    height = 72 * (HEIGHT - BOTTOM - TOP) / 1.06  # of 0 to 1: 3 % are free on both sides
    assert y[0] - y[1] == pytest.approx(height / 2, abs=0.2)
    assert "stroke: #000000; stroke-width: 2.2" in svg


@pytest.mark.curves
def test_a_value_that_is_not_finite_leaves_a_gap_and_a_single_one_is_a_point():
    gap = Estimate([0.0, 1.0, float("nan"), 1.0, 0.5])
    svg = svg_of(Chart("a", [Curve("a", range(5), gap, 0)]))
    (path,) = [d for d in re.findall(r'd="([^"]*)"', svg) if d.count("M") == 2 and "z" not in d]
    assert path.count("L") == 2
    alone = svg_of(Chart("a", [Curve("a", [3], Estimate([0.5]), 0)]))
    assert re.search(r'<use [^>]*style="fill: #1f77b4', alone)


@pytest.mark.slow
@pytest.mark.curves
def test_long_curves_and_many_tasks_have_pages_of_a_bounded_size(tmp_path):
    """Fifty tasks, 2,000 rows: as large as a photograph, and every task has its curve."""
    rng = np.random.default_rng(0)
    tasks = [f"task-{index}" for index in range(50)]
    rows = [
        {
            "env_steps": step,
            **{f"{metric}/{task}": rng.random() for metric in METRICS_OF_MANY for task in tasks},
            **{metric: rng.random() for metric in METRICS_OF_MANY},
        }
        for step in range(0, 2_000_000, 1_000)
    ]
    text = write_report(make_run(tmp_path / "run", {}, (), extra=rows)).read_text()
    assert len(text) < 200_000 * len(METRICS_OF_MANY)
    uri = re.findall(r'src="(data:[^"]*)"', text)[0]
    drawn = re.findall(r"stroke-width: 0.7", decoded(uri))
    assert len(drawn) == 2 * 50, "success and return of each task"
    names = [name for name in texts_of(decoded(uri)) if name in (*tasks, "average")]
    assert names == ["average"]


def test_a_run_from_python_without_evaluations_has_a_page(tmp_path):
    folder = make_run(tmp_path / "run", {}, options=None)
    assert "There is none yet." in render(run_page(read_run(folder)))


def test_a_task_may_lack_a_metric_and_a_metric_every_value(tmp_path, recwarn):
    rows = [
        {"env_steps": 300, "eval/return": 2.0, "eval/return/reach": 1.0},
        {"env_steps": 400, "eval/return/push": 3.0, "eval/length/push": "nan"},
        {"env_steps": 500, "eval/success": 0.5, "eval/success/reach": 0.5, "eval/length": "nan"},
    ]
    folder = make_run(tmp_path / "run", {}, (), extra=rows)
    texts = Parsed(render(run_page(read_run(folder)))).texts
    assert "eval, after 500 env steps" in texts, "those of the last evaluation of any task"
    head = texts.index("task")
    assert texts[head : head + 7] == ["task", "success", "best", "return", "best", "length", "best"]
    push, reach = texts.index("push", head), texts.index("reach", head)
    assert texts[push : push + 7] == ["push", "-", "-", "3.00", "3.00", "nan", "nan"]
    assert texts[reach : reach + 7] == ["reach", "0.50", "0.50", "1.00", "1.00", "-", "-"]
    assert not recwarn.list


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout": None},
        {"rollout": {"total_steps": "many"}},
        {"rollout": {"total_steps": [1]}},
        {"evaluation": 3},
        {"seed_everything": [1]},
        {"name": {"a": 1}},
        {"model": {"class_path": "mtrl_lightning.algorithms.SAC", "init_args": 3}},
        {"data": {"wrappers": [{1: 2, 3.5: [None]}]}},
    ],
)
def test_options_of_any_form_have_a_page_and_are_compared(changed, run):
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), **changed}))
    assert "Evaluation" in render(run_page(read_run(run)))
    comparison = compare_runs([str(run)])
    page = render(comparison_page(comparison, summarize(comparison, 0.8), 0.8))
    assert "eval/success of 1 methods" in page


def test_a_page_imports_nothing_that_a_run_names(run, tmp_path, monkeypatch):
    (tmp_path / "own_options.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    model = {"class_path": "own_options.Own", "init_args": {"a": "own_options.make"}}
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), "model": model}))
    assert "own_options.Own" in render(run_page(read_run(run)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"env_steps,a\n{'9' * 30},1\n", f"env_steps is {'9' * 30}"),
        ("env_steps,a\n-5,1\n", "env_steps is -5"),
        (f"env_steps,a\n5,{'1' * 200_000}\n", "field larger than field limit"),
        (f"env_steps,{'a' * 200_000}\n1,1\n", "field larger than field limit"),
    ],
)
def test_metrics_that_no_run_has_written_are_refused(content, message, run):
    (run / "metrics.csv").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_run(run)


def test_options_that_no_run_has_written_are_left_out(run):
    names = "a0: &a0 [1, 2]\n" + "".join(
        f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}, *a{k - 1}]\n" for k in range(1, 30)
    )
    for content in (names, "a: 2001-99-99", "{1: 2, a: 3}", "a: " + "[" * 5_000):
        (run / "config.yaml").write_text(content)
        assert read_run(run).options == {}


@pytest.mark.curves
def test_the_page_of_a_comparison_holds_curves_tables_and_warnings(tmp_path):
    for seed in (1, 2):
        scores = {"reach": (0.0, 0.5, 0.6 + seed / 10), "push": (0.0, 0.0, 0.2)}
        for tau in (0.1, 0.2):
            folder = tmp_path / "compared" / str(tau) / f"version_{seed}"
            make_run(folder, scores, options=options_of(seed, tau=tau))
    comparison = compare_runs([str(tmp_path / "compared")])
    text = render(comparison_page(comparison, summarize(comparison, 0.8), 0.8))
    parsed = Parsed(text)
    shown = " ".join(parsed.texts)
    assert "eval/success of 2 methods after 300 env steps" in shown
    assert "intervals of fewer than 3 seeds" in shown and "model.init_args.tau 0.1 0.2" in shown
    average, tasks = [decoded(one["src"]) for tag, one in parsed.attributes if tag == "img"]
    for svg, titles in (
        (average, 2 * ["eval/success, interquartile mean"]),
        (tasks, ["push", "reach"]),
    ):
        texts = texts_of(svg)
        assert [one for one in texts if one in titles] == titles
        assert {"tau 0.1 (2 seeds)", "tau 0.2 (2 seeds)"} <= set(texts), "the legend"
        assert svg.count("fill-opacity: 0.15") == 2 * 2, "an interval for each method"
    assert "minutes of training" in texts_of(average)


MEASURE = """
window.addEventListener("load", () => {
const page = document.documentElement;
const [cell] = document.querySelectorAll("td");
const found = document.createElement("pre");
found.id = "found";
found.textContent = JSON.stringify({
  window: window.innerWidth, page: page.scrollWidth, cell: cell.getBoundingClientRect().width,
  scales: [...document.images].map((image) => image.clientWidth / image.naturalWidth),
});
document.body.appendChild(found);
});
"""


def in_chromium(path, width=1200):
    """Return what a page is in a browser, after a script of a test has run."""
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


@pytest.mark.slow
@pytest.mark.curves
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_readable_on_a_telephone_and_on_a_large_screen(width, run):
    """Nothing is wider than the window, no column one letter wide, no text smaller than drawn."""
    text = write_report(run).read_text()
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", text)
    used = run / "used.html"
    used.write_text(without_policy.replace("</body>", f"<script>{MEASURE}</script></body>"))
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', in_chromium(used, width), re.DOTALL)
    found = json.loads(html.unescape(found))
    assert len(found["scales"]) == 4 and found["page"] <= found["window"]
    assert found["cell"] > 60 and min(found["scales"]) >= 1


@pytest.fixture
def callback(run, monkeypatch):
    """The callback of a run that has just begun, with a clock that is set by hand."""
    clock = SimpleNamespace(now=0.0, cost=1.0, written=0, logged=[])

    def write(folder, refresh_seconds):
        clock.refresh_seconds = refresh_seconds
        clock.now += clock.cost
        clock.written += 1

    monkeypatch.setattr(report.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(report, "write_report", write)
    monkeypatch.setattr(report, "log_image", lambda *args: clock.logged.append(args[3]))
    made = ReportCallback()
    counters = SimpleNamespace(env_steps=0)
    made.session = SimpleNamespace(folder=run, loggers=["one"], counters=counters)
    made.clock = clock
    return made


def test_a_page_is_left_out_where_it_would_take_too_much_of_the_run(callback):
    written = []
    for now in (1.0, 99.0, 101.0, 199.0, 201.0, 299.0, 301.0):
        callback.clock.now = now
        callback.session.counters.env_steps = int(now)
        callback.write_if_affordable()
        written.append(callback.clock.written)
    assert written == [0, 0, 1, 1, 2, 2, 3], "one per cent of the time is 1 s in 100 s"
    assert callback.clock.refresh_seconds == 60
    callback.on_train_end(None, None)
    assert callback.clock.written == 4, "the last one is written in any case"
    assert callback.clock.refresh_seconds == 0
    assert callback.clock.logged == [101, 201, 301], "each image once"


def test_only_the_page_of_a_run_in_training_is_loaded_again(run):
    again = '<meta http-equiv="refresh" content="60">'
    text = write_report(run, refresh_seconds=60).read_text()
    assert again in text and "in training" in text
    text = write_report(run).read_text()
    assert 'http-equiv="refresh"' not in text and "in training" not in text


def test_a_page_that_cannot_be_written_is_said_once(callback, monkeypatch):
    def fail(folder, refresh_seconds):
        raise RuntimeError("no page")

    monkeypatch.setattr(report, "write_report", fail)
    message = (
        r"report\.html and curves\.png could not be written \(RuntimeError: no page\)\. Training"
        r" continues, and they are written again later; there is no further warning"
    )
    with pytest.warns(UserWarning, match=message) as seen:
        callback.on_train_end(None, None)
        callback.on_train_end(None, None)
    assert len(seen) == 1
