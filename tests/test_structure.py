"""The counts of the source, on a package small enough to count by hand."""

from tests.structure import Package, print_columns

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


def package(tmp_path, files=FILES):
    for name, text in files.items():
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


TODAY = {
    "run/loop.py": "",
    "callbacks/rollout.py": "from mtrl_lightning.run import loop\n",
    "algorithms/sac.py": "def f():\n    return 1\n",
    "algorithms/td3.py": "from mtrl_lightning.algorithms import sac\n",
}
FORMER = {
    "callbacks/rollout.py": "from mtrl_lightning.callbacks import driver\n",
    "callbacks/driver.py": "from mtrl_lightning import session\n",
    "session.py": "",
    "algorithms/sac.py": "def f():\n    return 1\n",
}
"""A checkout from before ``run/loop.py`` and TD3."""


def test_a_former_checkout_is_printed_beside_one_of_today(tmp_path, capsys):
    package(tmp_path / "former", FORMER)
    package(tmp_path / "today", TODAY)
    print_columns([tmp_path / "former", tmp_path / "today"])
    output = capsys.readouterr().out
    rows = {line[:36].strip(): line[36:].split("  ") for line in output.splitlines()}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells[""] == ["former", "today"]
    assert cells["run/loop.py and its imports"] == ["3 files, 2 lines", "1 files, 0 lines"]
    assert cells["algorithms/td3.py and its imports"] == ["-", "2 files, 3 lines"]
    assert "networks/moore.py and its imports" not in cells
    assert cells["lines of the core"] == ["4", "4"]
    assert cells["lines of the core, learners"] == ["2", "3"]
    assert cells["lines of the core, the rest"] == ["2", "1"]
