"""A run that learns nothing and takes no time: it writes ``metrics.csv`` as a real one does.

Its return rises with every step by what ``--gain`` says, and by a little more for a later seed.
"""

import argparse
import signal
import sys
import time

from mtrl_lightning.runs import new_run_folder, versions
from mtrl_lightning.sweeps.child import end_with_parent

HEADER = "env_steps,eval/return,eval/return/a,eval/return/b,rollout/length\n"


def main():
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("root", str),
        ("name", str),
        ("gain", float),
        ("steps", int),
        ("seconds", float),
        ("seed_everything", int),
    ):
        parser.add_argument(f"--{name}", type=kind, default=kind())
    parser.add_argument("--ckpt_path")
    parser.add_argument("--fail", default="no")
    options, _ = parser.parse_known_args(sys.argv[2:])
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.fail == "yes":
        print("error: these two do not fit", flush=True)
        sys.exit(2)
    if options.ckpt_path:
        folder = versions(options.root, options.name)[-1]
    else:
        folder = new_run_folder(options.root, options.name)
        (folder / "metrics.csv").write_text(HEADER)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.ckpt").touch()
    made = (folder / "metrics.csv").read_text().count("\n")
    for step in range(made, options.steps + 1):
        time.sleep(options.seconds)
        value = step * options.gain + 0.01 * options.seed_everything
        with (folder / "metrics.csv").open("a") as file:
            file.write(f"{step * 100},{value},{value - 1},{value + 1},\n")


if __name__ == "__main__":
    main()
