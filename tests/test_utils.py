"""Checks of ranges, the stopwatch, and free memory."""

import math
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from mtrl_lightning.checks import above, at_least, increasing, nearest_multiples, one_of, within
from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.utils import devices
from mtrl_lightning.utils.counters import Stopwatch


def test_allowed_numbers_and_none_pass():
    """``test_registry.py`` has those that are refused."""
    at_least(1, num_critics=1, depth=np.int64(3), num_sampled=None)
    above(0, tau=1e-9, max_grad_norm=math.inf, lr=None)
    within(0, 1, discount=0, decay=np.float32(1), encoder_tau=None)
    within(0, 1, above_low=True, below_high=True, rate=0.5)
    increasing(low=-20, high=2)
    one_of(("stop", "skip"), on_nonfinite="skip")


def test_nearest_multiples_are_above_zero():
    expected = {191: "189 or 192", 2: "3", -5: "3", 4: "3 or 6"}
    assert {number: nearest_multiples(number, 3) for number in expected} == expected


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import another")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"mtrl_lightning\[video\]"):
        import_optional("nowhere.nothing", "video")
    with pytest.raises(ModuleNotFoundError, match="another"):
        import_optional("needs_another", "video")


def test_stopwatch_adds_up_what_has_the_same_name(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stopwatch = Stopwatch()
    for seconds in (1.0, 2.5):
        with stopwatch.measure("act"):
            now[0] += seconds
        now[0] += 10
    with pytest.raises(RuntimeError), stopwatch.measure("act"):
        now[0] += 1.0
        raise RuntimeError
    stopwatch.start("step")
    now[0] += 1.0
    with stopwatch.measure("update"):  # while it steps
        now[0] += 2.0
    # a running measurement counts at its end
    assert stopwatch.drain() == {"act": 4.5, "update": 2.0}
    now[0] += 1.0
    stopwatch.stop("step")
    assert stopwatch.drain() == {"step": 4.0}


def test_free_memory_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (5, 9)}[str(device)])
    assert devices.free_memory(torch.device("cuda:1")) == 5
    assert devices.free_memory() == 7


def test_files_that_a_container_holds_in_memory_are_free(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for name, text in (("max", "max"), ("current", "900"), ("stat", "anon 300\ninactive_file 600")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert devices.free_memory() == 1000, "there is no limit"
    (tmp_path / "memory.max").write_text("950\n")
    assert devices.free_memory() == 950 - (900 - 600)
    (tmp_path / "memory.stat").unlink()
    assert devices.free_memory() == 50
    (tmp_path / "memory.max").write_text("800\n")
    assert devices.free_memory() == 0
