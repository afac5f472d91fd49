"""Bars on a terminal, and what a run says at its start and its end."""

import os
import re
import struct
import sys

import pytest

from mtrl_lightning.utils.progress import polled_progress_bar, progress_bar
from tests.helpers.command_line import ROOT


def on_a_terminal(command, cwd):
    """Run a command whose output is a terminal of 100 columns; return what it wrote."""
    import fcntl
    import pty
    import termios

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    written = b""
    try:
        while data := os.read(terminal, 1 << 16):
            written += data
    except OSError:  # it has ended
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, written.decode()
    return written.decode()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_building_and_evaluating_are_shown_on_a_terminal(command_line):
    options = [
        "--evaluation.num_episodes=20",
        "--trainer.enable_progress_bar=true",
        "--evaluation.every=1000",
        "--data.total_steps=303",
    ]
    arguments = command_line.arguments("fit", *options)
    text = on_a_terminal([sys.executable, str(ROOT / "cli.py"), *arguments], command_line.root)
    assert re.search(r"building environments: .* \d/3 ", text)
    assert re.search(r"evaluating \(eval\): .* \d+/400 ", text), "20 episodes of 20 steps"
    run = command_line.folder().relative_to(command_line.root)
    assert text.index(f"The run's folder is {run}") < text.index("building environments")


def test_in_a_file_there_are_no_bars_and_no_thread(capsys):
    with progress_bar("working", 10) as bar:
        bar.update(3)
    with polled_progress_bar("waiting", 10, lambda: 3):
        pass
    with polled_progress_bar("waiting", 10, lambda: 1 // 0, is_wanted=False):
        pass
    assert capsys.readouterr().err == ""
