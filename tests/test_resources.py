"""Free memory."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import torch

from mtrl_lightning.utils import devices


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
