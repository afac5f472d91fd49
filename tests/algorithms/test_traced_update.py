"""The whole update is traced by ``torch.compile`` as one graph, with results equal in every bit.

Three things are not traced by PyTorch, and done here in another way: noise is drawn before the
update into a tensor that stays the same one, as a ``torch.Generator`` is no argument of a graph's
operations; the kernels of a fused optimizer's step are called without what is around them
(``FusedStep``); the actor's loss leaves its critics' ``requires_grad`` as it is.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.exc import UserError
from torch.optim import Optimizer

from mtrl_lightning.learning import update as updating
from mtrl_lightning.networks import MLP
from tests.helpers import algorithms
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
from tests.helpers.runs import assert_same

pytestmark = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="needs PyTorch 2.13"
)
WARM_UP = 2
"""Updates before: optimizers, metrics and the guard have their tensors after them."""
TRACED = 3


class FusedStep:
    """The kernels of a fused Adam's step, on its parameters and its state.

    PyTorch breaks the graph around every optimizer's ``step`` on purpose, so that the compiler sees
    a graph without gradients (``_use_grad_for_differentiable``), and traces no fused one.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer) -> None:
        (group,) = optimizer.param_groups
        self.parameters = group["params"]
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self.moments = [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq")]
        self.steps = [state["step"] for state in states]
        names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
        self.options = {name: group[name] for name in names}
        self.options["beta1"], self.options["beta2"] = group["betas"]

    @torch.no_grad()
    def step(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_add_(self.steps, 1)
        torch._fused_adam_(
            self.parameters,
            gradients,
            *self.moments,
            [],
            self.steps,
            found_inf=self.found_inf,
            **self.options,
        )
        torch._foreach_sub_(self.steps, [self.found_inf] * len(self.steps))


def batch_of(algorithm, seed):
    batch = make_batch(algorithm.spec, seed=seed)
    if algorithm.collection is None:
        return batch
    generator = torch.Generator().manual_seed(seed)
    names = ("log_prob", "advantage", "value", "target")
    extra = {name: torch.randn(batch.reward_Rn.shape, generator=generator) for name in names}
    extra["unclipped_action"] = batch.action_RnA
    extra["foreign"] = torch.rand(batch.reward_Rn.shape, generator=generator) < 0.2
    return batch._replace(extra=extra)


def traced_whole(algorithm, graphs):
    """Return an algorithm's update as one graph, which is added to the graphs."""
    for update in algorithm.updates:
        update.optimizer = FusedStep(update.optimizer)
        # dynamo does not trace requires_grad_, which saves work and changes no number
        update._frozen = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(algorithm.recorded_update, fullgraph=True, backend=keep)


def end_of_updates(make, graphs=None):
    """Make updates, the last ones as a graph where it is asked for; return all that they change."""
    algorithm = make(make_spec(num_tasks=2))
    optimizers = attach(algorithm)
    noise_RnA = torch.empty_like(batch_of(algorithm, 0).action_RnA)
    algorithm.noise_like = lambda action_RnA: noise_RnA
    update = algorithm.recorded_update
    for seed in range(WARM_UP + TRACED):
        if seed == WARM_UP and graphs is not None:
            update = traced_whole(algorithm, graphs)
        noise_RnA.normal_(generator=torch.Generator().manual_seed(seed))
        update(batch_of(algorithm, seed))
    algorithm.guard.read()
    return {
        "modules": dict(algorithm.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "metrics": algorithm.mean_metrics.state_dict(),
    }


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let the device decide whether a step is left out, and dynamo trace gradients."""
    monkeypatch.setattr(updating, "decides_on_device", lambda device: True)
    monkeypatch.setattr(algorithms, "small_mlp", partial(MLP, width=8, depth=1))  # to trace less
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_sac, make_ppo, make_td3, make_distral, make_bc])
def test_the_whole_update_is_one_graph_with_equal_results(make):
    graphs = []
    found = end_of_updates(make, graphs)
    assert len(graphs) == 1, "the same graph for every batch"
    assert_same(found, end_of_updates(make))


def test_a_number_that_is_read_would_be_seen():
    class Asking(MLP):
        def forward(self, x_BD, task_B):
            y_BO = super().forward(x_BD, task_B)
            return y_BO if float(x_BD.sum()) > 0 else -y_BO

    with pytest.raises(UserError, match="data-dependent"):
        end_of_updates(partial(make_bc, actor=partial(Asking, width=8, depth=1)), [])
