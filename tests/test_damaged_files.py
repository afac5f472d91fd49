"""A damaged checkpoint or replay file gives one error that names the file."""

import pytest
import torch

from mtrl_lightning import load_policy
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import SHORT, fails


@pytest.fixture
def last(command_line):
    command_line.finished(*SHORT)
    return command_line.folder() / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("mmap", [True, False])
def test_truncated_checkpoint_is_refused(last, mmap):
    content = last.read_bytes()
    for twentieth in range(20):
        path = last.with_name("truncated.ckpt")
        path.write_bytes(content[: len(content) * twentieth // 20])
        with pytest.raises(ConfigurationError, match=r"truncated\.ckpt"):
            load_checkpoint(path, mmap)


def test_flipped_bit_of_a_weight_is_refused(last):
    weights = torch.load(last, weights_only=True)["state_dict"].values()
    content = bytearray(last.read_bytes())
    content[content.index(max(weights, key=torch.numel).numpy().tobytes())] ^= 1
    last.with_name("flipped.ckpt").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"flipped\.ckpt"):
        load_policy(last.with_name("flipped.ckpt"))


def test_flipped_byte_of_a_replay_file_is_refused(command_line, capsys, last):
    chunk = sorted((last.parent.parent / "replay").glob("*.npy"))[0]
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 255
    chunk.write_bytes(content)
    code, error = fails(command_line, capsys, "fit", *SHORT, f"--ckpt_path={last}")
    assert code == 2 and f"{chunk} is damaged" in error


@pytest.mark.parametrize(
    "keys",
    [("mtrl_lightning", "counters"), ("ReplayData", "collector", "running"), ("optimizer_states",)],
    ids=".".join,
)
def test_missing_key_is_one_error(command_line, capsys, last, keys):
    saved = content = torch.load(last, weights_only=True)
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = {}
    path = last.with_name("changed.ckpt")
    torch.save(saved, path)
    code, error = fails(command_line, capsys, "fit", *SHORT, f"--ckpt_path={path}")
    assert code == 2 and f"{path} is damaged or from another version" in error
