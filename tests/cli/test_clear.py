import re
import shutil
import subprocess
import sys

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli import clear
from tests.helpers.command_line import CONFIGS, ROOT, CommandLine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder with all that a run writes, and what a crash leaves."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        command_line = CommandLine(tmp_path_factory.mktemp("trained"), monkeypatch)
        configs = (*CONFIGS, "logger/tensorboard")
        command_line("fit", "--rollout.total_steps=600", configs=configs)
        command_line("fit", "--ckpt_path=last", configs=configs)
    folder = command_line.folder()
    remnants = (
        "run.lock",
        "metrics.unfinished",
        "curves.unfinished.png",
        "checkpoints/last.ckpt.unfinished",
    )
    for name in (
        *remnants,
        "validations.jsonl",
        "replay/rows.unfinished",
        "videos/eval.mp4",
        "pictures/reconstruction_0000000600.png",
        "wandb/run-1/files/config.yaml",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)
    (folder / "wandb" / "latest-run").symlink_to("run-1")
    return folder


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "try" / "version_0", symlinks=True)
    return tmp_path / "runs" / "try" / "version_0"


def call(folder, *options):
    clear.main([str(folder), *options])


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")
    }


def files(folder):
    return {
        name
        for name in tree(folder)
        if (folder / name).is_symlink() or not (folder / name).is_dir()
    }


@pytest.mark.slow
def test_without_yes_everything_is_listed_and_nothing_touched(run, capsys):
    before = tree(run)
    call(run)
    printed = capsys.readouterr().out
    assert tree(run) == before
    assert set(re.findall(r"^ +[\d.]+ \w+  (\S+)$", printed, re.MULTILINE)) == files(run)
    assert (
        "100 B  metrics.unfinished" in printed and "kept" not in printed and "add --yes" in printed
    )


def test_sizes_are_added_up_and_names_of_one_file_count_once(run, capsys):
    for path in [p for p in run.rglob("*") if p.is_file() or p.is_symlink()]:
        if path.parent != run / "checkpoints":
            path.unlink()
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"") if path.name.endswith("unfinished") else path.unlink()
    (run / "checkpoints" / "step_000000000900.ckpt").write_bytes(b"x" * 3 * 2**20)
    (run / "checkpoints" / "last.ckpt").hardlink_to(run / "checkpoints" / "step_000000000900.ckpt")
    (run / "checkpoints" / "best.ckpt").write_bytes(b"x" * 512 * 2**10)
    call(run)
    assert "To delete: 4 files, 3.5 MiB" in capsys.readouterr().out


def test_yes_deletes_the_run_and_nothing_beside_it(run, capsys):
    (run.parent / "version_1").mkdir()
    (run.parent / "version_1" / "metrics.csv").write_text("another run's")
    call(run, "--yes")
    assert tree(run.parent).keys() == {"version_1", "version_1/metrics.csv"}
    assert "Deleted: " in capsys.readouterr().out


def test_foreign_files_are_kept_and_listed(run, capsys):
    foreign = {
        "notes.txt",
        "checkpoints/notes.txt",
        "checkpoints/old/a.ckpt",
        "mine/config.yaml",
        "paper.ckpt",
        "x.unfinished/a",
    }
    for name in foreign:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    call(run, "--yes")
    printed = capsys.readouterr().out
    assert files(run) == foreign
    for name in (
        "notes.txt",
        "checkpoints/notes.txt",
        "checkpoints/old",
        "mine",
        "paper.ckpt",
        "x.unfinished",
    ):
        assert re.search(rf"^ +kept  {name} ", printed, re.MULTILINE)
    assert tree(run).keys() - foreign == {"checkpoints", "checkpoints/old", "mine", "x.unfinished"}


@pytest.mark.parametrize("options", [["--yes"], ["--yes", "--replay_only"]])
def test_links_are_never_followed(run, capsys, options):
    outside = run.parent.parent.parent / "outside"
    outside.mkdir()
    for name in ("rows_0.npz", "a.ckpt", "config.yaml", "eval.mp4"):
        (outside / name).write_text("precious")
    before = tree(outside)
    for name in ("replay", "checkpoints"):
        shutil.rmtree(run / name)
        (run / name).symlink_to(outside)
    (run / "videos" / "folder").symlink_to(outside)
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(outside / "config.yaml")
    call(run, *options)
    assert tree(outside) == before
    assert (run / "replay").is_symlink() and (run / "checkpoints").is_symlink()
    assert re.search("kept  replay ", capsys.readouterr().out)
    if "--replay_only" not in options:
        assert files(run) == {"replay", "checkpoints"}


def test_the_folder_may_be_named_by_a_link(run):
    link = run.parent / "newest"
    link.symlink_to(run)
    call(link, "--yes")
    assert not run.exists() and link.is_symlink()


def test_replay_only_keeps_all_else_and_the_checkpoint_is_still_evaluated(
    run, command_line, capsys
):
    before, replay = tree(run), {name for name in files(run) if name.startswith("replay/")}
    call(run, "--replay_only")
    printed = capsys.readouterr().out
    assert tree(run) == before and len(replay) >= 3
    assert {line.split()[-1] for line in printed.splitlines() if line.startswith(" ")} == replay
    assert "--replay.restore false" in printed
    call(run, "--replay_only", "--yes")
    assert "--replay.restore false" in capsys.readouterr().out
    assert tree(run).keys() == before.keys() - replay - {"replay", "run.lock"}
    command_line("validate", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    assert "eval after 900 env steps" in capsys.readouterr().out


def test_clearing_twice_is_no_error_for_the_replay(run, capsys):
    call(run, "--replay_only", "--yes")
    capsys.readouterr()
    call(run, "--replay_only", "--yes")
    assert "Deleted: 0 files, 0 B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "is not the folder of a run"),
        ("empty", "is not the folder of a run"),
        ("runs", "contains runs but is not the folder of one run"),
        ("runs/try", "contains runs but is not the folder of one run"),
        ("runs/try/version_0/metrics.csv", "is not the folder of a run"),
        ("runs/try/version_0/replay", "is not the folder of a run"),
    ],
)
def test_what_is_no_run_is_refused(run, tmp_path, capsys, path, message):
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        call(tmp_path / path, "--yes")
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and message in error and "give one" in error
    assert tree(tmp_path) == before


def test_what_cannot_be_deleted_is_named(run, capsys, monkeypatch):
    def fails(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", fails)
    with pytest.raises(SystemExit) as exit_info:
        call(run, "--yes")
    assert exit_info.value.code == 2
    assert "Permission denied" in capsys.readouterr().err


def test_both_commands_reach_it_and_without_pytorch(run, capsys, monkeypatch):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['cli.py', 'clear', {str(run)!r}]\n"
        f"runpy.run_path({str(ROOT / 'cli.py')!r}, run_name='__main__')\n"
        "print([name for name in ('torch', 'lightning', 'jsonargparse') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]" and "add --yes" in done.stdout
    main(["clear", "--run", str(run)])  # the former form
    printed = capsys.readouterr()
    assert "add --yes" in printed.out and f"former form: clear {run}" in printed.err
    monkeypatch.setattr(sys, "argv", ["mtrl-lightning", "clear", str(run), "--yes"])
    main()
    assert not run.exists()


@pytest.mark.parametrize("runs", [[], ["a", "--run=b"]])
def test_it_takes_one_run(runs, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["clear", *runs])
    assert exit_info.value.code == 2
    assert "give one run: clear runs/NAME/version_0" in capsys.readouterr().err


def test_its_help(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["clear", "--help"])
    printed = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert all(word in printed for word in ("RUN", "--replay_only", "--yes"))


def test_a_project_that_has_a_config_and_videos_is_no_run(tmp_path, capsys):
    (tmp_path / "project" / "videos").mkdir(parents=True)
    (tmp_path / "project" / "config.yaml").touch()
    (tmp_path / "project" / "videos" / "holiday.mp4").touch()
    with pytest.raises(SystemExit) as exit_info:
        main(["clear", str(tmp_path / "project"), "--yes"])
    assert exit_info.value.code == 2 and "is not the folder of a run" in capsys.readouterr().err
    assert (tmp_path / "project" / "videos" / "holiday.mp4").exists()
