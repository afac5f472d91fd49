"""Descriptions of tasks, and frozen embeddings of them."""

from __future__ import annotations

import copy
import hashlib
import json
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.networks.conditioning import TaskEncoder
from mtrl_lightning.networks.language import (
    DESCRIPTIONS,
    EMBEDDINGS,
    Language,
    find_name,
    load_embeddings,
)
from tests.helpers.networks import assert_same_output_and_gradients, layers, randomize
from tests.helpers.specs import spec_of

TASKS = {"reach-v2": [1.0, 2], "push-v1": [3, 4.5], "cheetah-run": [-5, 6e-3]}
NAMES = ["cheetah-run", "reach-v3", "push-v3"]


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "embeddings.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_embeddings_come_in_the_order_of_the_tasks(file):
    table = load_embeddings(file(TASKS), [*NAMES, "cheetah-run"])
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, np.float32([[-5, 6e-3], [1, 2], [3, 4.5], [-5, 6e-3]]))


@pytest.mark.parametrize(
    ("name", "known", "wanted"),
    [
        ("reach-v3", ["reach", "reach-v1", "reach-v2", "reach-v3"], "reach-v3"),
        ("reach-v3", ["reach", "reach-v1", "reach-v2"], "reach-v2"),
        ("reach-v3", ["reach", "reach-wall-v3"], "reach"),
        ("reach-v1", ["reach-v3"], "reach-v3"),
        ("reach", ["reach", "reach-v3"], "reach"),
        ("reach-v3", ["reach-wall-v3", "reacher-easy", "Reach"], None),
        ("basketball-v3", ["basket-ball-v1"], "basket-ball-v1"),
        ("disassemble-v3", ["dissassemble-v1"], "dissassemble-v1"),
        (
            "button-press-topdown-v3",
            ["button-press_topdown-v1", "button-press-v1"],
            "button-press_topdown-v1",
        ),
        ("swimmer-swimmer6", ["swimmer-swimmer15", "swimmer-swimmer6"], "swimmer-swimmer6"),
    ],
)
def test_other_versions_of_a_task_stand_for_it(name, known, wanted):
    assert find_name(name, known) == wanted


def test_language_gives_the_tasks_embeddings(file):
    language = Language(spec_of(NAMES), path=file(TASKS))
    assert language.out_dim == 2
    out = language(torch.tensor([2, 0, 0]))
    assert torch.equal(out, torch.tensor([[3, 4.5], [-5, 6e-3], [-5, 6e-3]]))
    assert list(language.parameters()) == []


def test_a_checkpoint_holds_the_embeddings(file):
    before = Language(spec_of(NAMES), path=file(TASKS))
    other = {name: [9, 9] for name in TASKS}
    after = Language(spec_of(NAMES), path=file(other))
    assert not torch.equal(after(torch.arange(3)), before(torch.arange(3)))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert torch.equal(after(torch.arange(3)), before(torch.arange(3)))


def test_encoder_of_language_trains_only_the_perceptron(file):
    language = partial(Language, path=file(TASKS))
    encoder = TaskEncoder(spec_of(NAMES), embedding=language, width=6, depth=2, out_dim=4)
    randomize(encoder).double()
    rows = torch.tensor([[-5, 6e-3], [1, 2], [3, 4.5]]).double()
    linears = [encoder.hidden[0], encoder.hidden[2], encoder.output]
    task_B = torch.tensor([1, 2, 0, 1])
    wanted = torch.stack([layers(rows[task], linears) for task in task_B.tolist()])
    assert_same_output_and_gradients(encoder, encoder(task_B), wanted, 1e-7)  # the table is float32
    assert len(list(encoder.parameters())) == 6


# what the package brings along


def test_all_tasks_are_described_and_embedded():
    descriptions = json.loads(DESCRIPTIONS.read_text())
    embeddings = json.loads(EMBEDDINGS.read_text())
    assert list(descriptions) == list(embeddings)
    assert len(set(descriptions.values())) == len(descriptions)
    assert all(
        sentence == sentence.strip() and sentence.endswith(".")
        for sentence in descriptions.values()
    )
    suite = pytest.importorskip("dm_control.suite")
    assert {"-".join(name) for name in suite.ALL_TASKS} <= set(descriptions)
    metaworld = pytest.importorskip("metaworld")
    assert {name for name in descriptions if name.endswith("-v3")} == set(
        metaworld.ALL_V3_ENVIRONMENTS
    )


def test_the_embeddings_are_of_these_descriptions():
    origin = json.loads(EMBEDDINGS.with_suffix(".origin.json").read_text())
    sentences = json.dumps(json.loads(DESCRIPTIONS.read_text()))
    wanted = hashlib.sha256(sentences.encode()).hexdigest()
    assert origin["descriptions_sha256"] == wanted, "run python -m benchmarks.embed_descriptions"
    assert origin["model"] and origin["sentence-transformers"]


@pytest.mark.parametrize(
    ("task", "near", "far"),
    [
        ("door-open-v3", "door-close-v3", "basketball-v3"),
        ("peg-insert-side-v3", "peg-unplug-side-v3", "faucet-open-v3"),
        ("reach-v3", "reach-wall-v3", "drawer-close-v3"),
        ("walker-walk", "quadruped-walk", "button-press-v3"),
        ("reacher-easy", "reach-v3", "coffee-button-v3"),
    ],
)
def test_tasks_that_are_alike_are_nearer(task, near, far):
    own, one, other = load_embeddings(EMBEDDINGS, [task, near, far])
    assert own @ one > own @ other + 0.1
