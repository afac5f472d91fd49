"""Mixtures of experts, sets of parameters and networks of tasks.

The contract has the equations.
"""

import json
import math
from functools import partial

import pytest
import torch

from mtrl_lightning.networks import (
    MLP,
    Attention,
    Clusters,
    Embedding,
    OnePerTask,
    PaCo,
    TaskEncoder,
    TopKGate,
)
from mtrl_lightning.networks.language import DESCRIPTIONS
from mtrl_lightning.networks.mixture import WORDS
from mtrl_lightning.networks.moore import orthonormal
from tests.helpers.networks import ENCODERS, IN_DIM, NUM_TASKS, OUT_DIM, SPEC, randomize, uniform
from tests.helpers.specs import spec_of


@pytest.mark.parametrize("assignment", [TopKGate, Attention])
@pytest.mark.parametrize("conditioning", [Embedding, partial(TaskEncoder, width=6)])
def test_the_conditioning_is_detached_and_all_else_learns(assignment, conditioning):
    mixture = ENCODERS["mixture, gate"](
        SPEC, assignment=partial(assignment, conditioning=conditioning)
    )
    frozen = randomize(mixture).assignment.conditioning
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    frozen.requires_grad_(True)  # whoever does this must not train it either
    mixture(uniform(7, 4), torch.arange(7) % 3).square().sum().backward()
    ids = {id(parameter) for parameter in frozen.parameters()}
    for parameter in mixture.parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == (id(parameter) not in ids)


def test_words_are_whole_and_in_names_or_descriptions(tmp_path):
    path = tmp_path / "descriptions.json"
    path.write_text(json.dumps({"opener-v1": "Do it, SLOWLY.", "swing_up": "Unclosed."}))
    words = [["open", "slowly"], ["swing"], ["close", "up"]]
    spec = spec_of(["opener-v3", "swing_up", "open-close"])
    assignment = Clusters(3, spec, words=words, descriptions=str(path))
    assert assignment(torch.arange(3)).tolist() == [[1, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]


def test_every_described_task_has_a_default_word():
    names = list(json.loads(DESCRIPTIONS.read_text()))
    weight_TK = Clusters(10, spec_of(names))(torch.arange(len(names)))
    assert (weight_TK > 0).any(0).all()
    verbs = [group[0] for group in WORDS]
    for name, wanted in {
        "reach-v3": {"reach"},
        "drawer-close-v3": {"close", "push"},
        "peg-insert-side-v3": {"pick", "insert"},
        "cartpole-swingup": {"turn", "stand"},
    }.items():
        weight_K = weight_TK[names.index(name)]
        assert {verbs[k] for k in weight_K.nonzero()[:, 0]} == wanted


def test_moores_basis_of_zeros_has_finite_gradients():
    u_KBH = torch.zeros(3, 2, 4, requires_grad=True)
    basis_KBH = orthonormal(u_KBH)
    (basis_KBH * uniform(3, 2, 4)).sum().backward()
    assert not basis_KBH.any() and u_KBH.grad.isfinite().all()


def test_moores_basis_of_half_precision_is_in_single_precision():
    basis_KBH = orthonormal(uniform(3, 5, 16).bfloat16())
    assert basis_KBH.dtype == torch.float32
    products_BKK = torch.einsum("kbh,lbh->bkl", basis_KBH, basis_KBH)
    torch.testing.assert_close(products_BKK, torch.eye(3).expand(5, 3, 3))


INF, NAN = math.inf, math.nan


def make_paco(num_tasks=3, max_loss=10.0):
    torch.manual_seed(1)
    return PaCo(4, 2, spec_of(num_tasks), width=4, depth=1, num_sets=6, max_loss=max_loss)


def table(network):
    return network.composition.weight.detach().clone().t()


def step(network, losses, tasks=(0, 1, 2), seed=7):
    """Return ``w`` after a step, and the state of the generator."""
    generator = torch.Generator().manual_seed(seed)
    network.after_step(torch.tensor(losses), torch.tensor(tasks), generator)
    return table(network), generator.get_state()


def test_losses_that_explode_are_masked_and_give_no_gradient():
    loss_T = torch.tensor([3.0, 10.0, 10.5, INF, NAN, -INF, -50.0], requires_grad=True)
    masked_T = make_paco().mask_losses(loss_T)
    assert masked_T.tolist() == [3, 10, 0, 0, 0, 0, -50]
    masked_T.sum().backward()
    assert loss_T.grad.tolist() == [1, 1, 0, 0, 0, 0, 1]
    by_default = PaCo(4, 2, spec_of(2), width=4)
    assert by_default.mask_losses(torch.tensor([2999.0, 3001.0])).tolist() == [2999, 0]
    assert make_paco(max_loss=None).mask_losses(torch.tensor([1e9])).tolist() == [1e9]


def test_exploding_tasks_restart_between_the_healthy_ones():
    network = make_paco(num_tasks=5)
    before_TK = table(network)
    after_TK, _ = step(network, [1.0, 11.0, 2.0, NAN], (4, 1, 2, 0))  # task 3 is not trained
    assert torch.equal(after_TK[[2, 3, 4]], before_TK[[2, 3, 4]])
    share_RR = 1 - torch.rand(4, 4, generator=torch.Generator().manual_seed(7))
    for task, row in ((1, 1), (0, 3)):
        of_4, of_2 = share_RR[row, [0, 2]]
        wanted_K = (of_4 * before_TK[4] + of_2 * before_TK[2]) / (of_4 + of_2)
        torch.testing.assert_close(after_TK[task], wanted_K, rtol=1e-6, atol=1e-7)


def test_a_w_that_is_no_number_does_not_spread():
    network = make_paco()
    network.composition.weight.data[:, 0] = NAN
    before_TK = table(network)
    after_TK, _ = step(network, [NAN, 11.0, 1.0])
    torch.testing.assert_close(after_TK, before_TK[[2, 2, 2]])


@pytest.mark.parametrize(
    ("losses", "max_loss"),
    [([1.0, 10.0, -5.0], 10.0), ([11.0, NAN, INF], 10.0), ([1.0, 1e9, NAN], None)],
)
def test_nothing_changes_if_none_explodes_or_all_do(losses, max_loss):
    network = make_paco(max_loss=max_loss)
    before_TK = table(network)
    assert torch.equal(step(network, losses)[0], before_TK)


def test_draws_do_not_depend_on_exploding_tasks():
    states = [step(make_paco(), [1.0, loss, 1.0])[1] for loss in (1.0, 11.0)]
    assert torch.equal(*states)


def one_per_task(architecture=MLP, tasks=None, spec=None, **options):
    network = partial(architecture, width=8, depth=2, **options)
    return OnePerTask(IN_DIM, OUT_DIM, spec or spec_of(NUM_TASKS), make=network, tasks=tasks)


@pytest.mark.parametrize("tasks", [(0, 2), (2, 0), (2,)])
def test_rows_and_groups_of_the_named_tasks_use_their_networks(tasks):
    network = one_per_task(tasks=tasks)
    assert len(network.members) == len(tasks)
    for own in (tasks, tasks[-1:], tasks[:1]):
        task_Rn = torch.tensor(own)[:, None].expand(-1, 3)
        x_RnD = uniform(len(own), 3, IN_DIM)
        found_RnO = network(x_RnD, task_Rn)
        reversed_BO = network(x_RnD.flatten(0, 1).flip(0), task_Rn.flatten().flip(0)).flip(0)
        torch.testing.assert_close(reversed_BO.view_as(found_RnO), found_RnO)
        for place, task in enumerate(own):
            member = network.networks[tasks.index(task)]
            wanted_nO = member(x_RnD[place], torch.zeros(3, dtype=torch.int64))
            torch.testing.assert_close(found_RnO[place], wanted_nO)


@pytest.mark.parametrize(
    ("train_tasks", "tasks"), [((0, 1, 2), None), ((0, 2), None), ((0, 2), (0, 2))]
)
def test_each_trained_network_masks_and_repairs_by_its_own_loss(train_tasks, tasks):
    spec = spec_of(NUM_TASKS, train_tasks=train_tasks)
    network = one_per_task(PaCo, tasks, spec, max_loss=1.0)
    seen = []
    for task, member in zip(tasks or range(NUM_TASKS), network.networks, strict=True):
        member.after_step = lambda loss, task_R, _, task=task: seen.append(
            (task, loss.tolist(), task_R.tolist())
        )
    losses = [0.5, 3.0, 0.25][: len(train_tasks)]
    loss_R = torch.tensor(losses)
    assert network.mask_losses(loss_R).tolist() == [0.5, 0, 0.25][: len(train_tasks)]
    network.after_step(loss_R, torch.tensor(train_tasks), torch.Generator())
    assert seen == [(task, [loss], [0]) for task, loss in zip(train_tasks, losses, strict=True)]
