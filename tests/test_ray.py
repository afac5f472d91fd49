"""Ray Train starts the workers of a run again, which continue it; see ``examples/cluster``."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.fitting import rows_of
from tests.helpers.runs import wait_for

EXAMPLE = Path(__file__).parents[1] / "examples" / "cluster" / "ray_train.py"


@pytest.mark.slow
def test_run_continues_after_one_of_two_workers_is_killed(tmp_path):
    pytest.importorskip("ray.train", reason="Ray is not installed: pip install -e '.[ray]'")
    driver = subprocess.Popen([sys.executable, EXAMPLE, tmp_path])

    def workers():
        started = psutil.Process(driver.pid).children(recursive=True)
        return [process for process in started if "RayTrainWorker" in "".join(process.cmdline())]

    wait_for(
        lambda: driver.poll() is not None or any(tmp_path.glob("run/*/checkpoints/last.ckpt")), 240
    )
    first, second = workers()
    second.kill()
    assert driver.wait(240) == 0
    assert not first.is_running()
    (folder,) = (tmp_path / "run").iterdir()
    steps = [row["env_steps"] for row in rows_of(folder) if "rollout/success" in row]
    assert steps == [*range(300, 1201, 300)]
