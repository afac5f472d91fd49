"""Directives that take from the code what would otherwise be copied into the pages.

- ``options`` lists a class's constructor arguments, with the defaults of its signature and the
  descriptions of its docstring, and adds when to change each;
- ``configs`` lists a folder of ``configs/``;
- ``public-names`` lists what the package exports.

A reference to a class by the module that defines it finds the page that documents it under its
public name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.util.docutils import SphinxDirective

from mtrl_lightning.cli.config_list import head_comment

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def described_arguments(docstring: str) -> dict[str, str]:
    """Return the descriptions of the ``Args:`` section of a Google-style docstring, by name."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\w+: )", section.group(1) if section else "", flags=re.MULTILINE)
    named = (entry.partition(": ") for entry in entries if entry.strip())
    return {name.strip(): " ".join(text.split()) for name, _, text in named}


def constructors(kind: type) -> list[type]:
    """Return a class and the bases whose options it inherits by ``**options``."""
    found = []
    for base in kind.__mro__:
        if "__init__" in vars(base):
            found.append(base)
            parameters = inspect.signature(base).parameters.values()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break
    return found


def described_options(kinds: list[type]) -> dict[str, str]:
    """Return the descriptions of a class's options, its own first, by name."""
    found: dict[str, str] = {}
    for kind in kinds:
        inherited = described_arguments(inspect.getdoc(kind) or "")
        found |= {name: text for name, text in inherited.items() if name not in found}
    parameters = [p for kind in kinds for p in inspect.signature(kind).parameters.values()]
    names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    return {name: text for name, text in found.items() if name in names}


def default_texts(kind: type) -> dict[str, str]:
    """Return the default of each keyword of a constructor, as YAML or as its source says it."""
    source = textwrap.dedent(inspect.getsource(kind.__init__))  # type: ignore[misc]
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    values = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    values |= dict(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    names = vars(importlib.import_module(kind.__module__))
    return {
        argument.arg: _text(value, ast.get_source_segment(source, value) or "", names)
        for argument, value in values.items()
        if value is not None
    }


def _text(node: ast.expr, source: str, names: Mapping[str, Any]) -> str:
    # the signature is of no use: autodoc replaces its defaults
    if isinstance(node, ast.Lambda):  # it builds an optimizer: ``lambda p: Adam(p, lr=3e-4)``
        return re.sub(r"^lambda \w+: (\w+)\(\w+, ", r"\1(", source)
    value = names[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return format(value, "_")
    return value.__name__ if isinstance(value, type) else str(value)


class Options(SphinxDirective):
    """List the options of a class; each line of the content says when to change one of them.

    A line is ``name: when``. A line without an option is an error; an option without a line stands
    alone.
    With ``own``, inherited options are left out.
    """

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "prefix": directives.unchanged,
        "skip": directives.unchanged,
        "own": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Return a definition list."""
        path = self.arguments[0]
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        kinds = [kind] if "own" in self.options else constructors(kind)
        described = described_options(kinds)
        for skipped in self.options.get("skip", "").split():
            described.pop(skipped)
        when = dict(line.split(": ", 1) for line in self.content if line.strip())
        unknown = ", ".join(sorted(set(when) - set(described)))
        if unknown:
            raise self.error(f"{path}: lines without an option: {unknown}")
        defaults = {n: text for base in reversed(kinds) for n, text in default_texts(base).items()}
        prefix = self.options.get("prefix", "")
        lines: list[str] = []
        for option, text in described.items():
            default = f" = `{defaults[option]}`" if option in defaults else ""
            lines += [f"`{prefix}{option}`{default}", f": {_sentence(text)}", ""]
            if option in when:
                lines += [f"  *When to change it:* {_sentence(when[option])}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Configs(SphinxDirective):
    """List the files of a folder of ``configs/`` with the comments at their heads."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a definition list."""
        folder = self.arguments[0]
        lines: list[str] = []
        files = sorted((CONFIGS / folder).glob("*.yaml"))
        if not files:
            raise self.error(f"configs/{folder} has no files")
        for file in files:
            self.env.note_dependency(str(file))
            text = " ".join(head_comment(file))
            lines += [f"`{folder}/{file.name}`", f": {_sentence(text)}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class PublicNames(SphinxDirective):
    """List what ``mtrl_lightning`` itself exports, with references."""

    def run(self) -> list[nodes.Node]:
        """Return a paragraph."""
        package = importlib.import_module("mtrl_lightning")
        roles = [
            f"{{py:obj}}`{name} <mtrl_lightning.{package._HOMES[name]}.{name}>`"
            for name in package.__all__
        ]
        return self.parse_text_to_nodes(", ".join(roles) + ".")


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith((".", ":")) else f"{text}."


def find_public_name(
    app: Sphinx, env: Any, node: pending_xref, contents: nodes.TextElement
) -> nodes.Element | None:
    """Find ``mtrl_lightning.networks.MLP`` for ``mtrl_lightning.networks.mlp.MLP``.

    Annotations name the module that defines a class; the pages have its public name. A class that
    exists and has no page becomes plain text.
    """
    domain = env.get_domain("py")
    wanted = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or not wanted:
        return None
    classes = _documented_classes(domain).get(wanted, [])
    if len(classes) == 1:
        return domain.resolve_xref(
            env, node["refdoc"], app.builder, "obj", classes[0], node, contents
        )
    return contents if _exists(str(node["reftarget"])) else None


@cache
def _documented_classes(domain: PythonDomain) -> dict[str, list[str]]:
    """Return the classes by their names without modules: references come after all pages."""
    found: dict[str, list[str]] = {}
    for path, documented in domain.objects.items():
        if documented.objtype in ("class", "exception"):
            found.setdefault(path.rpartition(".")[2], []).append(path)
    return found


@cache
def _exists(path: str) -> bool:
    """Return whether the code has this name, as a class that no page documents."""
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, ValueError):
        return False


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("options", Options)
    app.add_directive("configs", Configs)
    app.add_directive("public-names", PublicNames)
    app.connect("missing-reference", find_public_name)
    return {"version": "1", "parallel_read_safe": True}
