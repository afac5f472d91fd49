"""What ``clear`` lists, asks and deletes."""

import contextlib
import io
import shutil
import sys

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.runs import run_lock


@pytest.fixture
def run(tmp_path):
    """A run's folder, with a link to a file outside."""
    folder = tmp_path / "runs" / "try" / "version_0"
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/last.ckpt", "replay/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    (folder / "videos").symlink_to(tmp_path / "outside")
    return folder


def answer(monkeypatch, text, is_terminal=True):
    stdin = io.StringIO(text)
    stdin.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def tree(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize(("text", "is_terminal"), [("\n", True), ("no\n", True), ("y\n", False)])
def test_nothing_is_deleted_without_a_yes(run, capsys, monkeypatch, text, is_terminal):
    answer(monkeypatch, text, is_terminal)
    before = tree(run)
    main(["clear", str(run)])
    printed = capsys.readouterr().out
    assert tree(run) == before
    assert f"{run}: checkpoints, config.yaml, metrics.jsonl, replay, videos" in printed


@pytest.mark.parametrize("options", [[], ["--yes"]])
def test_yes_deletes_the_runs_only_and_follows_no_link(run, monkeypatch, options):
    answer(monkeypatch, "y\n")
    shutil.copytree(run, run.parent / "version_1", symlinks=True)
    shutil.copytree(run, run.parent / "version_2", symlinks=True)
    main(["clear", str(run), str(run.parent / "version_1"), *options])
    assert [path.name for path in run.parent.iterdir()] == ["version_2"]
    assert (run.parents[2] / "outside" / "precious").exists()


@pytest.mark.parametrize("path", ["nowhere", "runs", "runs/try/version_0/replay", "in training"])
def test_folder_that_is_no_idle_run_is_refused_before_a_deletion(run, tmp_path, path):
    with contextlib.ExitStack() as stack:
        if path == "in training":
            stack.enter_context(run_lock(run))
            path = run
        before = tree(tmp_path)
        with pytest.raises(SystemExit, match="2"):
            main(["clear", str(run), str(tmp_path / path), "--yes"])
    assert tree(tmp_path) == before
