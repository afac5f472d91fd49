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
CLOSURES = (
    "algorithms/sac.py",
    "algorithms/ppo.py",
    "run/loop.py",
    "networks/moore.py",
)
"""Files whose imports are counted."""


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
        core = [f for f in files if f.split("/")[0].removesuffix(".py") not in PERIPHERY]
        lengths = self.function_lengths()
        yield "files", f"{len(files)}"
        yield "lines", f"{self.lines(files):,}"
        yield "files of the core", f"{len(core)}"
        yield "lines of the core", f"{self.lines(core):,}"
        yield "lines of a function, median", f"{statistics.median(lengths):g}"
        yield "lines of a function, longest", f"{max(lengths)}"
        yield "public classes", f"{self.public_classes()}"
        yield "longest import chain, files", f"{max(map(self.chain, files))}"
        yield "comments, share of lines, core", f"{self.comments(core) / self.lines(core):.2%}"
        for file in CLOSURES:
            closure = list(self.closure(file))
            yield f"{file} and its imports", f"{len(closure)} files, {self.lines(closure):,} lines"


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(function) is not None
    return function.body[1:] if has_docstring and len(function.body) > 1 else function.body


def main() -> None:
    """Print a table with one column per checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path, help="further checkouts")
    roots = [*parser.parse_args().folder, ROOT]
    columns = [dict(Package(root).counts()) for root in roots]
    print(f"{'':36}", *(f"{root.resolve().name:>24}" for root in roots))
    for name in columns[-1]:
        print(f"{name:36}", *(f"{column[name]:>24}" for column in columns))


if __name__ == "__main__":
    main()
