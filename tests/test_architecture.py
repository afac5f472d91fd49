"""The plan of the package, checked with ``ast``: imports, annotations, docs, safe loading."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtrl_lightning
from mtrl_lightning.cli.commands import COMMANDS
from tests import structure

PACKAGE = Path(mtrl_lightning.__file__).parent
SOURCE = structure.Package()
TREES = SOURCE.trees
BENCHMARKS = {
    f"benchmarks/{path.name}": ast.parse(path.read_text())
    for path in (PACKAGE.parent / "benchmarks").glob("*.py")
}

BASE = {
    "types",
    "spec",
    "schema",
    "checks",
    "counters",
    "devices",
    "schedules",
    "errors",
    "formats",
    "resources",
    "cores",
    "progress",
    "saved_spec",
    "signatures",
    "ranks",
}
ROOMS = {
    "envs",
    "rollout",
    "replay",
    "demonstrations",
    "networks",
    "gradients",
    "auxiliaries",
    "learning",
    "algorithms",
    "run",
    "callbacks",
    "launch",
    "checkpoints",
    "video",
    "reports",
    "sweeps",
}
MAY_IMPORT: dict[str, set[str]] = {
    "envs": set(),
    "rollout": {"envs"},
    "video": {"envs", "rollout"},
    "replay": {"checkpoints"},
    "demonstrations": {"envs", "rollout", "replay", "runs"},
    "networks": set(),
    "gradients": set(),
    "auxiliaries": {"networks"},
    "learning": {"networks", "gradients", "auxiliaries"},
    "algorithms": {"networks", "gradients", "auxiliaries", "learning", "checkpoints"},
    "checkpoints": set(),
    "loading": {"algorithms", "checkpoints", "runs"},
    "run": {"envs", "rollout", "replay", "demonstrations", "algorithms", "checkpoints"},
    "callbacks": {
        "run",
        "precision",
        "rollout",
        "replay",
        "algorithms",
        "envs",
        "runs",
        "checkpoints",
        "video",
        "reports",
        "learning",
    },
    "launch": {"run", "callbacks", "algorithms", "replay", "runs", "checkpoints"},
    "reports": {"runs"},
    "export": {
        "loading",
        "algorithms",
        "run",
        "callbacks",
        "rollout",
        "replay",
        "demonstrations",
        "checkpoints",
        "reports",
        "runs",
        "__version__",
    },
    "api": {
        "launch",
        "run",
        "callbacks",
        "algorithms",
        "envs",
        "loading",
        "rollout",
        "replay",
    },
    "cli": {*ROOMS, "export", "loading", "run", "runs", "__version__"},
    "__main__": {"cli"},
    "sweeps": {"reports", "runs", "__main__"},
    "runs": set(),
    "precision": {"networks"},
    "__init__": set(),
    **{name: set() for name in BASE - {"ranks"}},
    "ranks": {"checkpoints"},
}
OUTSIDE = {"benchmarks", "tests"}
"""What lies beside the package in the repository and is not installed with it."""
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
USE_TORCH = {"devices", "resources"}
"""Files of the base that do."""
FORBIDDEN_LIBRARIES = {
    "envs": {"torch", *LIGHTNING},
    "reports": {"torch", *LIGHTNING},
    "networks": LIGHTNING,
    "gradients": LIGHTNING,
    "checkpoints": LIGHTNING,
    "precision": LIGHTNING,
    **{name: {"torch", *LIGHTNING} for name in BASE - USE_TORCH - {"ranks"}},
    **dict.fromkeys(USE_TORCH, LIGHTNING),
}


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def module_of(file: str) -> str:
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["mtrl_lightning", *parts])


def imported_modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide who imports whom"
        assert node.module is not None
        if node.module == "mtrl_lightning":
            yield from (f"mtrl_lightning.{alias.name}" for alias in node.names)
        else:
            yield node.module


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports(tree: ast.AST, with_type_checking: bool = True) -> Iterator[str]:
    for child in ast.iter_child_nodes(tree):
        if not with_type_checking and is_type_checking(child):
            continue
        yield from imported_modules(child)
        yield from imports(child, with_type_checking)


def public_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    starred = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
    return [argument for argument in [*named, *starred] if argument.arg not in ("self", "cls")]


def documented_arguments(docstring: str) -> dict[str, str]:
    """Names and descriptions of the ``Args:`` section of a docstring."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(
        r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?: *(.*)$", section.group(1), re.MULTILINE
    )
    return dict(entries)


def test_the_files_are_found():
    assert {
        "spec.py",
        "algorithms/sac.py",
        "replay/storage.py",
        "networks/mlp.py",
        "cli/lightning_cli.py",
    } <= set(TREES)


def test_every_file_has_a_place_in_the_plan():
    assert {room_of(file) for file in TREES} <= set(MAY_IMPORT)


def forbidden_rooms(file: str, tree: ast.Module) -> Iterator[str]:
    room = room_of(file)
    for module in imports(tree):
        parts = module.split(".")
        if parts[0] in OUTSIDE:
            yield f"{file} imports {module}"
        if parts[0] != "mtrl_lightning":
            continue
        if room == "__init__":
            continue
        if parts[1] not in {room, *BASE, *MAY_IMPORT[room]}:
            yield f"{file} imports {module}"


def test_rooms_import_only_those_that_the_plan_allows():
    assert [wrong for file, tree in TREES.items() for wrong in forbidden_rooms(file, tree)] == []


def test_no_two_rooms_import_each_other():
    layers = {room: MAY_IMPORT[room] & ROOMS for room in ROOMS}
    assert set(graphlib.TopologicalSorter(layers).static_order()) == ROOMS


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("replay/buffer.py", "from mtrl_lightning.envs.benchmarks.benchmark import Benchmark"),
        ("run/session.py", "from mtrl_lightning.callbacks import RolloutCallback"),
        ("algorithms/sac.py", "import mtrl_lightning.replay"),
        ("networks/mlp.py", "from mtrl_lightning import gradients"),
        ("cli/lightning_cli.py", "from benchmarks import faults"),
        ("callbacks/common.py", "import tests.helpers.fakes"),
        ("schedules.py", "def f():\n    from mtrl_lightning.rollout import Collector"),
    ],
)
def test_a_forbidden_import_is_found(file, line):
    assert len(list(forbidden_rooms(file, ast.parse(line)))) == 1


LOADING = {
    "algorithms/arguments.py",
    "algorithms/description.py",
    "algorithms/rebuilding.py",
    "algorithms/state.py",
    "loading.py",
}
"""Files that nobody opens to read how an algorithm learns."""


@pytest.mark.parametrize("name", ["sac", "td3", "distral", "ppo"])
def test_a_reader_of_an_algorithm_opens_nothing_of_checkpoints(name):
    reached = SOURCE.closure(f"algorithms/{name}.py")
    assert "algorithms/algorithm.py" in reached
    assert [file for file in reached if file in LOADING or file.startswith("checkpoints/")] == []


def test_rooms_leave_out_the_libraries_that_they_must_not_know():
    wrong = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        for module in imports(tree, with_type_checking=False)
        if module.split(".")[0] in FORBIDDEN_LIBRARIES.get(room_of(file), set())
    ]
    assert wrong == []


def test_the_package_itself_imports_its_parts_only_when_they_are_asked_for():
    found = set(imports(TREES["__init__.py"], with_type_checking=False))
    assert found == {"__future__", "importlib", "typing"}


@pytest.mark.parametrize(
    "modules",
    [
        [module_of(file) for file in TREES if room_of(file) == "envs"],
        ["mtrl_lightning.__main__", *COMMANDS.values()],
    ],
    ids=["environments", "commands"],
)
def test_environments_and_commands_start_without_torch(modules):
    loaded = "[name for name in ('torch', 'lightning') if name in sys.modules]"
    code = f"import sys, {', '.join(modules)}\nprint({loaded})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "[]"


def test_rooms_below_the_run_start_without_lightning():
    rooms = ("rollout", "replay", "networks", "gradients", "checkpoints")
    modules = ", ".join(f"mtrl_lightning.{room}" for room in rooms)
    code = f"import sys, {modules}\nprint('lightning' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "False"


def undocumented(node: ast.ClassDef) -> Iterator[str]:
    documented = documented_arguments(ast.get_docstring(node) or "")
    yield from (
        f"{node.name}: {name} is not described"
        for name, text in documented.items()
        if not text.strip()
    )
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            taken = [argument.arg for argument in arguments(function)]
            yield from (
                f"{node.name}: {name} is missing" for name in taken if name not in documented
            )
            if function.args.kwarg is None:
                yield from (
                    f"{node.name}: {name} is no argument"
                    for name in documented
                    if name not in taken
                )


def test_constructor_arguments_are_documented_in_their_class():
    wrong = [
        f"{file}: {what}"
        for file, tree in TREES.items()
        for node in public_classes(tree)
        for what in undocumented(node)
    ]
    assert wrong == []


def calls_of(tree: ast.AST, library: set[str], function: str) -> list[ast.Call]:
    """Calls of ``library.function(...)``, and of ``function(...)`` imported from the library."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in library
        for alias in node.names
        if alias.name == function
    }
    spelled = {f"{name}.{function}" for name in library} | imported
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in spelled
    ]


def constant(call: ast.Call, keyword: str) -> object:
    values = [k.value for k in call.keywords if k.arg == keyword]
    return values[0].value if values and isinstance(values[0], ast.Constant) else "not given"


@pytest.mark.parametrize(
    ("library", "function", "keyword", "safe"),
    [
        ({"torch"}, "load", "weights_only", True),
        ({"np", "numpy"}, "load", "allow_pickle", False),
        ({"self.trainer", "trainer"}, "fit", "weights_only", True),
        ({"self.trainer"}, "validate", "weights_only", True),
    ],
)
def test_files_are_read_without_executing_what_is_in_them(library, function, keyword, safe):
    calls = {
        f"{file}:{call.lineno}": constant(call, keyword)
        for file, tree in {**TREES, **(BENCHMARKS if function == "load" else {})}.items()
        for call in calls_of(tree, library, function)
    }
    assert len(calls) >= 1
    assert {where: given for where, given in calls.items() if given is not safe} == {}


def test_pickle_is_used_only_between_an_environment_and_its_worker():
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    wrong = [
        file
        for file, tree in TREES.items()
        if room_of(file) != "envs" and {module.split(".")[0] for module in imports(tree)} & unsafe
    ]
    assert wrong == []
