"""A checkpoint file is data: plain tensors and values, no more of them than its size explains."""

import io
import zipfile
from collections import OrderedDict

import pytest
import torch
from torch import nn

from mtrl_lightning.checkpoints import FORMAT, check_complete, load_checkpoint
from mtrl_lightning.checkpoints.reading import MAX_DEPTH, SECTIONS, check_plain
from mtrl_lightning.errors import ConfigurationError

SIZE = 1 << 20


def written(path, content):
    torch.save(content, path)
    return path


def own(**sections):
    return {"mtrl_lightning": {"format": FORMAT, "counters": {}}, **sections}


def with_attribute(value):
    value.attribute = object()
    return value


def test_plain_values_are_accepted():
    shared = torch.zeros(3)
    check_plain(
        {
            "a": [1, 2.5, None, True, "text", b"bytes", (1, {"b": {1, 2}})],
            "tensors": {"x": shared, "y": shared, "z": shared[1:], "p": nn.Parameter(shared)},
            "flags": torch.tensor([True, False])[::2],
            "empty": torch.zeros(0, dtype=torch.bool),
            "entropy": 2**128,
        },
        SIZE,
        SIZE,
    )


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (torch.zeros(1).expand(1 << 40), "more than a file"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "quantized"),
        (torch.empty(3, device="meta"), "of a device"),
        (with_attribute(torch.zeros(3)), "with attributes"),
        (torch.zeros(1, dtype=torch.bool).expand(1 << 40), "more than a file"),
        (with_attribute(OrderedDict()), "a object"),
        (torch.full((3,), 7, dtype=torch.uint8).view(torch.bool), "boolean"),
        (torch.nn.Linear(1, 1), "a Linear"),
        (object(), "a object"),
        (1 << 5000, "integer of 5,001 bits"),
    ],
)
def test_other_values_are_refused(value, wrong):
    with pytest.raises(ValueError, match=wrong):
        check_plain({"a": [value]}, SIZE, SIZE)


def test_containers_in_one_another_are_limited():
    nested = []
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    check_plain(nested, SIZE, SIZE)
    nested = {"a": nested}
    with pytest.raises(ValueError, match="in one another"):
        check_plain(nested, SIZE, SIZE)


def test_what_is_small_in_a_file_may_not_be_large_in_memory(tmp_path):
    unfolding = [0] * 10
    for _ in range(9):
        unfolding = [unfolding] * 10  # ten thousand million values
    path = written(tmp_path / "small.ckpt", own(a=unfolding))
    assert path.stat().st_size < 10_000
    with pytest.raises(ConfigurationError, match="more than a file of its size"):
        load_checkpoint(path)


def test_a_compressed_file_is_refused(tmp_path):
    path = written(tmp_path / "large.ckpt", own(a=torch.zeros(10_000_000)))
    small = tmp_path / "small.ckpt"
    with (
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    assert small.stat().st_size < 100_000
    with pytest.raises(ConfigurationError, match="is compressed"):
        load_checkpoint(small)


def test_parts_that_overlap_are_refused(tmp_path):
    path = tmp_path / "overlap.ckpt"
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("a/data.pkl", b"x" * 100_000)
        for number in range(99):
            other = zipfile.ZipInfo(f"a/data/{number}")
            first = archive.infolist()[0]
            other.header_offset = first.header_offset
            other.file_size = other.compress_size = first.file_size
            other.CRC = first.CRC
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
    path.write_bytes(saved.getvalue())
    with pytest.raises(ConfigurationError, match="larger than the file"):
        load_checkpoint(path)


def repacked(path, change):
    """Write a checkpoint whose members a function changed."""
    whole = io.BytesIO()
    torch.save(own(a=b"bytes", b={1, 2}, c=nn.Parameter(torch.zeros(3)), d=torch.Size([2])), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for name, content in change({name: old.read(name) for name in old.namelist()}).items():
            new.writestr(name, content)
    return path


def test_an_archive_with_nothing_changed_is_read(tmp_path):
    assert load_checkpoint(repacked(tmp_path / "a.ckpt", dict))["a"] == b"bytes"


def in_place_of_bytes(instructions):
    """Return a change of a checkpoint's pickle: others in place of those that make ``a``."""

    def change(members):
        name = "archive/data.pkl"
        first = members[name].index(b"X\x01\x00\x00\x00aq") + 8
        end = members[name].index(b"X\x01\x00\x00\x00bq")
        pickled = members[name]
        return members | {name: pickled[:first] + instructions + pickled[end:]}

    return change


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value


DOUBLED = b"K\x01\x85r\x00\x01\x00\x00" + b"".join(
    b"j"
    + number.to_bytes(4, "little")
    + b"j"
    + number.to_bytes(4, "little")
    + b"\x86r"
    + (number + 1).to_bytes(4, "little")
    for number in range(256, 326)
)
"""A tuple of two references to a tuple of two references ...: its hash reads 2**70 values."""
ENCODE = b"c_codecs\nencode\n"


@pytest.mark.parametrize(
    ("instructions", "wrong"),
    [
        (b"c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R", "__builtin__.bytearray"),
        (b"ccollections\nCounter\n)R", "collections.Counter"),
        (ENCODE + text(b"x") + text(b"punycode") + b"\x86R", "encode with other arguments"),
        (ENCODE + b"](" + text(b"x") + text(b"punycode") + b"eR", "calls an object"),
        (
            b"(" + text(b"storage") + b"ctorch\nFloatStorage\n)\x85" + text(b"cpu") + b"K\x01tQ",
            "names a storage",
        ),
        (b"NNR", "calls an object"),
        (b"tt", "MARK is missing"),
        (b"\x87\x87", "IndexError"),
        (b"\x8c\x01x", "SHORT_BINUNICODE"),
    ],
)
def test_instructions_that_no_checkpoint_needs_are_refused(tmp_path, instructions, wrong):
    path = repacked(tmp_path / "a.ckpt", in_place_of_bytes(instructions))
    with pytest.raises(ConfigurationError, match=wrong):
        load_checkpoint(path)


SHARED = torch.arange(6.0)
SAVED = {
    "dtypes": [
        torch.zeros(3).to(dtype)
        for dtype in (
            torch.uint16,
            torch.float8_e4m3fn,
            torch.bfloat16,
            torch.complex64,
            torch.bool,
        )
    ],
    "plain": [None, True, 2**100, -3, 0.5, "\ud83d", "x" * 1000, b"bytes", (1, (2,)), {1, "a"}],
    "torch": [torch.Size([2, 3]), torch.device("cpu", 0), torch.float8_e4m3fn, torch.float32],
    "keys": {1: 0, "a": 0, (1, "a"): 0, None: 0, 2.5: 0},
    "views": [SHARED, SHARED[1:3], SHARED.view(2, 3).T, SHARED.conj(), nn.Parameter(SHARED)],
    "module": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(),
    "parameter": nn.Parameter(torch.zeros(2), requires_grad=False),
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("mmap", [True, False])
def test_whatever_plain_values_are_saved_is_read(tmp_path, name, mmap):
    path = written(tmp_path / "a.ckpt", own(a=SAVED[name]))
    found = load_checkpoint(path, mmap=mmap)["a"]
    assert type(found) is type(SAVED[name]) and repr(found) == repr(SAVED[name])


@pytest.mark.parametrize("change", ["before", "after", "comment", "two directories"])
@pytest.mark.parametrize("writer", ["torch", "zipfile"])
def test_an_archive_that_readers_see_differently_is_refused(tmp_path, change, writer):
    path = tmp_path / "a.ckpt"
    if writer == "torch":
        written(path, own())
    else:
        repacked(path, dict)
    load_checkpoint(path)
    content = path.read_bytes()
    place = -50 if writer == "torch" else -6  # of the directory's start: 8 or 4 bytes
    start = int.from_bytes(content[place : place + 4], "little")
    path.write_bytes(
        {
            "before": b"x" + content,
            "after": content + b"x",
            "comment": content[:-2] + b"\x01\x00x",
            "two directories": content[:place]
            + (start + 1).to_bytes(4, "little")
            + content[place + 4 :],
        }[change]
    )
    with pytest.raises(ConfigurationError, match=r"follows|file says|cannot be read"):
        load_checkpoint(path)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("value", [None, 3, "x", torch.zeros(2)])
def test_sections_have_their_types(tmp_path, section, value):
    with pytest.raises(ConfigurationError, match=f"{section} is a"):
        load_checkpoint(written(tmp_path / "a.ckpt", own(**{section: value})))


@pytest.mark.parametrize("version", ["0.4.0", "1.9.5", "x", "", "2", "2.6.6x", 2.6, None])
def test_lightning_converts_nothing_for_a_version_that_a_file_claims(tmp_path, version):
    content = own(**{"pytorch-lightning_version": version})
    with pytest.raises(ConfigurationError, match="sections cannot be restored"):
        load_checkpoint(written(tmp_path / "a.ckpt", content))


@pytest.mark.parametrize("version", ["2.0.0", "2.6.6", "2.7.0.dev20260101", "2.6.0rc1", "10.1"])
def test_versions_that_wrote_checkpoints_are_accepted(tmp_path, version):
    if "dev2026" in version:
        version = "2.7.0.dev0"
    content = own(**{"pytorch-lightning_version": version})
    load_checkpoint(written(tmp_path / "a.ckpt", content))


@pytest.mark.parametrize("value", [torch.zeros(0), torch.zeros(2), "3", 3.0, None, -3, [3]])
def test_the_format_is_a_whole_number(tmp_path, value):
    content = {"mtrl_lightning": {"format": value}}
    with pytest.raises(ConfigurationError, match="the checkpoint's format is"):
        load_checkpoint(written(tmp_path / "a.ckpt", content))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_run_needs_every_section_to_continue(section):
    whole = {name: kind() for name, kind in SECTIONS.items()}
    check_complete(whole)
    del whole[section]
    with pytest.raises(ConfigurationError, match=f"has no {section}"):
        check_complete(whole)
