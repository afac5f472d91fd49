"""Behaviour cloning from its YAML files: every operation of networks with a gradient method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.command_line import config_args
from tests.helpers.matrix import NETWORKS, PAIRS, build, check_exports, parameters_of, update

pytestmark = pytest.mark.slow

FOREIGN = (".critic.", ".task_weighting=")
"""Parts of options that it does not have."""
CLIPPED = "--model.init_args.noise=mtrl_lightning.networks.StateDependentStd"


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_it_imitates_with_every_network(command_line, monkeypatch, tmp_path, network, gradient):
    own = [option for option in NETWORKS[network] if not any(name in option for name in FOREIGN)]
    monkeypatch.setitem(NETWORKS, network, own)
    more = [*config_args(f"gradient/{gradient}"), "--data.demonstrations=unused"]
    if network == "mlp":
        more += [CLIPPED, "--model.init_args.loss=log_prob"]
    built = build(command_line, monkeypatch, "toy", network, *more, algorithm="bc")
    model = built.model
    before = parameters_of(model)
    metrics = update(built, "toy")
    after = parameters_of(model)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[n], after[n]) for n in before if n.startswith("actor."))
    if network in ("mlp", "multi_head"):
        check_exports(model, tmp_path)
