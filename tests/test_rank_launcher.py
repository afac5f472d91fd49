"""The processes that a run starts on its machine end with it, whichever of them is lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mtrl_lightning.errors import ConfigurationError, Interrupted, RankLostError
from mtrl_lightning.launch import folder as run_folder
from mtrl_lightning.launch.folder import LOCATION_VARIABLE, locate_run
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks import launcher as rank_launcher
from mtrl_lightning.ranks.launcher import RankLauncher
from mtrl_lightning.ranks.strategy import RanksStrategy, connecting, is_first_start, unused_part
from tests.helpers.command_line import ROOT
from tests.helpers.ranks.launch import Environment, free_port

pytestmark = pytest.mark.slow

LIMIT = 300
"""Seconds that processes may take to start on busy cores."""
SOON = 30
"""Seconds in which they have ended; without a watch they take 100 to 600."""


@pytest.fixture
def launcher(monkeypatch):
    """Return a launcher whose other process runs the command that a test gives."""
    made = RankLauncher(Environment(creates_processes_externally=False), 2, 1)

    def start(command):
        monkeypatch.setattr(
            made, "_call_children_scripts", lambda: made.procs.append(subprocess.Popen(command))
        )
        return made

    yield start
    for process in made.procs:
        process.kill()
        process.wait()


class Killed(list):
    """The processes that would have been killed, and the exit code of this one."""

    def __init__(self):
        self._event = threading.Event()

    def kill(self, pid, number):
        assert number == signal.SIGKILL
        self.append(pid)
        self._event.set()

    def end(self, code):
        self.append(f"exit code {code}")
        self._event.set()

    def wait(self):
        assert self._event.wait(20)


@pytest.fixture
def killed(monkeypatch):
    found = Killed()
    monkeypatch.setattr(os, "kill", found.kill)
    monkeypatch.setattr(os, "_exit", found.end)
    return found


def fail():
    raise RankLostError("rank 1 has not answered", ranks=[1], is_silent=True)


def test_a_process_that_hangs_is_killed_when_the_run_has_given_it_up(launcher, monkeypatch):
    monkeypatch.setattr(rank_launcher, "END_SECONDS", 0.1)
    made = launcher(["sleep", "100"])
    with pytest.raises(RankLostError):
        made.launch(fail)
    assert made.procs[0].wait(10) == -signal.SIGKILL


def test_a_process_that_ends_by_itself_is_not_killed(launcher):
    made = launcher([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"])
    with pytest.raises(RankLostError):
        made.launch(fail)
    assert made.procs[0].returncode == 0


@pytest.mark.parametrize(("ranks", "is_silent"), [([0], True), ([0], False), ([2], True)])
def test_the_first_process_is_killed_only_if_it_does_not_answer(
    monkeypatch, killed, ranks, is_silent
):
    monkeypatch.setenv(rank_launcher.PARENT_VARIABLE, str(os.getppid()))
    made = RankLauncher(Environment(creates_processes_externally=True), 2, 1)

    def fail():
        raise RankLostError("lost", ranks=ranks, is_silent=is_silent)

    with pytest.raises(RankLostError):
        made.launch(fail)
    wanted = [os.getppid()] if (ranks, is_silent) == ([0], True) else []
    assert killed == wanted


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    threads = []
    monkeypatch.setattr(rank_launcher, "usable_cores", lambda: 7)
    monkeypatch.setattr(rank_launcher.torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = RankLauncher(Environment(creates_processes_externally=True), 2, 1)
    assert made.launch(lambda: "result") == "result"
    assert threads == [], "the user's number is kept"
    monkeypatch.delenv("OMP_NUM_THREADS")
    made.launch(lambda: None)
    assert threads == [3] and os.environ["OMP_NUM_THREADS"] == "3"


def test_a_process_that_another_launcher_has_started_kills_nothing(monkeypatch, killed):
    """As one that a shell script, ``torchrun`` or SLURM has started."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = RankLauncher(Environment(creates_processes_externally=True), 2, 1)

    def fail():
        raise RankLostError("lost", ranks=[0], is_silent=True)

    with pytest.raises(RankLostError):
        made.launch(fail)
    assert killed == []


@pytest.mark.parametrize(
    ("command", "ending"), [("exit 3", "exit code 3"), ("kill -TERM $$", "SIGTERM")]
)
def test_the_first_process_names_one_that_has_ended_and_does_not_wait_for_it(
    launcher, monkeypatch, killed, command, ending
):
    monkeypatch.setattr(rank_launcher, "GRACE", 0.0)
    made = launcher(["sh", "-c", command])
    # what the first process does takes longer than the other one lives
    with pytest.warns(UserWarning, match=f"{ending}"):
        made.launch(killed.wait)
    assert killed == ["exit code 1"]


@pytest.mark.parametrize("is_noticed", [False, True])
def test_the_first_process_that_is_done_is_not_killed(launcher, monkeypatch, killed, is_noticed):
    """As when it finishes a run of W&B, and the others have ended with the code of a signal."""
    noticed = threading.Event()
    monkeypatch.setattr(rank_launcher, "rank_zero_warn", lambda text: noticed.set())
    monkeypatch.setattr(rank_launcher, "GRACE", 0.2)
    made = launcher(["sh", "-c", "exit 143"])
    made.launch(lambda: noticed.wait(20) if is_noticed else None)
    watchers = [thread for thread in threading.enumerate() if thread.name == "rank-watcher"]
    for watcher in watchers:
        watcher.join(20)
    assert killed == []
    assert noticed.is_set() == is_noticed


def test_a_machine_that_does_not_see_the_runs_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(run_folder, "FOLDER_TIMEOUT", 0.0)
    paths = f'{{"folder": "{tmp_path}", "checkpoint": null, "file": "{tmp_path}/.seen"}}'
    monkeypatch.setenv(LOCATION_VARIABLE, paths)
    with pytest.raises(ConfigurationError, match="system"):
        locate_run(str(tmp_path), "run", num_processes=2)
    (tmp_path / ".seen").touch()
    monkeypatch.setenv(LOCATION_VARIABLE, paths)
    assert locate_run(str(tmp_path), "run", num_processes=2).folder == tmp_path


def test_a_process_starts_from_the_policy_that_its_parent_has_found(tmp_path, monkeypatch):
    checkpoints = tmp_path / "source" / "checkpoints"
    checkpoints.mkdir(parents=True)
    best = checkpoints / "best.ckpt"
    for name in ("first", "second"):
        (checkpoints / f"{name}.ckpt").touch()
    best.symlink_to("first.ckpt")
    location = locate_run(str(tmp_path), "run", num_processes=2)
    with location.hold():
        location.set_policy(tmp_path / "source")
        assert location.policy == (checkpoints / "first.ckpt").resolve()
        # the other process reads it later, when the run of the policy has a better one
        best.unlink()
        best.symlink_to("second.ckpt")
        monkeypatch.setenv("LOCAL_RANK", "1")
        received = locate_run(str(tmp_path), "run", num_processes=2)
        received.set_policy(tmp_path / "source")
        assert received.policy == location.policy


def test_processes_that_are_started_again_do_not_read_what_the_former_ones_wrote():
    store = dist.HashStore()
    for start in ("first", "second"):
        parts = {}

        def meet(rank, parts=parts):
            parts[rank] = unused_part(store, rank, 3, timedelta(seconds=20))

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not parts[0].check(["address"]), "of the former processes"
        parts[1].set("address", start)
        assert parts[0].get("address") == parts[2].get("address") == start.encode()
        assert is_first_start(store) == (start == "first")


def test_a_process_that_does_not_come_is_named():
    message = r"rank 1 has not come in 0 s.*has not started"
    with pytest.raises(RankLostError, match=message), connecting():
        unused_part(dist.HashStore(), 0, 2, timedelta(0))


@pytest.mark.parametrize(
    ("exception", "said"),
    [
        (TypeError("a bug\nof mine"), ["TypeError: a bug"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt: "]),
        (Interrupted(143), []),
    ],
)
def test_a_process_that_ends_alone_says_so_to_the_others(monkeypatch, exception, said):
    reasons = []
    monkeypatch.setattr(distributed, "leave", reasons.append)
    RanksStrategy().on_exception(exception)
    assert reasons == said


def test_a_run_is_started_again_if_the_launcher_counts_it_anywhere(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    restart_id = {"job": "tuesday", "command": "fit"}
    assert not run_folder._is_restarted(restart_id)
    monkeypatch.setattr(distributed, "_is_restart", True)
    assert run_folder._is_restarted(restart_id)


# ---- with processes ----

BUSY = """
import sys, time
from mtrl_lightning.ranks import launcher as rank_launcher
from tests.helpers.ranks.launch import Environment
import subprocess
rank_launcher.GRACE = 0.5
launcher = rank_launcher.RankLauncher(Environment(creates_processes_externally=False), 2, 1)
command = ["sh", "-c", "exit 3"]
launcher._call_children_scripts = lambda: launcher.procs.append(subprocess.Popen(command))
launcher.launch(lambda: time.sleep(100))
"""
FIRST = """
import os, subprocess, sys, time
command = [sys.executable, "-c", sys.argv[1]]
subprocess.Popen(command, env={**os.environ, sys.argv[2]: str(os.getpid())})
time.sleep(100)
"""
CONNECTING = """
import os, threading, time
import torch.distributed as dist
from mtrl_lightning.ranks.launcher import end_with_first_process
end_with_first_process()
threading.Timer(1.0, lambda: print("waits", flush=True)).start()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d", rank=1, world_size=2)
"""


def start(*arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_first_process_that_is_busy_ends_with_the_code_of_a_fault():
    process = start(BUSY)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "error: rank 0 was busy for 0.5 s after rank 1 had ended" in output


def test_a_process_that_waits_for_the_first_one_ends_with_it():
    first = start(FIRST, CONNECTING % free_port(), rank_launcher.PARENT_VARIABLE, LOCAL_RANK="1")
    assert first.stdout.readline() == "waits\n"
    first.kill()
    killed_at = time.monotonic()
    output, _ = first.communicate(timeout=LIMIT)  # the other one has the same pipe
    assert time.monotonic() - killed_at < SOON
    said = f"error: rank 0 (process {first.pid}) has ended before rank 1 was connected to it"
    assert said in output


def test_the_others_end_when_the_first_process_is_killed_while_they_start(command_line, tmp_path):
    started = tmp_path / "started"
    options = ["--data.benchmark=tests.helpers.ranks.slow.SlowToStart", "--trainer.devices=2"]
    options += [f"--data.benchmark.init_args.file={started}", "--rollout.envs_per_task=2"]
    process = command_line.process("fit", *options)
    give_up_at = time.monotonic() + LIMIT
    while not started.exists():
        assert process.poll() is None and time.monotonic() < give_up_at, process.communicate()
        time.sleep(0.1)
    process.kill()
    killed_at = time.monotonic()
    output, _ = process.communicate(timeout=LIMIT)
    assert time.monotonic() - killed_at < SOON
    assert f"rank 0 (process {process.pid}) has ended before rank 1 was connected" in output


# ---- a lost process is known by what happens, and not by the words of an exception ----


@pytest.mark.parametrize(
    ("message", "seconds", "others_say", "said"),
    [
        ("Timed out waiting 500ms for recv", 0.3, None, "has not answered rank 0 for 0.3 s"),
        ("no such words", 0.3, None, "has not answered rank 0 for 0.3 s"),
        ("the peer's address timed out", 0.0, None, "rank 1 has ended: rank 0 lost"),
        ("Connection closed by peer", 0.0, None, "rank 1 has ended: rank 0 lost"),
        ("Connection closed by peer", 0.0, distributed.BROKEN, "rank 1 has ended: rank 0 lost"),
        ("Connection closed", 0.0, distributed.UNANSWERED, "rank 1 has not answered rank 0"),
    ],
)
def test_a_process_hangs_if_it_has_not_answered_in_time(
    monkeypatch, message, seconds, others_say, said
):
    """The third of three processes may have waited before this one."""
    store = dist.HashStore()
    if others_say is not None:
        store.set(f"{distributed.NOTE}/2", others_say)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(distributed, "_disconnect", lambda reason: None)
    monkeypatch.setattr(distributed, "world_size", lambda: 2 if others_say is None else 3)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    monkeypatch.setattr(distributed, "_limit", 0.3)
    monkeypatch.setattr(distributed, "NOTICE_SECONDS", 0.2)

    def fail():
        time.sleep(seconds)
        raise RuntimeError(message)

    with pytest.raises(RankLostError, match=said) as caught, distributed._exchange():
        fail()
    assert caught.value.ranks == (1,)
    assert caught.value.is_silent == ("not answered" in said)
