"""How tasks weight the experts of a mixture; its equation is in the contract."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from mtrl_lightning.networks import Attention, Clusters, Embedding, TaskEncoder, TopKGate
from mtrl_lightning.networks.language import DESCRIPTIONS
from mtrl_lightning.networks.mixture import WORDS
from tests.helpers.networks import ENCODERS, SPEC, randomize, uniform
from tests.helpers.specs import spec_of


@pytest.mark.parametrize("num_chosen", [1, 2, 4])
def test_a_gate_weights_the_experts_with_the_highest_scores(num_chosen):
    gate = randomize(TopKGate(4, spec_of(3), num_chosen=num_chosen))
    weight_TK, score_TK = gate(torch.arange(3)), gate.scores()
    chosen_TK = score_TK >= score_TK.sort(descending=True).values[:, num_chosen - 1 : num_chosen]
    power_TK = torch.where(chosen_TK, score_TK.exp(), 0)
    torch.testing.assert_close(weight_TK, power_TK / power_TK.sum(1, keepdim=True))


@pytest.mark.parametrize("assignment", [TopKGate, Attention])
@pytest.mark.parametrize("conditioning", [Embedding, partial(TaskEncoder, width=6)])
def test_the_conditioning_is_detached_and_all_else_learns(assignment, conditioning):
    mixture = ENCODERS["mixture, gate"](
        SPEC, assignment=partial(assignment, conditioning=conditioning)
    )
    frozen = randomize(mixture).assignment.scores.conditioning
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
