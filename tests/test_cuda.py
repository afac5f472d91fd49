"""What only a CUDA device can show; skipped where there is none.

Updates equal to a CPU's, exact continuation, the replay on the device, and policies that leave it.
"""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device

from mtrl_lightning import load_policy
from mtrl_lightning.algorithms import Categorical
from mtrl_lightning.envs import Pixels, ToyReach
from mtrl_lightning.gradients import cagrad, pcgrad
from mtrl_lightning.networks import PixelEncoder
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.utils.devices import CPU
from tests import test_on_policy as on_policy
from tests.helpers.algorithms import attach
from tests.helpers.command_line import config_args
from tests.helpers.gradients import METHODS
from tests.helpers.matrix import NETWORKS, batches, make
from tests.helpers.runs import SMALL_SAC, assert_same_end, small

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = "--trainer.accelerator=gpu"
PAIRS = [
    *((network, "mean") for network in NETWORKS),
    *(
        (network, gradient)
        for gradient in METHODS
        for network in ("multi-head", "moore")
        if gradient != "mean"
    ),
]


def same_noise(action_RnA):
    """Return noise that does not depend on the device."""
    generator = torch.Generator().manual_seed(action_RnA[..., 0].numel())
    return torch.randn(action_RnA.shape, generator=generator).to(action_RnA)


def draw_gradients_on_the_cpu(monkeypatch):
    """Let gradient methods draw the same on each device."""
    get, orders, order = Generators.get, pcgrad.orders, cagrad.order

    def get_on_cpu(generators, name, device):
        return get(generators, name, CPU if name == "gradient" else device)

    monkeypatch.setattr(Generators, "get", get_on_cpu)
    monkeypatch.setattr(
        pcgrad, "orders", lambda number, generator, device: orders(number, generator).to(device)
    )
    monkeypatch.setattr(
        cagrad, "order", lambda number, generator, device: order(number, generator, CPU).to(device)
    )


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_updates_equal_those_of_a_cpu(monkeypatch, network, gradient):
    """The reward's scale, targets, losses, gradient methods and optimizers, in float32."""
    draw_gradients_on_the_cpu(monkeypatch)
    start = make(network, gradient).state_dict()
    given, _ = batches()
    ends = []
    for device in ("cpu", "cuda"):
        model = make(network, gradient).to(device)
        model.generators.normal_like = lambda _, action_RnA: same_noise(action_RnA)
        attach(model)
        for i, batch in enumerate(given):
            model.training_step(move_data_to_device(batch, torch.device(device)), i)
        state = model.state_dict()
        ends.append({name: x.cpu() for name, x in state.items() if isinstance(x, torch.Tensor)})
    for name, expected in ends[0].items():
        torch.testing.assert_close(ends[1][name], expected, atol=2e-4, rtol=2e-3, msg=name)
    assert any(not torch.equal(end, start[name]) for name, end in ends[1].items())


def test_distribution_is_projected_in_the_same_order_each_time():
    generator = torch.Generator().manual_seed(0)
    probability = torch.randn(1280, 101, generator=generator).softmax(-1)
    moved = 12 * torch.randn(1280, 101, generator=generator)
    moved[::2] = moved[::2, :1]  # an episode that has ended: all values fall into two bins
    value = Categorical().cuda()
    given = probability.cuda(), moved.cuda()
    first = value.project(*given)
    torch.testing.assert_close(first.cpu(), Categorical().project(probability, moved))
    assert all(torch.equal(value.project(*given), first) for _ in range(10))


GRAPHS = "--model.init_args.compile=reduce-overhead"
BF16 = "--trainer.precision=bf16-mixed"


@pytest.mark.parametrize(
    "options",
    [
        ["--data.on_device=false"],
        [BF16],
        ["--model.init_args.compile=default"],
        [GRAPHS],
        [GRAPHS, BF16],
        config_args("network/multi_head", "gradient/pcgrad"),
        config_args("network/moore", "gradient/famo"),
    ],
    ids=["host", "bf16", "compile", "graphs", "graphs bf16", "pcgrad", "famo"],
)
def test_continued_run_is_the_uninterrupted_one(command_line, options):
    """In every bit: parameters, optimizers, generators, environments and the replay."""
    run = partial(command_line, "fit", *options, GPU)
    run("--name=whole")
    run("--name=parts", "--data.total_steps=600")
    run("--name=parts", "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.parametrize("on_device", [True, False])
def test_frames_are_kept_where_it_is_asked_for(tmp_path, on_device):
    encoder = partial(PixelEncoder, channels=4, strides=(2, 2), out_dim=8)
    # the rings wrap around
    data = {"batch_size": 8, "capacity": 48, "on_device": on_device, "warmup_steps": 10}
    run = small(
        Pixels(ToyReach(2, horizon=20), size=16),
        tmp_path,
        algorithm=partial(SMALL_SAC, encoder=encoder),
        total_steps=120,
        data=data,
        trainer={"accelerator": "gpu"},
    )
    buffer = run.algorithm.trainer.datamodule.buffer
    assert buffer.storage.device.type == ("cuda" if on_device else "cpu")
    batch = buffer.sample(8)
    assert batch.observation_RnD.device.type == buffer.storage.device.type
    assert batch.observation_RnD.dtype == torch.uint8
    assert bool((batch.observation_RnD != batch.next_observation_RnD).any())


@pytest.mark.parametrize("compile", ["null", "reduce-overhead"])
def test_ppo_trains_on_a_gpu(command_line, compile):
    """Its gradient shares differentiate the tasks' losses in one batched pass."""
    on_policy.fit(command_line, GPU, f"--model.init_args.compile={compile}")
    policy = load_policy(command_line.folder() / "checkpoints" / "last.ckpt")
    assert policy.env_steps == 576
    assert policy.algorithm.counters.updates == 4 * 3 * 4  # iterations, epochs, minibatches


def test_run_of_a_gpu_acts_alike_and_continues_on_a_cpu(command_line, capsys):
    command_line("fit", GPU, *config_args("network/multi_head"), "--data.total_steps=600")
    checkpoint = command_line.folder() / "checkpoints" / "last.ckpt"
    policy = load_policy(checkpoint)
    observation_ED = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    task_E = np.array([0, 1, 2, 2, 1, 0])
    actions = [
        policy.algorithm.to(device).act(observation_ED, task_E, "exploit")
        for device in ("cpu", "cuda")
    ]
    np.testing.assert_allclose(*actions, atol=1e-5)
    more = ["--ckpt_path=last", "--data.total_steps=900"]
    command_line("fit", *config_args("network/multi_head"), *more)
    assert load_policy(checkpoint).env_steps == 900
    assert "900 env steps" in capsys.readouterr().out
