"""Descriptions of tasks and their embeddings."""

import hashlib
import json

import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.language import (
    DESCRIPTIONS,
    EMBEDDINGS,
    Language,
    find_name,
    load_embeddings,
)
from tests.helpers.specs import spec_of


@pytest.mark.parametrize(
    ("name", "known", "wanted"),
    [
        ("reach-v3", ["reach", "reach-v1", "reach-v2", "reach-v3"], "reach-v3"),
        ("reach-v3", ["reach", "reach-v1", "reach-v2"], "reach-v2"),
        ("reach-v3", ["reach", "reach-wall-v3"], "reach"),
        ("reach-v1", ["reach-v3"], "reach-v3"),
        ("reach-v3", ["reach-wall-v3", "reacher-easy", "Reach"], None),
        ("basketball-v3", ["basket-ball-v1"], "basket-ball-v1"),
        ("disassemble-v3", ["dissassemble-v1"], "dissassemble-v1"),
        ("button-press-topdown-v3", ["button-press_topdown-v1"], "button-press_topdown-v1"),
        ("swimmer-swimmer6", ["swimmer-swimmer15", "swimmer-swimmer6"], "swimmer-swimmer6"),
    ],
)
def test_other_versions_of_a_task_stand_for_it(name, known, wanted):
    assert find_name(name, known) == wanted


def test_embeddings_are_frozen_in_task_order_and_in_checkpoints(tmp_path):
    tasks = {"reach-v2": [1.0, 2], "push-v1": [3, 4.5], "cheetah-run": [-5, 6e-3]}
    path = tmp_path / "embeddings.json"
    other = tmp_path / "other.json"
    path.write_text(json.dumps(tasks))
    other.write_text(json.dumps({name: [9, 9] for name in tasks}))
    spec = spec_of(["cheetah-run", "reach-v3", "push-v3"])
    language, loaded = (Language(spec, path=str(file)) for file in (path, other))
    assert language.out_dim == 2 and list(language.parameters()) == []
    loaded.load_state_dict(language.state_dict())
    wanted = torch.tensor([[-5, 6e-3], [1, 2], [3, 4.5]])
    for made in (language, loaded):
        assert torch.equal(made(torch.arange(3)), wanted)


@pytest.mark.parametrize("content", ["[]", '{"a": [1, 2], "b": [3]}', '{"a": [1], "b": [NaN]}'])
def test_embeddings_that_are_no_vectors_are_refused(tmp_path, content):
    path = tmp_path / "embeddings.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=str(path)):
        Language(spec_of(["a", "b"]), path=str(path))


def test_all_tasks_are_described_and_these_descriptions_embedded():
    descriptions = json.loads(DESCRIPTIONS.read_text())
    assert list(descriptions) == list(json.loads(EMBEDDINGS.read_text()))
    assert len(set(descriptions.values())) == len(descriptions)
    origin = json.loads(EMBEDDINGS.with_suffix(".origin.json").read_text())
    wanted = hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()
    assert origin["descriptions_sha256"] == wanted, "run python -m benchmarks.embed_descriptions"
    suite = pytest.importorskip("dm_control.suite")
    assert {"-".join(name) for name in suite.ALL_TASKS} <= set(descriptions)
    metaworld = pytest.importorskip("metaworld")
    described = {name for name in descriptions if name.endswith("-v3")}
    assert described == set(metaworld.ALL_V3_ENVIRONMENTS)


def test_tasks_that_are_alike_are_nearer():
    names = ["door-open-v3", "door-close-v3", "basketball-v3"]
    own, near, far = load_embeddings(EMBEDDINGS, names)
    assert own @ near > own @ far + 0.1
