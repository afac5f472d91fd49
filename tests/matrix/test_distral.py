"""Distral on MetaWorld tasks from its YAML files, in both precisions.

``tests/algorithms/test_distral.py`` pairs every network with a gradient method. Left out are the
encoders that depend on the task, which are refused.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.command_line import ROOT
from tests.helpers.matrix import PRECISIONS, build, in_precision, parameters_of, update

pytestmark = pytest.mark.slow


def test_it_updates_in_both_precisions(command_line, monkeypatch):
    config = str(ROOT / "configs/gradient/pcgrad.yaml")
    built = build(
        command_line, monkeypatch, "metaworld", "multi_head", "-c", config, algorithm="distral"
    )
    ends = []
    for precision in PRECISIONS:
        built = in_precision(built, precision)
        before = parameters_of(built.model)
        metrics = update(built, "metaworld")
        after = parameters_of(built.model)
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        assert "train/distilled_weight_max" in metrics
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        for part in ("critic.members.1.", "distilled."):
            assert any(name.startswith(part) for name in changed)
        of_task = [
            {n.split(".")[2] for n in names if n.startswith("actor.")}
            for names in (before, changed)
        ]
        assert of_task[0] == of_task[1], "every task's actor learns"
        ends.append(torch.cat([(after[name] - before[name]).flatten() for name in after]))
    assert not torch.equal(*ends), "the precision reached the networks"
    assert torch.nn.functional.cosine_similarity(*ends, dim=0) > 0.6
