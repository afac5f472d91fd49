"""What only a CUDA device can show; skipped where there is none.

Updates equal to a CPU's, exact continuation, the replay on the device, and policies that leave it.
"""

import itertools
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device

from mtrl_lightning import SAC, load_policy, train
from mtrl_lightning.algorithms import Categorical
from mtrl_lightning.devices import CPU
from mtrl_lightning.envs import Pixels, ToyReach
from mtrl_lightning.gradients import cagrad, pcgrad
from mtrl_lightning.learning.compiling import prepare_device
from mtrl_lightning.learning.generators import Generators
from mtrl_lightning.learning.graph import UPDATES_PER_GRAPH
from mtrl_lightning.networks import MLP
from mtrl_lightning.replay.device import DeviceReplay
from mtrl_lightning.replay.static_batches import StaticBatches
from mtrl_lightning.types import OwedUpdates
from tests import test_on_policy as on_policy
from tests.helpers import replay as replays
from tests.helpers.algorithms import attach, make_batch, make_ppo, make_sac, make_td3
from tests.helpers.command_line import config_args
from tests.helpers.matrix import CROSSED, GRADIENTS, batches, build, in_precision
from tests.helpers.networks import Branching, Convolutions
from tests.helpers.runs import assert_same, assert_same_end

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = "--trainer.accelerator=gpu"
WITH_EVERY_METHOD = ("multi_head", "moore")
"""Networks that are tried with every gradient method; all are tried with the mean."""


def pairs():
    yield from ((network, "mean") for network in CROSSED)
    for gradient in GRADIENTS:
        if gradient != "mean":
            yield from ((network, gradient) for network in WITH_EVERY_METHOD)


def same_noise(action_RnA):
    """Return noise that does not depend on the device."""
    generator = torch.Generator().manual_seed(action_RnA[..., 0].numel())
    return torch.randn(action_RnA.shape, generator=generator).to(action_RnA)


def draw_gradients_on_the_cpu(monkeypatch):
    """Let gradient methods draw the same on each device."""
    get, orders, order = Generators.get, pcgrad.orders, cagrad.order

    def get_on_cpu(generators, name, device):
        return get(generators, name, torch.device("cpu") if name == "gradient" else device)

    monkeypatch.setattr(Generators, "get", get_on_cpu)
    monkeypatch.setattr(
        pcgrad, "orders", lambda number, generator, device: orders(number, generator).to(device)
    )
    monkeypatch.setattr(
        cagrad, "order", lambda number, generator, device: order(number, generator, CPU).to(device)
    )


@pytest.mark.parametrize(("network", "gradient"), list(pairs()))
def test_updates_equal_those_of_a_cpu(command_line, monkeypatch, network, gradient):
    """The reward's scale, targets, losses, gradient methods and optimizers, in float32."""
    draw_gradients_on_the_cpu(monkeypatch)
    options = config_args(f"gradient/{gradient}")
    built = build(command_line, monkeypatch, "toy", network, *options)
    start = deepcopy(built.model.state_dict())
    _, given, _ = batches("toy")
    ends = []
    for device in ("cpu", "cuda"):
        model = in_precision(built, "32-true").model.to(device)
        model.load_state_dict(start)
        model.noise_like = same_noise
        attach(model)
        for i, batch in enumerate(given):
            model.training_step(move_data_to_device(batch, torch.device(device)), i)
        state = model.state_dict()
        ends.append({name: x.cpu() for name, x in state.items() if isinstance(x, torch.Tensor)})
    for name, expected in ends[0].items():
        torch.testing.assert_close(ends[1][name], expected, atol=2e-4, rtol=2e-3, msg=name)
    assert any(not torch.equal(end, start[name]) for name, end in ends[1].items())


def test_a_distribution_is_projected_in_the_same_order_each_time():
    generator = torch.Generator().manual_seed(0)
    probability = torch.randn(1280, 101, generator=generator).softmax(-1)
    moved = 12 * torch.randn(1280, 101, generator=generator)
    moved[::2] = moved[::2, :1]  # an episode that has ended: all values fall into two bins
    value = Categorical().cuda()
    given = probability.cuda(), moved.cuda()
    first = value.project(*given)
    torch.testing.assert_close(first.cpu(), Categorical().project(probability, moved))
    assert all(torch.equal(value.project(*given), first) for _ in range(10))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--data.on_device=false"],
        ["--trainer.precision=bf16-mixed"],
        ["--model.init_args.compile=default"],
        ["--model.init_args.compile=graph"],
        ["--model.init_args.compile=graph", "--data.on_device=false"],
        ["--model.init_args.compile=graph", "--trainer.precision=bf16-mixed"],
        config_args("network/multi_head", "gradient/pcgrad"),
        config_args("network/moore", "gradient/famo"),
    ],
    ids=["plain", "host", "bf16", "compile", "graph", "graph host", "graph bf16", "pcgrad", "famo"],
)
def test_a_continued_run_is_the_uninterrupted_one(command_line, options):
    """In every bit: parameters, optimizers, generators, environments and the replay."""
    for name, steps in (("whole", 900), ("parts", 600), ("parts", 900)):
        is_continued = (name, steps) == ("parts", 900)
        command_line(
            "fit",
            *options,
            GPU,
            f"--name={name}",
            f"--rollout.total_steps={steps}",
            *(["--ckpt_path=last"] if is_continued else []),
        )
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.parametrize("on_device", [True, False])
def test_frames_are_kept_where_it_is_asked_for(tmp_path, on_device):
    small = partial(MLP, width=8, depth=1)
    run = train(
        Pixels(ToyReach(2, horizon=20), size=16),
        partial(SAC, encoder=Convolutions, actor=small, critic=small),
        total_steps=120,
        root=str(tmp_path),
        data={"batch_size": 8, "capacity": 48, "on_device": on_device},  # the rings wrap around
        rollout={"warmup_steps": 10},
        num_workers=0,
        evaluation={"num_episodes": 1, "num_workers": 0},
        trainer={"enable_progress_bar": False, "accelerator": "gpu"},
    )
    buffer = run.algorithm.trainer.datamodule.buffer
    assert buffer.storage.device.type == ("cuda" if on_device else "cpu")
    batch = buffer.sample(8)
    assert batch.observation_RnD.device.type == buffer.storage.device.type
    assert batch.observation_RnD.dtype == torch.uint8
    assert bool((batch.observation_RnD != batch.next_observation_RnD).any())


def with_graphs(model, given, num_updates):
    """Make updates by graphs, with the given batches in turn."""
    device = torch.device("cuda:0")
    model.compile_mode = "graph"
    prepare_device(model, device)
    attach(model)
    batches = itertools.cycle(given)
    source = StaticBatches(lambda: next(batches), device)
    model.training_step(OwedUpdates(source, num_updates), 0)
    return model


def assert_alike(one, other):
    for name, expected in one.state_dict().items():
        if isinstance(expected, torch.Tensor):
            found = other.state_dict()[name]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize(("network", "gradient"), list(pairs()))
def test_updates_by_graphs_equal_those_without(command_line, monkeypatch, network, gradient):
    """Draws continue as they would, several updates at once; the host solves some methods."""
    built = build(command_line, monkeypatch, "toy", network, *config_args(f"gradient/{gradient}"))
    _, given, _ = batches("toy")
    plain, graphed = (in_precision(built, "32-true").model.to("cuda") for _ in range(2))
    graphed.load_state_dict(plain.state_dict())
    attach(plain)
    num_updates = 3 * UPDATES_PER_GRAPH + 2
    given = [move_data_to_device(batch, torch.device("cuda")) for batch in given]
    for i, batch in zip(range(num_updates), itertools.cycle(given), strict=False):
        plain.training_step(batch, i)
    with_graphs(graphed, given, num_updates)
    if graphed.graphs.updates.reason:
        assert "computes on the host" in graphed.graphs.updates.reason
    elif network != "standardize":  # which still observes
        assert graphed.graphs.updates.num_graphs > 0
    assert_alike(plain, graphed)
    assert graphed.drain_metrics() == pytest.approx(plain.drain_metrics(), rel=1e-2, abs=1e-3)


def test_a_part_that_reads_a_number_ends_the_graphs_and_nothing_else():
    """The generators, which were being recorded, draw as before."""
    make = partial(make_sac, actor=partial(Branching, width=8, depth=1))
    plain, graphed = make().to("cuda"), make().to("cuda")
    given = [move_data_to_device(make_batch(plain.spec), torch.device("cuda"))]
    attach(plain)
    for i in range(8):
        plain.training_step(given[0], i)
    with pytest.warns(UserWarning, match=r"because Branching\.forward \(networks\.py"):
        with_graphs(graphed, given, 8)
    assert_alike(plain, graphed)
    torch.randn(3, device="cuda")
    for name in ("learn", "act"):
        states = [sac.generators.get(name, sac.device).get_state() for sac in (plain, graphed)]
        assert torch.equal(*states)


def test_graphs_take_no_memory_as_they_go_on():
    sac = make_sac(actor_every=2).to("cuda")
    given = [move_data_to_device(make_batch(sac.spec), torch.device("cuda"))]
    with_graphs(sac, given, 100)
    used = []
    source = StaticBatches(lambda: given[0], torch.device("cuda"))
    for _ in range(3):
        sac.training_step(OwedUpdates(source, 1000), 0)
        sac.drain_metrics()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[2]


def test_graphs_are_recorded_again_when_none_is_left():
    sac = make_sac().to("cuda")
    given = [move_data_to_device(make_batch(sac.spec), torch.device("cuda"))]
    with_graphs(sac, given, 10)
    sac.reset_networks()
    assert sac.graphs.updates.num_graphs == 0
    sac.training_step(OwedUpdates(StaticBatches(lambda: given[0], torch.device("cuda")), 10), 0)
    assert sac.graphs.updates.num_graphs > 0 and sac.graphs.updates.reason == ""


@pytest.mark.parametrize("critic", [None, Branching])
def test_actions_by_graphs_equal_those_without(critic):
    """In all modes in turn, between updates by graphs, also where recording these fails."""
    options = {} if critic is None else {"critic": partial(critic, width=8, depth=1)}
    plain, graphed = (make_sac(compile="graph", **options).to("cuda") for _ in range(2))
    given = [move_data_to_device(make_batch(plain.spec), torch.device("cuda"))]
    source = StaticBatches(lambda: given[0], torch.device("cuda"))
    for sac in (plain, graphed):
        prepare_device(sac, torch.device("cuda"))
        attach(sac)
    plain.graphs.acting._is_refused = lambda task_E: True
    generator = np.random.default_rng(0)
    groups = [np.repeat(np.arange(3), 2), np.array([2, 0, 1, 0])]
    for step in range(12):
        for task_E in groups:
            observation_ED = generator.normal(size=(len(task_E), 4))
            noise_EA = generator.normal(size=(len(task_E), 2)).astype(np.float32)
            for mode, noise in (("explore", None), ("explore", noise_EA), ("exploit", None)):
                outputs = [s.act(observation_ED, task_E, mode, noise) for s in (graphed, plain)]
                assert_same(*outputs)
        for sac in (graphed, plain):
            if step > 3:  # there are graphs of acting
                sac.training_step(OwedUpdates(source, 2), step)
    assert graphed.graphs.acting.num_graphs == 6 and graphed.graphs.acting.reason == ""
    assert bool(graphed.graphs.updates.reason) == (critic is not None)
    for name in ("act", "learn"):
        states = [s.generators.get(name, s.device).get_state() for s in (plain, graphed)]
        assert torch.equal(*states)


@pytest.mark.parametrize("make", [make_ppo, make_td3])
def test_other_algorithms_act_alike_by_graphs(make):
    plain, graphed = make().to("cuda"), make().to("cuda")
    graphed.compile_mode = "graph"
    prepare_device(graphed, torch.device("cuda"))
    task_E = np.repeat(np.arange(3), 2)
    for seed in range(5):
        observation_ED = np.random.default_rng(seed).normal(size=(6, 4))
        assert_same(*[policy.act(observation_ED, task_E, "explore") for policy in (graphed, plain)])
    assert graphed.graphs.acting.num_graphs == 1


def test_the_device_draws_only_what_was_added():
    device = torch.device("cuda")
    buffer = DeviceReplay(replays.make_spec(3), 24, 12, device=device)
    for step in range(30):
        ids = [step, 1000 + step, 2000 + step]
        buffer.add(replays.make_transitions(ids, [0, 1, 2]))
        drawn = replays.ids_of(move_data_to_device(buffer.sample(300), CPU)).reshape(3, 100)
        assert set((drawn % 1000).flatten().tolist()) <= set(range(max(0, step - 7), step + 1))
        assert (drawn // 1000 == np.arange(3)[:, None]).all()


@pytest.mark.parametrize("compile", ["none", "graph"])
def test_ppo_trains_on_a_gpu(command_line, compile):
    """Its gradient shares differentiate the tasks' losses in one batched pass."""
    on_policy.fit(command_line, GPU, f"--model.init_args.compile={compile}")
    policy = load_policy(command_line.folder() / "checkpoints" / "last.ckpt")
    assert policy.env_steps == 576
    assert policy.algorithm.counters.updates == 4 * 3 * 4  # iterations, epochs, minibatches


def test_a_policy_trained_on_a_gpu_acts_alike_on_a_cpu(command_line):
    command_line("fit", GPU, *config_args("network/multi_head"))
    checkpoint = command_line.folder() / "checkpoints" / "last.ckpt"
    policy = load_policy(checkpoint)
    observation_ED = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    task_E = np.array([0, 1, 2, 2, 1, 0])
    actions = [
        policy.algorithm.to(device).act(observation_ED, task_E, "exploit")
        for device in ("cpu", "cuda")
    ]
    np.testing.assert_allclose(*actions, atol=1e-5)


def test_a_run_of_a_gpu_continues_on_a_cpu(command_line, capsys):
    command_line("fit", GPU, "--rollout.total_steps=600")
    capsys.readouterr()
    command_line("fit", "--ckpt_path=last", "--rollout.total_steps=900")
    policy = load_policy(command_line.folder() / "checkpoints" / "last.ckpt")
    assert policy.env_steps == 900
    assert "900 env steps" in capsys.readouterr().out
