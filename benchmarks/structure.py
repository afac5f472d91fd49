"""Count what a reader of the package meets: files, functions, imports, comments.

``python -m benchmarks.structure`` counts this checkout; ``--root FOLDER ...`` counts others beside
it, such as one of an earlier commit. Nothing is imported or executed: files are read with ``ast``.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "mtrl_lightning"
PERIPHERY = ("cli", "export", "reports", "sweeps", "video", "__main__", "api", "quiet")
"""Rooms and files that are not the core: nobody opens them to read how a run trains."""
CLOSURES = (
    "algorithms/sac",
    "algorithms/ppo",
    "algorithms/td3",
    "run/loop",
    "callbacks/rollout",
    "networks/moore",
)
"""Files whose own code, and all that it imports from the package, is counted."""


class Package:
    """The source files of one checkout.

    Args:
        root: the folder that holds ``mtrl_lightning/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root / PACKAGE
        self.files = {
            path.relative_to(self.root).with_suffix("").as_posix(): path.read_text()
            for path in sorted(self.root.rglob("*.py"))
        }
        self.trees = {name: ast.parse(text) for name, text in self.files.items()}
        self.imports = {name: self._imports(tree) for name, tree in self.trees.items()}

    def core(self) -> list[str]:
        """Return the names of the files of the core."""
        return [name for name in self.files if name.split("/")[0] not in PERIPHERY]

    def lines(self, names: list[str]) -> int:
        """Return the number of lines of some files."""
        return sum(len(self.files[name].splitlines()) for name in names)

    def functions(self) -> list[int]:
        """Return the number of lines of each function, without its docstring and signature."""
        return [
            node.end_lineno - _first_statement(node).lineno + 1  # type: ignore[operator]
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]

    def public_classes(self) -> int:
        """Return the number of classes whose name begins with a letter."""
        return sum(
            isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            for tree in self.trees.values()
            for node in ast.walk(tree)
        )

    def comment_share(self, names: list[str]) -> float:
        """Return the share of the lines that have a comment; directives for tools do not count."""
        comments = sum(
            token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:"))
            for name in names
            for token in tokenize.generate_tokens(io.StringIO(self.files[name]).readline)
        )
        return comments / self.lines(names)

    def closure(self, name: str) -> list[str]:
        """Return the files that a file imports, directly or not, with itself."""
        found = {name}
        waiting = [name]
        while waiting:
            new = self.imports[waiting.pop()] - found
            found |= new
            waiting += new
        return sorted(found)

    def longest_chain(self) -> int:
        """Return the number of files of the longest chain of imports."""
        order = _layers(self.imports)
        longest: dict[str, int] = {}
        for name in order:
            known = [longest[other] for other in self.imports[name] if other in longest]
            longest[name] = 1 + max(known, default=0)
        return max(longest.values())

    def _imports(self, tree: ast.Module) -> set[str]:
        """Return the files that a file imports when it is imported; names of a package count."""
        found = set()
        for module, name in _imported(tree):
            found |= self._file_of(module, name)
        return found

    def _file_of(self, module: str, name: str | None) -> set[str]:
        parts = module.split(".")
        if parts[0] != PACKAGE:
            return set()
        path = "/".join(parts[1:])
        if name is not None:
            inside = f"{path}/{name}".strip("/")
            if inside in self.files:
                return {inside}
            if f"{inside}/__init__" in self.files:
                return set()
        if path in self.files:
            return {path}
        package = f"{path}/__init__".strip("/")
        return self._origin(package, name) if package in self.files else set()

    def _origin(self, package: str, name: str | None) -> set[str]:
        """Return the file that a name of a package comes from."""
        for module, imported in _imported(ast.parse(self.files[package])):
            if imported == name and name is not None:
                return self._file_of(module, imported)
        return set()


def _imported(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yield module and name of each import at the top of a file, without those for types."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def _layers(imports: dict[str, set[str]]) -> list[str]:
    """Return the files, each after those that it imports."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for other in sorted(imports[name]):
            visit(other)
        order.append(name)

    for name in sorted(imports):
        visit(name)
    return order


def _first_statement(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    has_docstring = ast.get_docstring(node) is not None
    return node.body[1] if has_docstring and len(node.body) > 1 else node.body[0]


def measured(package: Package) -> dict[str, str]:
    """Return the counts of a checkout by their names."""
    functions = package.functions()
    core = package.core()
    everything = list(package.files)
    rows = {
        "files": f"{len(everything)}",
        "lines": f"{package.lines(everything):,}",
        "files of the core": f"{len(core)}",
        "lines of the core": f"{package.lines(core):,}",
        "functions": f"{len(functions):,}",
        "lines of a function, median": f"{statistics.median(functions):g}",
        "lines of a function, longest": f"{max(functions)}",
        "public classes": f"{package.public_classes()}",
        "longest import chain, files": f"{package.longest_chain()}",
        "comments, share of lines, core": f"{package.comment_share(core):.2%}",
    }
    for name in CLOSURES:
        if name in package.files:
            closure = package.closure(name)
            rows[f"{name}.py and what it imports"] = (
                f"{len(closure)} files, {package.lines(closure):,} lines"
            )
    return rows


def main() -> None:
    """Print a table with a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent.parent
    parser.add_argument("--root", nargs="*", type=Path, default=[], help="further checkouts")
    roots = [*parser.parse_args().root, here]
    columns = [measured(Package(root)) for root in roots]
    names = list(dict.fromkeys(name for column in columns for name in column))
    width = max(len(name) for name in names)
    print(f"{'':<{width}}", *(f"{root.resolve().name:>28}" for root in roots))
    for name in names:
        print(f"{name:<{width}}", *(f"{column.get(name, '-'):>28}" for column in columns))


if __name__ == "__main__":
    main()
