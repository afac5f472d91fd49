"""Ranks update as one process with all their rows; what they exchange.

The ranks are forks of the test's process, connected by gloo, which compute in double precision.
"""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Adam

from mtrl_lightning import auxiliaries, networks
from mtrl_lightning.algorithms import Categorical, MeanReward, ReturnRange, Temperature
from mtrl_lightning.data.drift import check_equal
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.buffer import batch_of
from mtrl_lightning.transitions import Rollout, TransitionBatch, Transitions
from mtrl_lightning.updates.reward_scale import Moments
from tests.helpers.algorithms import (
    attach,
    make_batch,
    make_bc,
    make_distral,
    make_ppo,
    make_sac,
    make_spec,
    make_td3,
)
from tests.helpers.gradients import METHODS
from tests.helpers.processes import exit_codes, fork
from tests.helpers.tiers import slow_unless

NUM_UPDATES = 10
RESET_AT = 5
ROWS = 8
"""Rows of each task in the joined batch."""
COPIES = 4
"""Environments of each task in PPO's joined iteration."""
STEPS = 12
ITERATIONS = 3
TOLERANCE = {"sac nash_mtl": 1e-8}
"""Largest relative deviation; Nash-MTL's solver stops where rounding decides."""
OF_FOUR = ("multi_head pcgrad", "ppo")
SPEC = make_spec()
MASKED = SPEC._replace(observation_sizes=(4, 2, 4), action_sizes=(1, 2, 2))
STANDARDIZE = {"encoder": networks.Standardize}
OUTLIERS = {"encoder": partial(networks.Standardize, clip=1.5)}


def both(network, **options):
    made = partial(network, **options)
    return {"actor": made, "critic": made}


def by(method):
    return {"actor_gradient": METHODS[method], "critic_gradient": METHODS[method]}


sac = partial(make_sac, SPEC)
SAC_CASES = {
    **{f"sac {name}": partial(sac, **by(name)) for name in METHODS},
    "multi_head pcgrad": partial(
        sac, **both(networks.MultiHead, width=8, depth=2, output_bound=0.3), **by("pcgrad")
    ),
    # some losses are above the limit, so that w is reinitialized
    "paco repairs": partial(
        sac, **both(networks.PaCo, width=8, depth=1, num_sets=2, max_loss=2.0, output_bound=0.3)
    ),
    "masked bodies, hipbmdp, sac_ae": partial(
        make_sac,
        MASKED,
        encoder=partial(networks.MLPEncoder, width=8, out_dim=5, context=networks.Embedding),
        auxiliaries=[partial(auxiliaries.HiPBMDP, width=8), auxiliaries.Reconstruction],
        actor_gradient=METHODS["pcgrad"],
        encoder_tau=0.05,
    ),
    "categorical": partial(sac, value=partial(Categorical, num_bins=11), reward_scale=MeanReward),
    "return range": partial(sac, reward_scale=ReturnRange),
    "masked bodies, standardize per task, outliers": partial(make_sac, MASKED, **OUTLIERS),
    "standardize, outliers": partial(sac, **OUTLIERS),
    "one temperature": partial(sac, temperature=partial(Temperature, per_task=False)),
    "distral masked bodies pcgrad": partial(
        make_distral, MASKED, **STANDARDIZE, actor_gradient=METHODS["pcgrad"]
    ),
    "bc masked bodies, standardize, famo": partial(
        make_bc, MASKED, **STANDARDIZE, actor_gradient=METHODS["famo"]
    ),
    "skipped step": partial(sac, on_nonfinite="skip"),
    "td3 masked bodies, standardize, pcgrad": partial(
        make_td3, MASKED, **STANDARDIZE, **by("pcgrad"), reward_scale=ReturnRange
    ),
}
ppo = partial(make_ppo, SPEC, num_steps=STEPS, num_minibatches=3)
PPO_CASES = {
    "ppo": ppo,
    "ppo standardize pcgrad": partial(ppo, **STANDARDIZE, **by("pcgrad"), max_kl=1e-4),
}
CASES = {**SAC_CASES, **PPO_CASES}
FAST = [(2, "sac pcgrad"), (2, "return range"), (2, "ppo standardize pcgrad")]


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """Compute in double precision, also where the algorithms ask for single precision."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def share(rows_Rn, rank, size):
    """Return a rank's rows ``[R, n / size, ...]`` of ``[R, n, ...]``: a part of each task's."""
    return rows_Rn.chunk(size, 1)[rank]


def own_environments(num_tasks, rank, size):
    """Return a rank's environments of ``COPIES`` for each task, in the order of the tasks."""
    return share(torch.arange(num_tasks * COPIES).view(num_tasks, COPIES), rank, size).flatten()


def vector_step(step, rank, size):
    """Return a rank's transitions of a joined vector step; a few episodes end, on few ranks."""
    generator = torch.Generator().manual_seed(2000 + step)
    task_E = torch.arange(3).repeat_interleave(COPIES)
    own_E = own_environments(3, rank, size)
    reward_E = torch.randn(len(task_E), generator=generator).double() * 10.0**task_E
    ended_EF = torch.rand(len(task_E), 2, generator=generator) < 0.03
    empty_E = np.zeros((len(own_E), 1))
    columns = [reward_E, *ended_EF.T, task_E]
    reward, terminated, truncated, task = (column[own_E].numpy() for column in columns)
    return Transitions(
        empty_E, empty_E, reward, empty_E, terminated, truncated, task, own_E.numpy()
    )


def run_sac(algorithm, rank, size):
    noises = []
    algorithm.generators.normal_like = lambda *_: noises.pop(0)
    algorithm.transforms.begin_learning(np.array([1.0, 0.2, 3.0]))
    for update in range(NUM_UPDATES):
        if update == RESET_AT:
            algorithm.reset_networks()
        algorithm.transforms.observe(vector_step(update, rank, size))
        batch = make_batch(algorithm.spec, ROWS, seed=update)
        generator = torch.Generator().manual_seed(1000 + update)
        columns = [column.double() for column in batch[:4]]
        if update == 3 and algorithm.guard._on_nonfinite == "skip":
            columns[2][-1, -1] = torch.nan  # on the last rank only
        columns += [batch.terminated_Rn, batch.task_Rn]
        shape = columns[1].shape
        joined = [torch.randn(shape, generator=generator) for _ in range(2)]
        noises += [share(noise, rank, size) for noise in joined]
        parts = [share(column, rank, size) for column in columns]
        if algorithm.action_mask_TA is not None:
            parts[1] = parts[1] * algorithm.action_mask_TA[parts[5]]
            sizes = torch.tensor(algorithm.spec.observation_sizes)
            for place in (0, 3):
                inside = torch.arange(4) < sizes[parts[5]][..., None]
                parts[place] = parts[place] * inside
        algorithm.training_step(TransitionBatch(*parts), update)


def collect(spec, seed):
    """Return columns ``[S, E]`` of a joined iteration, which are valid, and the tasks ``[E]``."""
    generator = torch.Generator().manual_seed(seed)
    task_E = torch.arange(3).repeat_interleave(COPIES)
    shape = (STEPS, len(task_E))

    def normal(*more):
        return torch.randn(*shape, *more, generator=generator)

    sample = normal(2) * 0.3
    columns = {
        "observation": normal(4),
        "next_observation": normal(4),
        "action": sample.clamp(-1, 1),
        "unclipped_action": sample,
        "log_prob": normal() * 0.05 - 1,
        "reward": normal() * 10.0**task_E,
        "terminated": torch.rand(shape, generator=generator) < 0.1,
        "truncated": torch.rand(shape, generator=generator) < 0.1,
    }
    return columns, torch.rand(shape, generator=generator) > 0.1, task_E


def run_ppo(algorithm, rank, size):
    own_E = own_environments(algorithm.num_trained, rank, size)
    for iteration in range(ITERATIONS):
        columns, valid_SE, task_E = collect(algorithm.spec, iteration)
        own = {name: column[:, own_E] for name, column in columns.items()}
        collected = Rollout(own, valid_SE[:, own_E], task_E[own_E])
        computed = {**own, **algorithm.begin_iteration(collected, 0.0)}
        for _ in range(2):
            for steps in torch.arange(STEPS).chunk(3):
                if algorithm.is_iteration_over():
                    break
                # environment after environment, so that the rows are in the order of the tasks
                rows = {
                    name: column[steps].transpose(0, 1).flatten(0, 1)
                    for name, column in computed.items()
                }
                algorithm.training_step(batch_of(rows, torch.arange(algorithm.num_trained)), 0)
        algorithm.end_iteration(collected)


def result_of(name, rank=0, size=1):
    """Return the weights, buffers and moments after a case's updates."""
    algorithm = CASES[name]().double()
    for update in algorithm.updates:
        update.make_optimizer = partial(Adam, lr=1e-2)
    attach(algorithm)
    run = run_sac if name in SAC_CASES else run_ppo
    run(algorithm, rank, size)
    state = algorithm.state_dict()
    found = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for place, update in enumerate(algorithm.updates):
        for number, state in update.optimizer.state_dict()["state"].items():
            found |= {f"{place}.{number}.{key}": value for key, value in state.items()}
    metrics = algorithm.drain_metrics()
    found |= {f"metric {key}": torch.tensor(value) for key, value in metrics.items()}
    found["updates"] = torch.tensor(algorithm.counters.updates)
    found["skipped"] = torch.tensor(algorithm.counters.skipped_updates)
    return found


@pytest.fixture
def on_ranks(tmp_path):
    """Call a function with the number of each of several ranks there; return what they return."""

    def run(function, size=2):
        def be(rank):
            dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=rank, world_size=size)
            torch.save(function(rank), tmp_path / f"{rank}.pt")
            dist.barrier()

        assert exit_codes(fork(be, size)) == [0] * size
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(size)]

    return run


@pytest.mark.parametrize(
    "case",
    slow_unless(FAST, [*((2, name) for name in CASES), *((4, name) for name in OF_FOUR)]),
    ids=str,
)
def test_ranks_update_as_one_process_with_the_joined_batch(on_ranks, case):
    size, name = case
    results = on_ranks(lambda rank: result_of(name, rank, size), size)
    for key, value in result_of(name).items():
        value = value.double()
        is_number = ~value.isnan()
        scale = value[is_number].abs().max().clamp(min=1e-3) if is_number.any() else 1.0
        for result in results:
            found = result[key].double()
            assert torch.equal(found.isnan(), ~is_number), key
            assert torch.equal(found[is_number], results[0][key].double()[is_number]), key
            error = (found - value)[is_number].abs() / scale
            assert (error < TOLERANCE.get(name, 1e-12)).all(), key
    assert results[0]["skipped"] == (name == "skipped step")


def test_cases_repair_and_stop_early(monkeypatch):
    """Otherwise they would show nothing."""
    repaired = result_of("paco repairs")["actor.composition.weight"]
    monkeypatch.setattr(networks.PaCo, "after_step", lambda *_: None)
    assert not torch.equal(result_of("paco repairs")["actor.composition.weight"], repaired)
    updates = int(result_of("ppo standardize pcgrad")["updates"])
    assert ITERATIONS <= updates < ITERATIONS * 2 * 3, "2 epochs of 3 minibatches"


def error_of(call, *given):
    """Return the class and message of the exception that a call raises; empty without one."""
    try:
        call(*given)
    except (RuntimeError, OSError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ({1: OSError("full")}, ["OSError: rank 1: full", "OSError: full"]),
        ({}, ["", ""]),
        ({0: OSError(), 1: TypeError("a bug")}, ["RuntimeError: rank 1", "TypeError: a bug"]),
    ],
    ids=["expected", "none", "unexpected"],
)
def test_exception_on_one_rank_is_raised_on_all(on_ranks, raised, expected):
    def fail(rank):
        with distributed.raise_on_all_ranks(OSError):
            if rank in raised:
                raise raised[rank]

    found = on_ranks(lambda rank: error_of(fail, rank))
    for error, start in zip(found, expected, strict=True):
        assert error.startswith(start) and bool(error) == bool(start)


def test_processes_that_diverge_are_told_the_tensor(on_ranks):
    def drift(rank):
        algorithm = make_sac(SPEC, encoder=networks.Standardize)
        for module in (algorithm, algorithm.encoder):
            module.register_buffer("shown", torch.full((2,), float(rank)))
            module.buffers_of_each_rank = ("shown",)
        attach(algorithm)
        check_equal(algorithm)
        if rank == 1:
            algorithm.encoder.get_buffer("mean_D")[2] += 1e-12
        return error_of(check_equal, algorithm)

    for error in on_ranks(drift):
        assert error.startswith("DriftError") and "encoder.mean_D" in error


def test_moments_of_unequal_parts_are_those_of_their_union(on_ranks):
    rows = torch.randn(10, generator=torch.Generator().manual_seed(0)).numpy()
    task = np.array([0] * 5 + [1] * 2 + [0] * 3)

    def moments_of(part):
        moments = Moments(2)
        moments.add(rows[part], task[part])
        return moments.state_dict()

    joined = moments_of(slice(10))
    for found in on_ranks(lambda rank: moments_of([slice(7), slice(7, 10)][rank])):
        for name, value in joined.items():
            torch.testing.assert_close(found[name], value, rtol=1e-14, atol=1e-14)


def test_small_exchanges(on_ranks):
    def exchange(rank):
        parameters = [Parameter(torch.zeros(())) for _ in range(3)]
        parameters[rank].grad = torch.tensor(4.0)
        distributed.average_gradients(parameters)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            distributed.warn("rebuilding environments")
        return {
            "gradients": [None if p.grad is None else p.grad.item() for p in parameters],
            "largest": distributed.largest(torch.tensor([rank, -rank])).tolist(),
            "total": distributed.total(rank + 1),
            "seed": distributed.seed_of_rank(5),
            "warned": str(caught[0].message)[:7],
        }

    one, other = on_ranks(exchange)
    assert one.pop("seed") == 5 != other.pop("seed")
    assert (one.pop("warned"), other.pop("warned")) == ("rank 0:", "rank 1:")
    # the second parameter has a gradient on one rank only; a missing one counts as zero
    assert one == other == {"gradients": [2.0, 2.0, None], "largest": [1, 0], "total": 3}
