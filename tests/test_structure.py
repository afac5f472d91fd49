"""The counts of the source, on a package small enough to count by hand."""

from tests.structure import Package

FILES = {
    "room/__init__.py": "from mtrl_lightning.room.inner import f as f\n",
    "room/inner.py": "import os\n\n\ndef f():\n    x = 1\n    return x\n",
    "outer.py": (
        '"""Doc."""\nfrom mtrl_lightning.room import f\n\n\n'
        "class A:\n    # a reason\n    def g(self):\n"
        '        """Doc."""\n        from mtrl_lightning import late\n\n'
        "        return late, f\n\n\n"
        "class _B: ...  # noqa\n"
    ),
    "late.py": "from mtrl_lightning import outer\n",
}


def package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "mtrl_lightning" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(tmp_path)


def test_names_of_a_room_are_followed_to_their_file(tmp_path):
    source = package(tmp_path)
    assert source.closure("outer.py") == {"outer.py", "room/inner.py"}
    assert source.chain("late.py") == 3


def test_lines_classes_functions_and_comments_are_counted(tmp_path):
    source = package(tmp_path)
    assert source.lines(["room/inner.py", "late.py"]) == 7
    assert source.public_classes() == 1
    assert sorted(source.function_lengths()) == [2, 3]
    assert source.comments(list(FILES)) == 1
