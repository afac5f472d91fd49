"""An update makes the same operations each time, so that a CUDA graph can stand for it.

PyTorch's ``meta`` device stands for the GPU; see ``test_no_waiting.py``.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning import networks
from mtrl_lightning.algorithms import (
    Categorical,
    NormalizeObservation,
    ReturnRange,
)
from mtrl_lightning.gradients import FAMO, AlignedMTL, CAGrad, FairGrad, GradNorm, PCGrad
from mtrl_lightning.learning.graph import OnlyOn
from tests.helpers.algorithms import (
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
)
from tests.helpers.meta import SkippingSGD, meta_batch, on_meta
from tests.helpers.operations import recorded


def wide(name, **options):
    return partial(getattr(networks, name), width=8, **options)


CASES = {
    "SAC": (make_sac, {}),
    "TD3": (make_td3, {}),
    "PPO": (make_ppo, {}),
}
MORE_CASES = {
    "Distral": (make_distral, {}),
    "behaviour cloning": (make_bc, {}),
    "MOORE and PaCo": (make_sac, {"actor": wide("MOORE"), "critic": wide("PaCo")}),
    "FiLM": (make_sac, {"actor": wide("FiLM"), "critic": wide("SoftModularization")}),
    "own networks": (
        make_sac,
        {"actor": wide("Separate"), "critic": wide("MultiHead", head_width=6)},
    ),
    "PCGrad": (make_sac, {"actor_gradient": PCGrad, "critic_gradient": GradNorm}),
    "FAMO": (make_sac, {"actor_gradient": FAMO, "critic_gradient": FAMO}),
    "CAGrad": (
        make_sac,
        {"actor_gradient": CAGrad, "critic_gradient": partial(CAGrad, num_sampled=2)},
    ),
    "FairGrad, Aligned-MTL": (
        make_sac,
        {"actor_gradient": FairGrad, "critic_gradient": AlignedMTL},
    ),
    "PPO, PCGrad": (make_ppo, {"actor_gradient": PCGrad, "critic_gradient": GradNorm}),
    "options": (
        make_sac,
        {
            "encoder": partial(networks.Standardize, num_updates=2),
            "value": partial(Categorical, num_bins=11),
            "reward_scale": ReturnRange,
            "transforms": [NormalizeObservation],
        },
    ),
}
WARM_UP = 3
"""Updates before: optimizers and statistics have their state after them."""


def state_of(algorithm):
    """The tensors that outlive an update, by name."""
    guard, metrics = algorithm.guard, algorithm.mean_metrics
    of_optimizers = {
        f"optimizer {i} {j} {name}": value
        for i, update in enumerate(algorithm.updates)
        for j, state in enumerate(update.optimizer.state.values())
        for name, value in state.items()
    }
    return {
        **dict(algorithm.named_buffers()),
        **dict(algorithm.named_parameters()),
        **of_optimizers,
        **{f"sum {name}": value for name, value in metrics._sums.items()},
        **{f"count {name}": value for name, value in metrics._counts.items()},
        "rows": guard._rows,
        "number of rows": guard._num_rows,
    }


def assert_static(make, options):
    algorithm = on_meta(make, optimizer=partial(SkippingSGD, momentum=0.9), **options)
    batch = meta_batch(algorithm)
    period = getattr(algorithm, "actor_every", 1)
    for i in range(WARM_UP):
        algorithm.training_step(batch, i)
    records = []
    states = []
    for i in range(2 * period):
        with recorded() as operations:
            algorithm.training_step(batch, WARM_UP + i)
        records.append(operations)
        states.append(state_of(algorithm))
    for first, later in zip(records[:period], records[period:], strict=True):
        assert len(first) > 50 and first == later
    assert states[0].keys() == states[-1].keys()
    for name, value in states[0].items():
        assert states[-1][name] is value, name


@pytest.mark.parametrize("name", CASES)
def test_two_updates_make_the_same_operations_on_the_same_tensors(name, without_numbers):
    assert_static(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_so_does_every_part(name, without_numbers):
    assert_static(*MORE_CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_an_update_uses_no_tensor_of_the_host(name, without_numbers):
    make, options = {**CASES, **MORE_CASES}[name]
    algorithm = on_meta(make, optimizer=partial(SkippingSGD, momentum=0.9), **options)
    batch = meta_batch(algorithm)
    for i in range(WARM_UP):
        algorithm.training_step(batch, i)
    with OnlyOn("meta"):
        algorithm.training_step(batch, WARM_UP)


def test_an_operation_more_would_be_seen(without_numbers):
    class Counting(networks.MLP):
        calls = 0

        def forward(self, x_BD, task_B):
            self.calls += 1
            return super().forward(x_BD * self.calls, task_B)

    with pytest.raises(AssertionError, match="At index 0 diff"):
        assert_static(make_bc, {"actor": partial(Counting, width=8, depth=1)})


def test_a_tensor_in_place_of_another_would_be_seen(without_numbers):
    class Replacing(networks.Identity):
        def __init__(self, spec):
            super().__init__(spec)
            self.register_buffer("mean_D", torch.zeros(spec.observation_space.shape))

        def observe(self, observation_BD, task_B):
            self.mean_D = self.mean_D + observation_BD.mean((0, 1))
            return True

    with pytest.raises(AssertionError, match=r"encoder\.mean_D"):
        assert_static(make_bc, {"encoder": Replacing})
