"""Which libraries each command imports before it says a word: they are what a user waits for."""

import json
import subprocess
import sys

from tests.helpers.command_line import ROOT

SLOW_TO_IMPORT = {
    *("gymnasium", "jsonargparse", "lightning", "matplotlib", "metaworld", "mujoco", "numpy"),
    *("pandas", "scipy", "torch", "wandb"),
}
QUICK = [
    ["--help"],
    ["--version"],
    ["list"],
    ["clear", "nowhere"],
    ["doctor", "--nothing"],
    ["play", "--nothing"],
    ["collect", "--nothing"],
    ["collect", "--policy=mt11", "--env=env/toy", "--episodes=1"],
    ["compare", "--nothing"],
    ["export", "--nothing"],
]
"""Commands that answer without any of them."""
RUN = """
import contextlib, io, json, sys
from mtrl_lightning.__main__ import main
for args in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(printed):
        with contextlib.redirect_stdout(printed):
            main(args)
    packages = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps([printed.getvalue(), sorted(packages)]))
"""


def test_what_trains_nothing_imports_no_large_library():
    line = [sys.executable, "-c", RUN, json.dumps(QUICK)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True)
    for command, answer in zip(QUICK, done.stdout.splitlines(), strict=True):
        printed, packages = json.loads(answer)
        assert printed and not SLOW_TO_IMPORT & set(packages), command


def test_a_closed_pipe_ends_the_program_quietly():
    line = f"{sys.executable} -m mtrl_lightning list | head -n 1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
