"""Count the files, lines, functions, imports and comments of the package.

``python -m tests.structure`` counts this checkout; ``python -m tests.structure FOLDER ...`` prints
other checkouts beside it. Files are only parsed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "mtrl_lightning"
ROOT = Path(__file__).parent.parent
PERIPHERY = ("__main__", "api", "cli", "export", "reports", "sweeps", "video")
"""Rooms and files beside the core, which trains."""
ROOMS = {
    "learners": (
        "algorithms",
        "auxiliaries",
        "gradients",
        "learning",
        "networks",
        "products",
    ),
    "environments": ("envs", "rendering"),
    "demonstrations": ("demonstrations",),
}
"""Rooms of the core, present and former: code has moved inside each group, not between them."""
CLOSURES = {
    "algorithms/sac.py": "",
    "algorithms/ppo.py": "",
    "algorithms/td3.py": "",
    "run/loop.py": "callbacks/rollout.py",
    "callbacks/rollout.py": "",
    "networks/moore.py": "",
}
"""Files whose imports are counted, with the file in their place in checkouts that lack them."""


class Package:
    """The source files of a checkout, by their paths inside the package.

    Args:
        root: the checkout.
    """

    def __init__(self, root: Path = ROOT) -> None:
        folder = root / PACKAGE
        self.texts = {
            path.relative_to(folder).as_posix(): path.read_text()
            for path in sorted(folder.rglob("*.py"))
        }
        self.trees = {file: ast.parse(text) for file, text in self.texts.items()}

    def lines(self, files: list[str]) -> int:
        """Return the number of lines of files."""
        return sum(len(self.texts[file].splitlines()) for file in files)

    @functools.cache  # noqa: B019
    def imports(self, file: str) -> set[str]:
        """Return the files that a file imports at its top; names of a room are resolved."""
        found = set()
        for node in self.trees[file].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {self._file_of(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {self._file_of(alias.name, "") for alias in node.names}
        return found - {""}

    def _file_of(self, module: str, name: str) -> str:
        """Return the file that ``from module import name`` reads; empty for other packages."""
        package, _, inner = module.partition(".")
        if package != PACKAGE:
            return ""
        path = inner.replace(".", "/")
        for file in (f"{path}/{name}.py".lstrip("/"), f"{path}.py"):
            if file in self.trees:
                return file
        room = self.trees.get(f"{path}/__init__.py".lstrip("/"), ast.Module([], []))
        sources = {
            alias.name: node.module
            for node in room.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        return self._file_of(sources[name], name) if name in sources else ""

    def closure(self, file: str) -> set[str]:
        """Return the files that a file imports, directly or not, with itself."""
        found = {file}
        waiting = [file]
        while waiting:
            new = self.imports(waiting.pop()) - found
            found |= new
            waiting += new
        return found

    @functools.cache  # noqa: B019
    def chain(self, file: str) -> int:
        """Return the number of files of the longest chain of imports from a file."""
        return 1 + max(map(self.chain, self.imports(file)), default=0)

    def function_lengths(self) -> list[int]:
        """Return the lines of each function's body, without its docstring."""
        return [
            (node.end_lineno or 0) - _body(node)[0].lineno + 1
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]

    def public_classes(self) -> int:
        """Return the number of classes without a leading underscore."""
        return sum(
            isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            for tree in self.trees.values()
            for node in ast.walk(tree)
        )

    def comments(self, files: list[str]) -> int:
        """Return the number of comments, without those for tools."""
        return sum(
            token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:"))
            for file in files
            for token in tokenize.generate_tokens(io.StringIO(self.texts[file]).readline)
        )

    def counts(self) -> Iterator[tuple[str, str]]:
        """Yield a table of all counts."""
        files = list(self.texts)
        core = [file for file in files if _room(file) not in PERIPHERY]
        grouped = {room for rooms in ROOMS.values() for room in rooms}
        rest = [file for file in core if _room(file) not in grouped]
        lengths = self.function_lengths()
        yield "files", f"{len(files)}"
        yield "lines", f"{self.lines(files):,}"
        yield "files of the core", f"{len(core)}"
        yield "lines of the core", f"{self.lines(core):,}"
        for group, rooms in ROOMS.items():
            lines = self.lines([file for file in core if _room(file) in rooms])
            yield f"lines of the core, {group}", f"{lines:,}"
        yield "lines of the core, the rest", f"{self.lines(rest):,}"
        yield "lines of a function, median", f"{statistics.median(lengths):g}"
        yield "lines of a function, longest", f"{max(lengths)}"
        yield "public classes", f"{self.public_classes()}"
        yield "longest import chain, files", f"{max(map(self.chain, files))}"
        yield "comments, share of lines, core", f"{self.comments(core) / self.lines(core):.2%}"
        for file, former in CLOSURES.items():
            start = file if file in self.trees else former
            if start in self.trees:
                closure = list(self.closure(start))
                count = f"{len(closure)} files, {self.lines(closure):,} lines"
                yield f"{file} and its imports", count


def _room(file: str) -> str:
    """Return the folder of a file, or the file's own name at the top of the package."""
    return file.split("/")[0].removesuffix(".py")


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(function) is not None
    return function.body[1:] if has_docstring and len(function.body) > 1 else function.body


def print_columns(roots: list[Path]) -> None:
    """Print the counts of checkouts side by side; those of files that one lacks are left out."""
    columns = [dict(Package(root).counts()) for root in roots]
    print(f"{'':36}", *(f"{root.resolve().name:>24}" for root in roots))
    for name in columns[-1]:
        print(f"{name:36}", *(f"{column.get(name, '-'):>24}" for column in columns))


def main() -> None:
    """Print a table with one column per checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path, help="further checkouts")
    roots = [*parser.parse_args().folder, ROOT]
    print_columns(roots)


if __name__ == "__main__":
    main()
