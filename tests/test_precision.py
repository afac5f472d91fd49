import os
import platform
import random
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from mtrl_lightning import precision
from mtrl_lightning.precision import ProductTimes, check_precision
from tests.helpers.command_line import ROOT, SHORT

CPU = torch.device("cpu")
WITHOUT_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def times(slowdown):
    return ProductTimes(1280, 400, float32=0.01, bfloat16=0.01 * slowdown)


@pytest.fixture
def fresh():
    precision.time_products.cache_clear()
    yield
    precision.time_products.cache_clear()


@pytest.mark.parametrize("slowdown", [1.2, 30.0])
def test_bf16_that_is_slower_is_warned_of_with_the_remedy(monkeypatch, slowdown):
    monkeypatch.setattr(precision, "time_products", lambda: times(slowdown))
    remedy = rf"{slowdown} times as slowly .* --trainer.precision 32-true"
    with pytest.warns(UserWarning, match=remedy):
        check_precision("bf16-mixed", CPU)


@pytest.mark.parametrize("slowdown", [0.3, 1.05])
def test_bf16_that_is_not_slower_is_not_warned_of(monkeypatch, slowdown):
    monkeypatch.setattr(precision, "time_products", lambda: times(slowdown))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_precision("bf16-mixed", CPU)


@pytest.mark.parametrize(
    ("chosen", "device"), [("32-true", CPU), ("bf16-mixed", torch.device("cuda"))]
)
def test_nothing_is_timed_where_bf16_is_not_used_on_the_cpu(monkeypatch, chosen, device):
    monkeypatch.setattr(precision, "time_products", lambda: pytest.fail("timed"))
    check_precision(chosen, device)


def test_the_products_are_those_of_a_layer_in_both_precisions(monkeypatch, fresh):
    multiplied = []
    for name in ("linear_product", "input_gradient", "weight_gradient"):
        real = getattr(precision, name)

        def product(a, b, name=name, real=real):
            multiplied.append((a.dtype, name, tuple(a.shape), tuple(b.shape)))
            return real(a, b)

        monkeypatch.setattr(precision, name, product)
    monkeypatch.setattr(precision, "SECONDS", 0.0)
    found = precision._time_products(6, 4)
    layer = [
        ("linear_product", (6, 4), (4, 4)),
        ("input_gradient", (6, 4), (4, 4)),
        ("weight_gradient", (6, 4), (6, 4)),
    ]
    one_round = [(kind, *two) for kind in (torch.float32, torch.bfloat16) for two in layer]
    assert multiplied == one_round * 2  # a first round that does not count, and one that does
    assert found[:2] == (6, 4)


def test_the_faster_of_repeated_products_counts(monkeypatch):
    seconds = iter([5.0, 9.0, 3.0, 8.0, 4.0, 7.0])
    clock = iter([0.0, 0.01, 0.02, 0.05])
    monkeypatch.setattr(precision, "_seconds", lambda _: next(seconds))
    monkeypatch.setattr(precision.time, "perf_counter", lambda: next(clock))
    found = precision._time_products(2, 2)
    assert (found.float32, found.bfloat16) == (3.0, 7.0)
    assert found.slowdown == pytest.approx(7 / 3)


def test_large_products_are_left_out_where_small_ones_tell(monkeypatch, fresh):
    timed = []

    def slow(rows, width):
        timed.append((rows, width))
        return times(10.0)

    monkeypatch.setattr(precision, "_time_products", slow)
    assert precision.time_products().slowdown == 10.0
    assert timed == [precision.SMALL]


def test_timing_changes_no_generator_and_no_setting(fresh):
    def state():
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    before = state()
    found = precision.time_products()
    assert state() == before
    assert found.float32 > 0
    assert found.bfloat16 > 0
    assert precision.time_products() is found  # measured once


def run_without_bfloat16(*words, **options):
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **WITHOUT_BFLOAT16},
        capture_output=True,
        text=True,
        check=True,
        **options,
    )


needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's limit is x86's"
)


@pytest.mark.slow
@needs_x86
def test_a_processor_without_bfloat16_is_found():
    printed = run_without_bfloat16("-m", "mtrl_lightning.precision", cwd=ROOT).stdout
    float32, bfloat16 = (float(text) for text in re.findall(r"([\d.]+) ms", printed))
    assert bfloat16 > 2 * float32
    assert "train with --trainer.precision 32-true" in printed


@pytest.mark.slow
def test_a_run_where_bf16_is_slower_says_so_once(command_line, monkeypatch):
    monkeypatch.setattr(precision, "time_products", lambda: times(30.0))
    with pytest.warns(UserWarning, match="precision 32") as warned:
        command_line("fit", *SHORT, "--trainer.precision=bf16-mixed")
    assert len([one for one in warned if "in bfloat16 as in float32" in str(one.message)]) == 1
