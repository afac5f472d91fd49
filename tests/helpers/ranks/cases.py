"""Updates of one run on several ranks, each with its share of the rows, for equality tests.

``python -m tests.helpers.ranks SIZE FOLDER CASE...`` makes them as ``SIZE`` ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning import auxiliaries, networks
from mtrl_lightning.algorithms import (
    Algorithm,
    Categorical,
    MeanReward,
    ReturnRange,
    Temperature,
)
from mtrl_lightning.auxiliaries import Auxiliary, HiPBMDP
from mtrl_lightning.data.drift import check_equal
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.buffer import batch_of
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Rollout, TransitionBatch, Transitions
from mtrl_lightning.updates.reward_scale import Moments
from tests.helpers.algorithms import (
    NAMES,
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

NUM_UPDATES = 10
RESET_AT = 5
ROWS = 8
"""Rows of each task in the joined batch."""
COPIES = 4
"""Environments of each task in PPO's joined iteration."""
STEPS = 12
ITERATIONS = 3
SPEC = make_spec()


class Decoding(Auxiliary):
    """Decode the observation from the features, whatever the encoder."""

    def __init__(self, spec: EnvSpec, encoder: networks.Encoder) -> None:
        super().__init__(spec, encoder, every=2)
        self.decoder = nn.Linear(encoder.out_dim, spec.observation_space.shape[0])

    def loss(self, batch: TransitionBatch, inputs: Any) -> Tensor:
        features_RnZ = inputs.encoder(batch.observation_RnD, batch.task_Rn)
        error_RnD = self.decoder(features_RnZ) - batch.observation_RnD
        return error_RnD.square().sum(-1).mean(1)


NAMED = SPEC._replace(task_names=NAMES)
MASKED = SPEC._replace(observation_sizes=(4, 2, 4), action_sizes=(1, 2, 2))
STANDARDIZE = {"encoder": networks.Standardize}
OUTLIERS = {"encoder": partial(networks.Standardize, clip=1.5)}


def both(network: Callable[..., Any], **options: Any) -> dict[str, Any]:
    made = partial(network, **options)
    return {"actor": made, "critic": made}


def by(method: str) -> dict[str, Any]:
    return {"actor_gradient": METHODS[method], "critic_gradient": METHODS[method]}


MULTI_HEAD = both(networks.MultiHead, width=8, depth=2, output_bound=0.3)
sac = partial(make_sac, SPEC)
SAC_CASES: dict[str, Callable[[], Algorithm]] = {
    **{f"sac {name}": partial(sac, **by(name)) for name in METHODS},
    "multi_head pcgrad": partial(sac, **MULTI_HEAD, **by("pcgrad")),
    "multi_head mean": partial(sac, **MULTI_HEAD),
    # some losses are above the limit, so that w is reinitialized
    "paco repairs": partial(
        sac, **both(networks.PaCo, width=8, depth=1, num_sets=2, max_loss=2.0, output_bound=0.3)
    ),
    "moore": partial(sac, **both(networks.MOORE, width=8, depth=1, num_experts=2)),
    "care": partial(
        make_sac,
        NAMED,
        encoder=partial(networks.CARE, width=8, depth=1, out_dim=5),
        auxiliaries=[Decoding],
    ),
    "masked bodies, hipbmdp, sac_ae": partial(
        make_sac,
        MASKED,
        encoder=partial(networks.MLPEncoder, width=8, out_dim=5, context=networks.Embedding),
        auxiliaries=[partial(HiPBMDP, width=8), auxiliaries.Reconstruction],
        actor_gradient=METHODS["pcgrad"],
        encoder_tau=0.05,
    ),
    "categorical": partial(sac, value=partial(Categorical, num_bins=11), reward_scale=MeanReward),
    "return range": partial(sac, reward_scale=ReturnRange),
    "masked bodies, standardize per task": partial(make_sac, MASKED, **STANDARDIZE),
    "masked bodies, standardize per task, outliers": partial(make_sac, MASKED, **OUTLIERS),
    "standardize, outliers": partial(sac, **OUTLIERS),
    "standardize, auxiliary, one temperature": partial(
        sac,
        **STANDARDIZE,
        auxiliaries=[Decoding],
        temperature=partial(Temperature, per_task=False),
    ),
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
PPO_CASES: dict[str, Callable[[], Algorithm]] = {
    "ppo": ppo,
    "ppo standardize pcgrad": partial(ppo, **STANDARDIZE, **by("pcgrad"), max_kl=1e-4),
}
CASES = {**SAC_CASES, **PPO_CASES}


@contextmanager
def float64() -> Iterator[None]:
    """Compute in double precision, also where the algorithms ask for single precision."""
    single = torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = single  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def share(rows_Rn: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's rows ``[R, n / size, ...]`` of ``[R, n, ...]``: a part of each task's."""
    return rows_Rn.chunk(size, 1)[rank]


def own_environments(num_tasks: int, rank: int, size: int) -> Tensor:
    """Return a rank's environments of ``COPIES`` for each task, in the order of the tasks."""
    return share(torch.arange(num_tasks * COPIES).view(num_tasks, COPIES), rank, size).flatten()


def vector_step(step: int, rank: int, size: int) -> Transitions:
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


def run_sac(algorithm: Algorithm, rank: int, size: int) -> None:
    noises: list[Tensor] = []
    algorithm.generators.normal_like = lambda *_: noises.pop(0)  # type: ignore[method-assign]
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


def collect(spec: EnvSpec, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return columns ``[S, E]`` of a joined iteration, which are valid, and the tasks ``[E]``."""
    generator = torch.Generator().manual_seed(seed)
    task_E = torch.arange(3).repeat_interleave(COPIES)
    shape = (STEPS, len(task_E))

    def normal(*more: int) -> Tensor:
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


def run_ppo(algorithm: Algorithm, rank: int, size: int) -> None:
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


def result_of(name: str, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """Return the weights, buffers and moments after a case's updates."""
    algorithm = CASES[name]().double()
    for update in algorithm.updates:
        update.make_optimizer = partial(Adam, lr=1e-2)
    attach(algorithm)
    run = run_sac if name in SAC_CASES else run_ppo
    run(algorithm, rank, size)
    found = {
        key: value for key, value in algorithm.state_dict().items() if isinstance(value, Tensor)
    }
    for place, update in enumerate(algorithm.updates):
        assert update.optimizer is not None
        for number, state in update.optimizer.state_dict()["state"].items():
            found |= {f"{place}.{number}.{key}": value for key, value in state.items()}
    metrics = algorithm.drain_metrics()
    found |= {f"metric {key}": torch.tensor(value) for key, value in metrics.items()}
    found["skipped"] = torch.tensor(algorithm.counters.skipped_updates)
    return found


def error_of(call: Callable[[], Any]) -> str:
    """Return the class and message of the exception that a call raises; empty without one."""
    try:
        call()
    except (RuntimeError, OSError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_on(rank: int, failing: int) -> None:
    with distributed.raise_on_all_ranks(OSError):
        if rank == failing:
            raise OSError("the disk is full")


def fail_unexpectedly(rank: int) -> None:
    """Raise on rank 0 what is expected, and on rank 1 what is not."""
    with distributed.raise_on_all_ranks(OSError):
        if rank == 0:
            raise OSError("the disk is full")
        if rank == 1:
            raise TypeError("a bug")


def warned() -> str:
    """Return what a warning of this rank says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distributed.warn("rebuilding environments")
    return str(caught[0].message)


def drifted(rank: int) -> str:
    """Return what is said when rank 1 alone changes a statistic of its encoder."""
    algorithm = make_sac(SPEC, encoder=networks.Standardize)
    algorithm.register_buffer("shown", torch.full((2,), float(rank)))
    algorithm.encoder.register_buffer("shown", torch.full((2,), float(rank)))
    algorithm.encoder.buffers_of_each_rank = ("shown",)
    algorithm.buffers_of_each_rank = ("shown",)
    attach(algorithm)
    check_equal(algorithm)
    if rank == 1:
        algorithm.encoder.get_buffer("mean_D")[2] += 1e-12
    return error_of(lambda: check_equal(algorithm))


def missing_gradients(rank: int) -> list[float | None]:
    """Average gradients of which rank 0 has the first, rank 1 the second, and none the third."""
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(3)]
    if rank < 2:
        parameters[rank].grad = torch.tensor(4.0)
    distributed.average_gradients(parameters)
    return [None if p.grad is None else p.grad.item() for p in parameters]


def moments_of_parts(rank: int) -> dict[str, Tensor]:
    """Add rows 0 to 9 to the moments, of which rank 0 has the first 7 and rank 1 the others."""
    moments = Moments(2)
    rows = torch.randn(10, generator=torch.Generator().manual_seed(0)).numpy()
    task = np.array([0] * 5 + [1] * 2 + [0] * 3)
    own = slice(0, 7) if rank == 0 else slice(7, 10)
    if rank < 2:
        moments.add(rows[own], task[own])
    else:
        moments.add(rows[:0], task[:0])
    return moments.state_dict()


def probes(rank: int) -> dict[str, Any]:
    """Return what a rank sees of several exchanges."""
    return {
        "fails on 0": error_of(lambda: fail_on(rank, 0)),
        "fails on 1": error_of(lambda: fail_on(rank, 1)),
        "fails nowhere": error_of(lambda: fail_on(rank, 99)),
        "fails unexpectedly": error_of(lambda: fail_unexpectedly(rank)),
        "warned": warned(),
        "drifted": drifted(rank),
        "missing gradients": missing_gradients(rank),
        "moments": moments_of_parts(rank),
        "largest": distributed.largest(torch.tensor([rank, -rank])).tolist(),
        "total": distributed.total(rank + 1),
        "seed": distributed.seed_of_rank(5),
    }
