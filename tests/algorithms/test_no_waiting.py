"""An update reads no number from its device, because it would have to wait for a GPU.

PyTorch's ``meta`` device stands in for the GPU: its tensors have a shape but no data. Reading a
number, or mixing these tensors with tensors on the CPU, raises an error.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.optim import Adam
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from mtrl_lightning import algorithms
from mtrl_lightning.auxiliaries import HiPBMDP, Reconstruction
from mtrl_lightning.updates.generators import Generators
from tests.helpers import algorithms as small
from tests.helpers.gradients import METHODS
from tests.helpers.tiers import slow_unless

META = torch.device("meta")
PARTS = (
    {"reward_scale": algorithms.MeanReward, "actor_every": 2, "target_every": 2},
    {
        "reward_scale": algorithms.ReturnRange,
        "value": partial(algorithms.Categorical, num_bins=11),
        "task_weighting": algorithms.TemperatureWeights,
    },
    {
        "temperature": partial(algorithms.Temperature, per_task=False),
        "actor_max_grad_norm": None,
        "critic_max_grad_norm": None,
    },
    {
        "encoder": partial(small.ENCODER, context=small.EMBEDDING),
        "auxiliaries": [HiPBMDP, Reconstruction],
    },
)
OF_METHODS = [
    dict.fromkeys(("actor_gradient", "critic_gradient"), METHODS[name])
    for name in ("pcgrad", "gradnorm", "famo")
]
CASES = [
    *(
        partial(small.make_sac, **options)
        for options in (*small.STACKS.values(), *PARTS, *OF_METHODS)
    ),
    partial(small.make_ppo, **small.STACKS["multi-head"], **OF_METHODS[0]),
    *(small.make_sac, small.make_td3, small.make_distral, small.make_bc),
]


class SkippingAdam(Adam):
    """An Adam that has the flag ``fused``, as no fused kernel exists here."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.found_inf.device == META and self.found_inf.shape == ()
        del self.found_inf
        return super().step(closure)


@pytest.fixture(autouse=True)
def meta_as_gpu(monkeypatch):
    """Let ``meta`` stand for a GPU: it has neither generators nor autocast of its own."""
    monkeypatch.setattr(
        Generators, "get", lambda self, name, device: torch.Generator() if device != META else None
    )
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    # the way to the device would replace the parameters, which optimizers and others know
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    # lists of gradients are one operation, as on a GPU
    monkeypatch.setattr(
        _foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"]
    )


def on_meta(make, optimizer=SkippingAdam, **options):
    """Return an algorithm on the device, with its optimizers, and a batch."""
    algorithm = make(small.make_spec()._replace(task_names=small.NAMES), **options)
    for update in algorithm.updates:
        update.make_optimizer = partial(optimizer, lr=1e-3)
    algorithm.to(META)
    small.attach(algorithm)
    batch = small.learning_batch(algorithm)
    extra = {name: column.to(META) for name, column in batch.extra.items()}
    return algorithm, type(batch)(*(field.to(META) for field in batch[:-1]), extra)


@pytest.mark.parametrize("make", slow_unless((small.make_sac,), CASES))
def test_no_part_of_an_update_waits(make):
    algorithm, batch = on_meta(make)
    for i in range(2):
        algorithm.training_step(batch, i)
    assert {parameter.device for parameter in algorithm.parameters()} == {META}


def test_ppo_waits_only_for_the_divergence_of_an_epoch():
    ppo, batch = on_meta(small.make_ppo, num_minibatches=2)
    for _ in range(2):
        ppo.training_step(batch, 0)
        assert not ppo.is_iteration_over()
        ppo.training_step(batch, 1)
        with pytest.raises(RuntimeError, match="item"):
            ppo.is_iteration_over()


def test_an_optimizer_that_cannot_skip_on_the_device_waits():
    with pytest.warns(UserWarning, match=r"critic.*Adam.*fused"):
        sac, batch = on_meta(small.make_sac, optimizer=Adam)
    with pytest.raises(RuntimeError, match="item"):
        sac.training_step(batch, 0)


class CopiesFromHost(TorchDispatchMode):
    """Counts copies of tensors on the CPU to another device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [small.make_sac, small.make_td3, small.make_ppo])
def test_acting_copies_once_to_the_device_and_once_back(make, monkeypatch):
    algorithm, _ = on_meta(make)
    fetched = []

    def cpu(tensor):
        fetched.append(tuple(tensor.shape))
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    task_E = np.repeat(np.arange(3), 2)
    for _ in range(2):
        with CopiesFromHost() as copies:
            algorithm.act(np.zeros((6, 4)), task_E, "explore")
    assert copies.count == 1, "the observations; the tasks are there already"
    # actions, and PPO's samples and log densities
    num_columns = 2 + 2 + 1 if make is small.make_ppo else 2
    assert fetched == [(6, num_columns)] * 2
