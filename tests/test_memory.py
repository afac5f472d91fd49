"""What the process may take of the memory, and what it keeps."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from mtrl_lightning import memory

FAULTS = """
import resource, sys, torch
from mtrl_lightning.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.set_num_threads(1)
x = torch.ones(8_000_000)
def update():  # layers' activations: allocated one after another, all freed at the end
    kept = [x[:n] + 1 for n in (8_000_000, 100_000, 4_000_000, 2_000_000, 6_000_000)]
for _ in range(5):
    update()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    update()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_kept_memory_is_used_again_without_page_faults():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "give back")
    }
    assert faults["give back"] > 10_000, "otherwise there would be nothing to keep"
    assert faults["keep"] < 100


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: pytest.fail("it was called"))
    assert memory.keep_freed_memory() is False


def test_a_gpus_free_memory_is_asked_of_the_gpu(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (5, 9)}[str(device)])
    assert memory.free_memory(torch.device("cuda:1")) == 5
    assert memory.free_memory() == 7


@pytest.mark.parametrize("given", [np.arange(3), torch.arange(3)])
def test_on_the_cpu_nothing_is_copied(given):
    tensor = memory.to_device(given, torch.device("cpu"))
    given[0] = 9
    assert tensor.tolist() == [9, 1, 2]
