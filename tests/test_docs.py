"""The pages build without a warning, and hold what they promise."""

import importlib
import inspect
import re
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest

import mtrl_lightning
from mtrl_lightning.callbacks import ReplayCallback, RolloutCallback
from tests.helpers.command_line import ROOT

pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install -e '.[docs]'")

DOCS = ROOT / "docs"
BUILD = """
import gc, sys
from sphinx.cmd.build import main
gc.disable()
sys.exit(main(sys.argv[1:]))
"""
"""``python -m sphinx`` without a search for garbage, which takes a third of its time."""
PACKAGES = ("algorithms", "networks", "gradients", "auxiliaries", "envs", "rollout", "replay")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the pages as the README says, in a process of its own: autodoc changes signatures."""
    folder = tmp_path_factory.mktemp("docs")
    options = ["-q", "-n", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    line = [sys.executable, "-c", BUILD, *options, str(DOCS), str(folder / "site")]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def documented(site):
    """Return every name that the API reference describes."""
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(content).decode().splitlines()}


@pytest.fixture
def from_code(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module("from_code")


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(documented):
    homes = {
        f"mtrl_lightning.{mtrl_lightning._HOMES[name]}.{name}" for name in mtrl_lightning.__all__
    }
    public = {
        f"mtrl_lightning.{package}.{name}"
        for package in (*PACKAGES, "callbacks")
        for name in importlib.import_module(f"mtrl_lightning.{package}").__all__
    }
    assert len(public) > 80
    assert (homes | public) - documented == set()


@pytest.mark.slow
def test_no_page_shows_markup_or_needs_a_network(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    wrong = []
    for page in pages:
        html = page.read_text()
        loaded = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(https?://[^\"]*)", html)
        # code may show what it likes
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
        shown = re.sub(r"<[^>]*>", "", text)
        # "Type:" is what napoleon makes of a colon in an attribute's description
        markup = re.findall(r"``|\{py:|\{eval-rst|^\s*\||\]\(\S|^Type:", shown, re.MULTILINE)
        if loaded or markup:
            wrong.append((page.name, loaded, markup))
    assert wrong == []


@pytest.mark.slow
def test_the_hyper_parameters_show_the_defaults_of_the_code(site):
    html = (site / "hyperparameters.html").read_text()
    text = re.sub(r"<[^>]*>", "", html)
    for line in (
        "rollout.total_steps = 1_000_000",
        "replay.chunk_mebibytes = 32.0",
        "checkpoint.keep_best = true",
        "evaluation.num_workers = null",
        "actor_optimizer = Adam(lr=3e-4, eps=1e-5, fused=True)",
        "critic_gradient = Mean",
    ):
        assert line in text, line


def test_the_way_of_a_transition_names_the_file_that_adds_it_to_the_replay():
    rows = [line.split("|") for line in (DOCS / "concepts.md").read_text().splitlines()]
    (file,) = [row[2].strip(" `") for row in rows if len(row) > 3 and "to the replay" in row[3]]
    assert ".add(transitions)" in (ROOT / "mtrl_lightning" / file).read_text()


@pytest.mark.slow
def test_every_page_is_reached_from_the_first(site):
    listed = set(
        re.findall(r"reference internal\" href=\"([\w/]+\.html)", (site / "index.html").read_text())
    )
    written = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.glob("*.md")}
    assert written - listed == {"index.html"}


def directive(content, path="mtrl_lightning.callbacks.ReplayCallback"):
    return SimpleNamespace(
        arguments=[path],
        options={"prefix": "replay."},
        content=content,
        error=ValueError,
        parse_text_to_nodes=lambda text: [text],
    )


WHEN = [
    "save: now",
    "save_last: then",
    "chunk_mebibytes: seldom",
    "restore: never",
    "delete_at_end: no",
]


def test_options_joins_code_and_page(from_code):
    (text,) = from_code.Options.run(directive(WHEN))
    assert "`replay.save_last` = `null`\n: Transitions saved, the newest, over all" in text
    assert "  *When to change it:* Then.\n" in text


def test_an_option_without_a_line_stands_alone(from_code):
    (text,) = from_code.Options.run(directive(WHEN[2:]))
    assert "`replay.save_last` = `null`\n: Transitions saved, the newest, over all" in text
    assert text.count("*When to change it:*") == len(WHEN) - 2


def test_a_line_without_an_option_is_an_error(from_code):
    with pytest.raises(ValueError, match=r"without an option: sav$"):
        from_code.Options.run(directive([*WHEN, "sav: x"]))


def test_descriptions_go_over_several_lines(from_code):
    described = from_code.described_arguments(inspect.cleandoc(RolloutCallback.__doc__))
    assert next(iter(described)) == "total_steps" and "seed" in described
    assert described["timeout"] == "seconds to wait for a worker before it counts as hung."
    assert described["warmup_steps"].endswith("first update; null for 10,000.")
    assert from_code.default_texts(ReplayCallback)["save"] == "true"
