"""What ``clear`` lists, asks and deletes."""

import io
import re
import shutil
import subprocess
import sys

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.runs import run_lock
from tests.helpers.command_line import ROOT
from tests.helpers.report_folders import make_run, options_of


@pytest.fixture
def run(tmp_path):
    """A run's folder with all kinds of files, as a run and a crash leave it."""
    folder = tmp_path / "runs" / "try" / "version_0"
    make_run(folder, {"reach": (0.0, 0.5, 1.0)}, options=options_of(1))
    for name in ("curves.unfinished.png", "checkpoints/step_1.ckpt", "replay/a", "wandb/run/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 2**20)
    (folder / "checkpoints" / "last.ckpt").hardlink_to(folder / "checkpoints" / "step_1.ckpt")
    (folder / "wandb" / "latest-run").symlink_to("run")
    return folder


def call(*args):
    main(["clear", *map(str, args)])


def answer(monkeypatch, text, is_terminal=True):
    stdin = io.StringIO(text)
    stdin.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("text", "is_terminal"), [("\n", True), ("no\n", True), ("", True), ("y\n", False)]
)
def test_without_a_yes_everything_is_listed_and_nothing_touched(
    run, capsys, monkeypatch, text, is_terminal
):
    answer(monkeypatch, text, is_terminal)
    before = tree(run)
    call(run)
    printed = capsys.readouterr().out
    assert tree(run) == before
    listed = re.findall(r"^ +([\d.]+) MiB  (\S+)$", printed, re.MULTILINE)
    assert {name: size for size, name in listed} == {
        "checkpoints/": "1.0",  # names of one file count once
        "config.yaml": "0.0",
        "curves.unfinished.png": "1.0",
        "hparams.yaml": "0.0",
        "metrics.csv": "0.0",
        "replay/": "1.0",
        "wandb/": "1.0",
    }
    assert "Delete this? [y/N]" in printed and "Nothing was deleted" in printed


@pytest.mark.parametrize("options", [[], ["--yes"]])
def test_yes_deletes_the_runs_and_nothing_beside_them(run, capsys, monkeypatch, options):
    answer(monkeypatch, "y\n")
    shutil.copytree(run, run.parent / "version_1", symlinks=True)
    (run.parent / "version_2").mkdir()
    (run.parent / "version_2" / "metrics.csv").write_text("another run's")
    call(run, run.parent / "version_1", *options)
    assert tree(run.parent).keys() == {"version_2", "version_2/metrics.csv"}
    printed = capsys.readouterr().out
    assert printed.count("Deleted: ") == 2 and ("Delete this?" in printed) == (not options)


@pytest.mark.parametrize("options", [["--yes"], ["--yes", "--replay_only"]])
def test_links_are_never_followed(run, options):
    outside = run.parents[2] / "outside"
    outside.mkdir()
    for name in ("a.ckpt", "config.yaml"):
        (outside / name).write_text("precious")
    before = tree(outside)
    for name in ("checkpoints", "videos", "replay/folder"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).symlink_to(outside)
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(outside / "config.yaml")
    call(run, *options)
    assert tree(outside) == before
    assert run.exists() == ("--replay_only" in options) and not (run / "replay").exists()


def test_a_replay_that_is_a_link_is_kept(run, capsys):
    shutil.move(run / "replay", run.parents[2] / "elsewhere")
    (run / "replay").symlink_to(run.parents[2] / "elsewhere")
    with pytest.raises(SystemExit) as exit_info:
        call(run, "--yes", "--replay_only")
    assert exit_info.value.code == 2 and "symbolic link" in capsys.readouterr().err
    assert (run / "replay" / "a").exists()


def test_the_folder_may_be_named_by_a_link(run):
    link = run.parent / "newest"
    link.symlink_to(run)
    call(link, "--yes")
    assert not run.exists() and link.is_symlink()


def test_replay_only_keeps_all_else_and_the_checkpoint_is_still_evaluated(command_line, capsys):
    command_line.finished()
    run = command_line.folder()
    before = tree(run)
    replay = {name for name in before if name.startswith("replay")}
    capsys.readouterr()
    for listed in (["replay/"], []):  # doing it twice is no error
        call(run, "--replay_only", "--yes")
        printed = capsys.readouterr().out
        assert re.findall(r"MiB  (.*)", printed) == listed and "--replay.restore false" in printed
    assert tree(run).keys() == before.keys() - replay and len(replay) >= 3
    command_line("validate", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    assert "eval after 900 env steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [
        "nowhere",
        "empty",
        "runs",
        "runs/try",
        "runs/try/version_0/metrics.csv",
        "runs/try/version_0/replay",
        "project",
    ],
)
def test_what_is_no_run_is_refused_before_anything_is_deleted(run, tmp_path, capsys, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "project" / "videos").mkdir(parents=True)
    (tmp_path / "project" / "config.yaml").touch()
    (tmp_path / "project" / "videos" / "holiday.mp4").touch()
    before = tree(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        call(run, tmp_path / path, "--yes")
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and "is not the folder of a run" in error
    assert "give one" in error and tree(tmp_path) == before


def test_a_run_in_training_is_refused(run, capsys):
    before = tree(run).keys()
    with run_lock(run), pytest.raises(SystemExit) as exit_info:
        call(run, "--yes")
    assert exit_info.value.code == 2 and "is training in" in capsys.readouterr().err
    assert tree(run).keys() == before


def test_what_cannot_be_deleted_is_named(run, capsys, monkeypatch):
    def fails(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", fails)
    with pytest.raises(SystemExit) as exit_info:
        call(run, "--yes")
    assert exit_info.value.code == 2
    assert "Permission denied" in capsys.readouterr().err


def test_both_commands_reach_it_and_without_pytorch(run, monkeypatch):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['cli.py', 'clear', {str(run)!r}]\n"
        f"runpy.run_path({str(ROOT / 'cli.py')!r}, run_name='__main__')\n"
        "print([name for name in ('torch', 'lightning', 'jsonargparse') if name in sys.modules])"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]" and "add --yes" in done.stdout, done.stderr
    monkeypatch.setattr(sys, "argv", ["mtrl-lightning", "clear", str(run), "--yes"])
    main()
    assert not run.exists()
