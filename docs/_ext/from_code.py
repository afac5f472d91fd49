"""Directives that take from the code what would otherwise be copied into the pages.

- ``configs`` lists a folder of ``configs/``;
- ``public-names`` lists what the package exports.

A reference to a class by the module that defines it finds the page that documents it under its
public name.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.util.docutils import SphinxDirective

from mtrl_lightning.cli.config_list import head_comment

CONFIGS = Path(__file__).parent.parent.parent / "configs"


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
    app.add_directive("configs", Configs)
    app.add_directive("public-names", PublicNames)
    app.connect("missing-reference", find_public_name)
    return {"version": "1", "parallel_read_safe": True}
