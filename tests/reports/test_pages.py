"""Pages of runs and comparisons: what they hold, escaped, and what a browser makes of them."""

import html
import http.client
import json
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.callbacks import ReportCallback, report
from mtrl_lightning.cli import watch
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports import budget
from mtrl_lightning.reports.comparison import bands_of, compare_runs, summarize
from mtrl_lightning.reports.comparison_report import comparison_page
from mtrl_lightning.reports.defaults import differences
from mtrl_lightning.reports.page import MAX_POINTS, chart, curve, page
from mtrl_lightning.reports.record import read_run
from mtrl_lightning.reports.run_report import run_page, shares_of_time, write_report
from mtrl_lightning.reports.server import ReportServer
from tests.reports.folders import make_run, options_of

EVIL = "</script><b>x</b>&\"'"
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


class Parsed(HTMLParser):
    """A page's elements, checked to be closed in their order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.texts = []
        self.attributes = []
        self.data = {}
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
        tag, attrs = self.open[-1] if self.open else ("", {})
        if attrs.get("type") == "application/json":
            self.data[attrs["id"]] = json.loads(data)
        elif tag not in ("script", "style") and data.strip():
            self.texts.append(data)


@pytest.fixture
def run(tmp_path):
    scores = {"reach": (0.0, 0.5, 0.25), EVIL: (0.0, 0.25, 0.75)}
    folder = tmp_path / "runs" / "a" / "version_0"
    options = options_of(1, name=EVIL, critic="MultiHead", tau=0.01)
    make_run(folder, scores, options=options, protocol={"horizon": EVIL}, extra=LOGGED)
    return folder


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
    place = cells.index("reach")
    assert cells[place + 1 : place + 5] == ["0.25", "0.50", "25.00", "50.00"], "last and best"
    assert "environments rebuilt after a fault" in cells and "2" in cells
    for option, value, default in (
        ("model.tau", "0.01", "0.005"),
        ("model.critic", "mtrl_lightning.networks.MultiHead", "MLP"),
        ("rollout.total_steps", "400", "1000000"),
    ):
        place = cells.index(option)
        assert cells[place + 1 : place + 3] == [value, default]
    groups = {name: one["groups"] for name, one in parsed.data.items()}
    names = {name: [group["name"] for group in of_chart] for name, of_chart in groups.items()}
    assert names["evaluation-data"] == ["eval/success", "eval/return"]
    assert names["temperatures-data"] == ["train/temperature"]
    assert names["conflicts-data"] == ["train/critic_conflicts"]
    assert names["learning-data"] == ["train/critic_loss"]
    curves = {one["name"]: one for one in groups["evaluation-data"][0]["curves"]}
    assert list(curves) == [*sorted(["reach", EVIL]), "average"]
    assert curves["reach"]["y"] == [0, 0.5, 0.25] and curves["average"]["bold"]
    assert curves["reach"]["minutes"] == [0.16667, 0.33333, 0.5]
    assert {one["name"] for one in groups["temperatures-data"][0]["curves"]} == {"reach", EVIL}
    sources = [one["src"] for tag, one in parsed.attributes if tag == "video"]
    links = [one["href"] for tag, one in parsed.attributes if tag == "a"]
    assert sources == ["videos/step_000000000300/all_tasks.mp4"]
    assert links == ["videos/step_000000000200/reach.mp4"]


def test_counts_are_whole_numbers(run):
    with (run / "metrics.csv").open() as file:
        header, *rows = file.read().splitlines()
    names = f"{header},rollout/episodes,rollout/episodes/reach"
    (run / "metrics.csv").write_text("\n".join([names, *(f"{row},650,325" for row in rows)]) + "\n")
    texts = Parsed(write_report(run).read_text()).texts
    assert {"650", "325"} <= set(texts) and not {"650.00", "325.00"} & set(texts)


def test_tables_break_no_words_and_charts_have_the_width_of_the_screen(run):
    """A column is as wide as its longest word, and a text of a chart has its size in pixels."""
    text = write_report(run).read_text()
    (cells,) = re.findall(r"^th, td \{(.*?)\}", text, re.DOTALL | re.MULTILINE)
    assert "overflow-wrap: break-word" in cells
    tables = text.count("<table>")
    assert tables > 2 and text.count('<div class="scroll"><table>') == tables
    assert "holder.clientWidth" in text and 'addEventListener("resize"' in text


def test_the_time_is_shared_by_how_long_rows_took(tmp_path):
    rows = [
        {"env_steps": steps, "time/env_steps_per_second": rate, "time/update_fraction": share}
        for steps, rate, share in ((100, 10.0, 0.5), (300, 5.0, 0.25))
    ]
    folder = make_run(tmp_path / "run", {}, (), extra=rows)
    assert shares_of_time(read_run(folder)) == {"update": pytest.approx((5 + 10) / 50)}


def test_nothing_that_a_run_names_is_markup_and_nothing_is_loaded(run):
    text = run_page(read_run(run))
    assert EVIL not in text and "<b>" not in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"]+", text) == []
    loading = [
        (tag, one)
        for tag, one in Parsed(text).attributes
        if tag in ("link", "img", "iframe") or (tag == "script" and "src" in one)
    ]
    assert loading == []


def test_charts_hold_few_points_and_no_value_that_json_lacks():
    steps = np.arange(10_000)
    made = curve("a", steps, np.where(steps == 0, np.nan, steps / 3))
    assert len(made["x"]) == MAX_POINTS and made["x"][-1] == 9_999 and made["y"][-1] == 3333.0
    assert made["y"][0] is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        chart("a", "a", [{"name": "a", "curves": [{"y": [float("nan")]}]}])


def test_a_run_from_python_without_evaluations_has_a_page(tmp_path):
    folder = make_run(tmp_path / "run", {}, options=None)
    assert "There is none yet." in run_page(read_run(folder))


def test_a_task_may_lack_a_metric_and_a_metric_every_value(tmp_path, recwarn):
    rows = [
        {"env_steps": 300, "eval/return": 2.0, "eval/return/reach": 1.0},
        {"env_steps": 400, "eval/return/push": 3.0, "eval/length/push": "nan"},
        {"env_steps": 500, "eval/success": 0.5, "eval/success/reach": 0.5, "eval/length": "nan"},
    ]
    folder = make_run(tmp_path / "run", {}, (), extra=rows)
    texts = Parsed(run_page(read_run(folder))).texts
    assert "eval, after 500 env steps" in texts, "those of the last evaluation of any task"
    head = texts.index("task")
    assert texts[head : head + 7] == ["task", "success", "best", "return", "best", "length", "best"]
    push, reach = texts.index("push"), texts.index("reach")
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
        {"model": {"class_path": "mtrl_lightning.cli.commands.COMMANDS"}},
        {"model": {"class_path": "torch..nothing"}},
        {"data": {"wrappers": [{1: 2, 3.5: [None]}]}},
    ],
)
def test_options_of_any_form_have_a_page_and_are_compared(changed, run, tmp_path, capsys):
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), **changed}))
    assert "Evaluation" in run_page(read_run(run))
    main(["compare", str(run), "--no_intervals", f"--folder={tmp_path}"])
    assert "eval/success of 2 tasks" in capsys.readouterr().out


def test_a_page_imports_nothing_of_other_packages(run, tmp_path, monkeypatch):
    (tmp_path / "own_options.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    model = {"class_path": "own_options.Own", "init_args": {"a": "own_options.make"}}
    (run / "config.yaml").write_text(yaml.safe_dump({**options_of(1), "model": model}))
    assert "own_options.Own" in run_page(read_run(run))


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
    return comparison_page(comparison, bands_of(comparison), rows, 0.8)


def test_the_page_of_a_comparison_holds_curves_tables_and_warnings(tmp_path):
    parsed = Parsed(of_comparison(tmp_path))
    shown = " ".join(parsed.texts)
    assert "eval/success of 2 methods after 300 env steps" in shown
    assert "intervals of fewer than 3 seeds" in shown and "model.init_args.tau 0.1 0.2" in shown
    (group,) = parsed.data["average-data"]["groups"]
    assert [one["name"] for one in group["curves"]] == ["tau 0.1 (2 seeds)", "tau 0.2 (2 seeds)"]
    assert group["curves"][0]["low"][-1] <= group["curves"][0]["y"][-1]
    assert {"profile-data", "task-0-data", "task-1-data"} <= set(parsed.data)


USE = """
const num_lines = document.querySelectorAll("polyline").length;
const chart = document.getElementById("evaluation");
const svg = chart.querySelector("svg");
const box = svg.getBoundingClientRect();
const there = {clientX: box.left + 0.99 * box.width, clientY: box.top + 20};
svg.dispatchEvent(new PointerEvent("pointermove", there));
const shown = chart.querySelector(".tip").innerText;
chart.querySelector(".legend button").click();
const left = [...svg.querySelectorAll("polyline")].map((line) => line.dataset.name);
const [group, axis] = chart.querySelectorAll("select");
axis.value = "minutes";
axis.dispatchEvent(new Event("change"));
const label = [...svg.querySelectorAll("text")].at(-1).textContent;
group.value = "eval/return";
group.dispatchEvent(new Event("change"));
const marks = [...svg.querySelectorAll(".axis text")].map((text) => text.textContent);
const found = document.createElement("pre");
found.id = "found";
found.textContent = JSON.stringify({num_lines, shown, left, label, marks});
document.body.appendChild(found);
"""


def in_chromium(path):
    """Return what a page is after its script has run."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += [f"--user-data-dir={path.parent / 'profile'}", "--no-first-run", "--dump-dom"]
    line = [program, *options, "--window-size=1200,900", path.as_uri()]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("Chromium did not end within two minutes: this machine is too busy for it")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_browser_draws_the_charts_and_answers_the_pointer(run, tmp_path):
    text = write_report(run).read_text()
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", text)
    used = run / "used.html"
    used.write_text(without_policy.replace("</body>", f"<script>{USE}</script></body>"))
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', in_chromium(used), re.DOTALL)
    found = json.loads(html.unescape(found))
    # evaluation, temperatures, conflicts, episodes, learning, speed
    assert found["num_lines"] == 3 + 2 + 1 + 1 + 1 + 1
    assert "environment steps 300" in found["shown"] and "reach 0.25" in found["shown"]
    assert f"{EVIL} 0.75" in found["shown"] and "average 0.5" in found["shown"]
    assert found["left"] == ["reach", "average"] and found["label"] == "minutes"
    assert found["marks"][:2] == ["0", "10"]


def test_a_browser_draws_a_comparison_with_intervals(tmp_path):
    path = tmp_path / "comparison.html"
    path.write_text(of_comparison(tmp_path))
    drawn = in_chromium(path)
    num_charts = 4  # average, profile, two tasks
    assert drawn.count("<polyline") == drawn.count("<polygon") == 2 * num_charts


@contextmanager
def served(folder, seconds=5.0):
    with ReportServer(folder, 0, seconds) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_run_is_served_as_it_goes_on(run, monkeypatch):
    (run / "videos").mkdir()
    (run / "videos" / "a.mp4").write_bytes(b"film")
    before = sorted(path.name for path in run.iterdir())
    with served(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = get(server, "/")
        (state,) = re.findall(r'<body data-state="(\w+)" data-seconds="5">', text)
        assert status == 200 and "not in training" in text
        with monkeypatch.context() as patched:  # a page is made once for what the files hold
            patched.setattr("mtrl_lightning.reports.server.read_run", None)
            assert get(server, "/") == (200, text)
        assert json.loads(get(server, "/state")[1]) == {"state": state}
        assert get(server, "/videos/a.mp4") == (200, "film")
        for path in ("/config.yaml", "/../version_0/videos/a.txt", "/%2e%2e/a.mp4", "/none.mp4"):
            assert get(server, path)[0] == 404
        assert get(server, "/", Host="elsewhere.org")[0] == 403
        assert sorted(path.name for path in run.iterdir()) == before
        with (run / "metrics.csv").open("a") as file:
            file.write("400" + "," * 12 + "\n")
        assert json.loads(get(server, "/state")[1]) != {"state": state}
        (run / "metrics.csv").write_text("env_steps,a\nx,1\n")
        status, text = get(server, "/")
        assert status == 503 and "cannot be read" in text


def test_watch_says_where_the_page_is_and_what_is_wrong(run, capsys, monkeypatch):
    def end(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ReportServer, "serve_forever", end)
    main(["watch", str(run.parent), "--port=0"])
    assert re.search(r"version_0: http://127\.0\.0\.1:\d+/ \(Ctrl", capsys.readouterr().out)
    with ReportServer(run, 0, 5.0) as server:
        taken = server.server_address[1]
        for arguments, message in (
            ([str(run), f"--port={taken}"], f"port {taken} cannot be used (is taken by another"),
            ([str(run), "--port=70000"], "port 70000 cannot be used"),
            ([str(run), "--every=0"], "--every is 0"),
            ([str(run.parent / "none")], "there is no folder"),
        ):
            with pytest.raises(SystemExit) as exit_info:
                watch.main(arguments)
            assert exit_info.value.code == 2 and message in capsys.readouterr().err


@pytest.fixture
def callback(run, monkeypatch):
    """The callback of a run that has just begun, with a clock that is set by hand."""
    clock = SimpleNamespace(now=0.0, cost=0.1, written=0)

    def write(folder):
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
    for now in (1.0, 5.0, 19.0, 21.0, 29.0, 31.0):
        callback.clock.now = now
        callback.write_if_affordable()
        written.append(callback.clock.written)
    assert written == [1, 1, 1, 2, 2, 3], "one per cent of the time is one page in ten seconds"
    callback.on_train_end(None, None)
    assert callback.clock.written == 4, "the last one is written in any case"


def test_a_page_that_cannot_be_written_is_said_once(callback, monkeypatch):
    def fail(folder):
        raise RuntimeError("no page")

    monkeypatch.setattr(report, "write_report", fail)
    message = r"report\.html could not be written \(RuntimeError"
    with pytest.warns(UserWarning, match=message) as seen:
        callback.on_train_end(None, None)
        callback.on_train_end(None, None)
    assert len(seen) == 1


def test_a_page_needs_no_state_to_be_a_file():
    assert "<body>" in page("a", [])
