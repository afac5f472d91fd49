import time

import numpy as np
import pytest

from mtrl_lightning.export.names import POLICY_FILES
from mtrl_lightning.export.policy import TOLERANCE, export_policy
from mtrl_lightning.loading import LoadedPolicy
from tests.matrix import STACKS, build


@pytest.mark.parametrize("network", STACKS)
def test_every_network_and_encoder_is_exported(command_line, monkeypatch, tmp_path, network):
    t0 = time.time()
    model = build(command_line, monkeypatch, "toy", network).model
    t1 = time.time()
    for format in POLICY_FILES:
        _, comparison = export_policy(LoadedPolicy(model), format, tmp_path)
        print(network, format, comparison)
        assert comparison.max_difference <= TOLERANCE
    print("build", t1 - t0, "export", time.time() - t1)
