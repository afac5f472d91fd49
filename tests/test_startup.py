"""Which libraries each command imports before it says a word: they are what a user waits for."""

import json
import subprocess
import sys

from tests.helpers.command_line import ROOT

SLOW_TO_IMPORT = {
    "dm_control",
    "gymnasium",
    "imageio",
    "jsonargparse",
    "lightning",
    "matplotlib",
    "metaworld",
    "mujoco",
    "numpy",
    "onnx",
    "pandas",
    "scipy",
    "tensorboard",
    "torch",
    "torchmetrics",
    "torchvision",
    "wandb",
}
QUICK = [
    ["--help"],
    ["--version"],
    ["fti"],
    ["list"],
    ["list", "gradeint"],
    ["clear", "nowhere"],
    ["doctor", "--nothing"],
    ["play", "--nothing"],
    ["collect", "--nothing"],
    ["collect", "--policy=scriptd", "--env=env/toy", "--episodes=1"],
    ["compare", "--nothing"],
    ["export", "--nothing"],
]
"""Commands that answer without any of them."""
OF_LIGHTNING = {"matplotlib", "scipy", "torchmetrics"}
"""What ``import lightning.pytorch`` brings along; the program itself could do without."""
RUN = """
import contextlib, gc, io, json, sys
from mtrl_lightning.__main__ import main
for args in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(printed):
        with contextlib.redirect_stdout(printed):
            main(args)
    packages = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps([printed.getvalue(), sorted(packages)]))
    assert gc.isenabled() and ("torch" in packages) == (gc.get_freeze_count() > 100_000)
"""


def imported(*commands):
    """Run commands one after another in a process; return what each printed and is imported.

    Garbage is searched for as usual after each, but not in the libraries that it has imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(printed, SLOW_TO_IMPORT & set(packages)) for printed, packages in found]


def test_what_trains_nothing_imports_no_large_library():
    for command, (printed, packages) in zip(QUICK, imported(*QUICK), strict=True):
        assert printed and packages == set(), command


def test_fit_and_validate_import_no_simulator_and_no_logger_before_they_answer(tmp_path):
    run = tmp_path / "run" / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    (run / "config.yaml").write_text("extends: quickstart\n")
    help_of_fit, help_of_validate, *misspelled = imported(
        ["fit", "--help"],
        ["validate", "--help"],
        ["fit", "-c", "quickstart", "--rollot.total_steps=5"],
        ["fit", "--resume", str(run), "--rollot.total_steps=5"],
        ["validate", str(run), "--rollot.total_steps=5"],
        ["validate", "mt10", "--rollot.total_steps=5"],
    )
    assert "--resume RUN" in help_of_fit[0] and "--tasks TASK" in help_of_validate[0]
    assert "--rollout.total_steps" in help_of_fit[0]
    for printed, _ in misspelled:
        assert "did you mean rollout.total_steps" in printed
    for _, packages in (help_of_fit, help_of_validate, *misspelled):
        assert packages == {
            "gymnasium",
            "jsonargparse",
            "lightning",
            "numpy",
            "torch",
            *OF_LIGHTNING,
        }
