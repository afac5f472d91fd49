"""How tasks weight the experts of a mixture, and MOORE's basis; the contract has the equations."""

import json
from functools import partial

import pytest
import torch

from mtrl_lightning.networks import Attention, Clusters, Embedding, TaskEncoder, TopKGate
from mtrl_lightning.networks.language import DESCRIPTIONS
from mtrl_lightning.networks.mixture import WORDS
from mtrl_lightning.networks.moore import orthonormal
from tests.helpers.networks import ENCODERS, SPEC, randomize, uniform
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
