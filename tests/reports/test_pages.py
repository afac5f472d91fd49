"""Pages of runs and comparisons: what they hold, escaped, and what a browser makes of them."""

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

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import ReportCallback, report
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports import budget
from mtrl_lightning.reports.charts import Chart, Curve, svg_of
from mtrl_lightning.reports.comparison import bands_of, compare_runs, summarize
from mtrl_lightning.reports.comparison_report import comparison_page
from mtrl_lightning.reports.defaults import differences
from mtrl_lightning.reports.record import read_run
from mtrl_lightning.reports.render import Trend, legend, render, trend
from mtrl_lightning.reports.run_report import run_page, shares_of_time, write_report
from tests.helpers.report_folders import make_run, options_of

pytestmark = pytest.mark.curves

EVIL = "</text></svg></script><b>x</b>&\"' $\\frac{$ {{ 7*7 }} #010203"
LOGGED = [
    {
        "env_steps": step,
        "train/temperature/reach": 0.2,
        f"train/temperature/{EVIL}": 0.3,
        "train/critic_conflicts": 0.4,
        "train/critic_loss": 1.0,
        "rollout/return": 5.0,
        "time/update_fraction": share,
        "fault/worker_restarts": 2,
    }
    for step, share in ((100, 0.5), (300, 0.25))
]
VOID = {"meta", "br", "link"}
METRICS_OF_MANY = ("eval/success", "eval/return", "rollout/return", "train/temperature")
WIDTHS = (400, 700, 1400)


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


def charts_of(text):
    """The charts of a page as SVG, by their titles."""
    found = re.findall(r"<figcaption>([^<]*)</figcaption>\s*(<svg.*?</svg>)", text, re.DOTALL)
    return {html.unescape(title): svg for title, svg in found}


def test_the_page_of_a_run_holds_all_that_was_logged(run):
    for name in ("step_000000000200/reach.mp4", "step_000000000300/all_tasks.mp4"):
        (run / "videos" / name).parent.mkdir(parents=True)
        (run / "videos" / name).touch()
    text = write_report(run).read_text()
    parsed = Parsed(text)
    assert sorted(path.name for path in run.glob("report*")) == ["report.html"]
    shown = " ".join(parsed.texts)
    assert f"{EVIL}/version_0" in shown and "300 of 400 env steps (75%) · seed 1" in shown
    cells = parsed.texts
    place = cells.index("reach", cells.index("task"))
    assert cells[place + 1 : place + 5] == ["0.25", "0.50", "25.00", "50.00"], "last and best"
    assert "environments rebuilt after a fault" in cells and "2" in cells
    for option, value, default in (
        ("model.tau", "0.01", "0.005"),
        ("model.critic", "mtrl_lightning.networks.MultiHead", "MLP"),
        ("rollout.total_steps", "400", "1000000"),
    ):
        place = cells.index(option)
        assert cells[place + 1 : place + 3] == [value, default]
    charts = {title: re.findall(r'<path d="M', svg) for title, svg in charts_of(text).items()}
    assert list(charts) == [
        "eval/success",
        "eval/return",
        "train/temperature",
        "train/critic_conflicts",
        "rollout/return",
        "train/critic_loss",
        "time/env_steps_per_second",
    ]
    names = [name for name in ("reach", EVIL, "average") if cells.count(name) >= 2]
    assert names == ["reach", EVIL, "average"], "in the legend and in the table"
    assert text.count("<polyline") == 3 * 2, "tasks and average, success and return"
    assert "Evaluation" in cells and 'http-equiv="refresh"' not in text
    assert {"metrics.csv", "config.yaml"} <= set(cells), "links to the files"
    sources = [one["src"] for tag, one in parsed.attributes if tag == "video"]
    links = [one["href"] for tag, one in parsed.attributes if tag == "a"][:1]
    assert sources == ["videos/step_000000000300/all_tasks.mp4"]
    assert links == ["videos/step_000000000200/reach.mp4"]


def test_counts_are_whole_numbers(run):
    with (run / "metrics.csv").open() as file:
        header, *rows = file.read().splitlines()
    names = f"{header},rollout/episodes,rollout/episodes/reach"
    (run / "metrics.csv").write_text("\n".join([names, *(f"{row},650,325" for row in rows)]) + "\n")
    texts = Parsed(write_report(run).read_text()).texts
    assert {"650", "325"} <= set(texts) and not {"650.00", "325.00"} & set(texts)


def test_the_time_is_shared_by_how_long_rows_took(tmp_path):
    rows = [
        {"env_steps": steps, "time/env_steps_per_second": rate, "time/update_fraction": share}
        for steps, rate, share in ((100, 10.0, 0.5), (300, 5.0, 0.25))
    ]
    folder = make_run(tmp_path / "run", {}, (), extra=rows)
    assert shares_of_time(read_run(folder)) == {"update": pytest.approx((5 + 10) / 50)}


def test_nothing_that_a_run_names_is_markup_and_nothing_is_loaded(run):
    text = render(run_page(read_run(run)))
    markup = [one for one in (EVIL, "<b>") if one in text]
    assert markup == []
    assert text.count("{{ 7*7 }}") > 3
    assert re.findall(r"https?://[^\s\"]+", text) == []
    parsed = Parsed(text)
    tags = {tag for tag, _ in parsed.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "b"}
    assert all(not name.startswith("on") for _, one in parsed.attributes for name in one)
    (policy,) = re.findall(r'Security-Policy" content="(.*?)"', text)
    assert policy.startswith("default-src 'none';") and "script-src" not in policy


def test_a_label_of_a_chart_is_text(tmp_path):
    svg = svg_of(Chart(EVIL, [Curve("a", [0, 1], [0, 1], 0)], xlabel=EVIL), "a-")
    parsed = Parsed(svg)
    assert EVIL in parsed.texts, "a dollar sign is no formula"
    (label,) = [one["aria-label"] for _, one in parsed.attributes if "aria-label" in one]
    assert label == EVIL
    assert {tag for tag, _ in parsed.attributes} <= {
        "svg",
        "g",
        "defs",
        "path",
        "use",
        "text",
        "clippath",
        "rect",
    }


def test_every_chart_has_its_own_ids_and_the_same_run_gives_the_same_charts(run):
    page = run_page(read_run(run))
    text = render(page)
    ids = re.findall(r' id="(.*?)"', text)
    used = re.findall(r"""(?:url\(|href=")#([\w-]+)""", text)
    assert len(set(ids)) == len(ids) > 7 and set(used) == set(ids)
    assert render(page) == text


def points_of(svg, color):
    """Coordinates of the line of a color."""
    (path,) = [
        path
        for path, style in re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', svg)
        if f"stroke: {color};" in style
        and style.startswith("fill: none")
        and "url" not in path
        and path.count("L") > 1
    ]
    return np.array(re.findall(r"[ML] (\S+) (\S+)", path), float)


def test_a_line_is_where_its_values_are():
    """By hand: values 0, 0.5, 1 and steps 0, 100, 300 have proportional distances."""
    curves = [
        Curve("a", [0, 100, 300], [0.0, 0.5, 0.25], 1),
        Curve("mean", [0, 100, 300], [1, 1, 1]),
    ]
    svg = svg_of(Chart("a", curves, is_bounded=True), "a-")
    x, y = points_of(svg, "#ff7f0e").T
    assert (x[2] - x[0]) == pytest.approx(3 * (x[1] - x[0]), abs=0.3)
    assert y[0] > y[2] > y[1], "upwards"
    assert (y[0] - y[1]) == pytest.approx(2 * (y[0] - y[2]), abs=0.3)
    height = 0.77 * 180 / 1.06  # of 0 to 1 in the axes, which leave 3 % free on both sides
    assert y[0] - y[1] == pytest.approx(height / 2, abs=0.2)
    assert "#010203" not in svg and "stroke: currentColor; stroke-width: 2.2" in svg


def test_a_value_that_is_not_finite_leaves_a_gap_and_a_single_one_is_a_point():
    gap = [0.0, 1.0, float("nan"), 1.0, 0.5]
    svg = svg_of(Chart("a", [Curve("a", range(5), gap, 0)]), "a-")
    (path,) = [d for d in re.findall(r'd="([^"]*)"', svg) if d.count("M") == 2 and "z" not in d]
    assert path.count("L") == 2
    alone = svg_of(Chart("a", [Curve("a", [3], [0.5], 0)]), "a-")
    assert re.search(r'<use [^>]*style="fill: #1f77b4', alone)
    assert trend("0.50", gap, 0.0, 1.0) == Trend("0.50", ["0,20.0 25,0.0", "75,0.0 100,10.0"])
    assert trend("-", [np.nan], np.nan, np.nan).lines == []


@pytest.mark.slow
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
    assert len(text) < 100_000 * len(METRICS_OF_MANY)
    assert text.count("<polyline") == 51 * 2
    entries = list(legend(run_page(read_run(tmp_path / "run")).sections[0].charts))
    assert [entry.name for entry in entries] == ["each task: see the table of tasks", "average"]


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


@pytest.mark.slow
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
        {"model": {"class_path": "mtrl_lightning.cli.commands.COMMANDS"}},
        {"model": {"class_path": "torch..nothing"}},
        {"data": {"wrappers": [{1: 2, 3.5: [None]}]}},
    ],
)
def test_options_of_any_form_have_a_page_and_are_compared(changed, run, tmp_path, capsys):
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), **changed}))
    assert "Evaluation" in render(run_page(read_run(run)))
    main(["compare", str(run), "--no_intervals", f"--folder={tmp_path}"])
    assert "eval/success of 2 tasks" in capsys.readouterr().out


def test_a_page_imports_nothing_of_other_packages(run, tmp_path, monkeypatch):
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


def test_options_that_differ_are_found_in_nested_classes():
    given = options_of(7, rollout={"num_workers": None, "window": 50})
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01, "weight_decay": 0.0}}
    given["model"]["init_args"] |= {"actor_optimizer": optimizer, "num_critics": 2}
    given["data"]["benchmark"] = {"class_path": "nowhere.Own", "init_args": {"k": 3}}
    found = {one.name: (one.value, str(one.default)) for one in differences(given)}
    assert found == {
        "seed_everything": (7, "1"),
        "model": ("mtrl_lightning.algorithms.SAC", "-"),
        "model.actor.width": (16, "400"),
        "model.critic.width": (16, "400"),
        "model.actor_optimizer": ("torch.optim.Adam", "-"),
        "model.actor_optimizer.lr": (0.01, "0.001"),
        "data.benchmark": ("nowhere.Own", "-"),
        "data.benchmark.k": (3, "-"),
        "rollout.total_steps": (400, "1000000"),
        "evaluation.every": (100, "100000"),
    }


def of_comparison(tmp_path):
    for seed in (1, 2):
        scores = {"reach": (0.0, 0.5, 0.6 + seed / 10), "push": (0.0, 0.0, 0.2)}
        for tau in (0.1, 0.2):
            folder = tmp_path / "compared" / str(tau) / f"version_{seed}"
            make_run(folder, scores, options=options_of(seed, tau=tau))
    comparison = compare_runs([str(tmp_path / "compared")])
    rows = summarize(comparison.curves, 0.8)
    return render(comparison_page(comparison, bands_of(comparison), rows, 0.8))


def test_the_page_of_a_comparison_holds_curves_tables_and_warnings(tmp_path):
    text = of_comparison(tmp_path)
    shown = " ".join(Parsed(text).texts)
    assert "eval/success of 2 methods after 300 env steps" in shown
    assert "intervals of fewer than 3 seeds" in shown and "model.init_args.tau 0.1 0.2" in shown
    assert "tau 0.1 (2 seeds) tau 0.2 (2 seeds)" in shown, "the legend"
    charts = re.findall(r"<figcaption>([^<]*)</figcaption>\s*(<svg.*?</svg>)", text, re.DOTALL)
    titles = [title for title, _ in charts]
    assert titles == ["eval/success", "eval/success", "share above the threshold", "push", "reach"]
    for _, svg in charts:
        assert len(re.findall(r"fill-opacity: 0.15", svg)) == 2, "an interval for each method"
    assert "minutes of training" in charts[1][1]


MEASURE = """
const page = document.documentElement;
const [cell] = document.querySelectorAll("td");
const texts = [...document.querySelectorAll("figure svg text")];
const heights = texts.map((text) => text.getBoundingClientRect().height);
const found = document.createElement("pre");
found.id = "found";
found.textContent = JSON.stringify({
  window: window.innerWidth, page: page.scrollWidth, cell: cell.getBoundingClientRect().width,
  smallest: Math.min(...heights), charts: document.querySelectorAll("figure svg").length,
});
document.body.appendChild(found);
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
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_readable_on_a_telephone_and_on_a_large_screen(width, run):
    """Nothing is wider than the window, no column one letter wide, no text below 10 pixels."""
    text = write_report(run).read_text()
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", text)
    used = run / "used.html"
    used.write_text(without_policy.replace("</body>", f"<script>{MEASURE}</script></body>"))
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', in_chromium(used, width), re.DOTALL)
    found = json.loads(html.unescape(found))
    assert found["charts"] == 7 and found["page"] <= found["window"]
    assert found["cell"] > 60 and found["smallest"] >= 10


@pytest.fixture
def callback(run, monkeypatch):
    """The callback of a run that has just begun, with a clock that is set by hand."""
    clock = SimpleNamespace(now=0.0, cost=1.0, written=0)

    def write(folder, refresh_seconds):
        clock.refresh_seconds = refresh_seconds
        clock.now += clock.cost
        clock.written += 1

    monkeypatch.setattr(budget.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(report, "write_report", write)
    made = ReportCallback()
    made.session = SimpleNamespace(folder=run)
    made.clock = clock
    return made


def test_a_page_is_left_out_where_it_would_take_too_much_of_the_run(callback):
    written = []
    for now in (1.0, 99.0, 101.0, 199.0, 201.0, 299.0, 301.0):
        callback.clock.now = now
        callback.write_if_affordable()
        written.append(callback.clock.written)
    assert written == [0, 0, 1, 1, 2, 2, 3], "one per cent of the time is 1 s in 100 s"
    assert callback.clock.refresh_seconds == 60
    callback.on_train_end(None, None)
    assert callback.clock.written == 4, "the last one is written in any case"
    assert callback.clock.refresh_seconds == 0


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
    message = r"report\.html could not be written \(RuntimeError"
    with pytest.warns(UserWarning, match=message) as seen:
        callback.on_train_end(None, None)
        callback.on_train_end(None, None)
    assert len(seen) == 1
