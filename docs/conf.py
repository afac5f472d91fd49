"""How Sphinx builds these pages: ``python -m sphinx -n -W --keep-going docs docs/_build``."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]  # the clone's package, not an installed one

from mtrl_lightning import PPO, SAC, BehaviourCloning, __version__  # noqa: E402

project = "mtrl_lightning"
version = release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "from_code",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"mtrl_lightning {version}"
html_static_path = ["_static"]
html_css_files = ["wrap.css"]
html_copy_source = False
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False

# names of other packages: their pages are not read, so that a build needs no network
nitpick_ignore_regex = [(r"py:.*", r"(?!mtrl_lightning).*")]


def prepare_attribute(
    app: Any, what: str, name: str, member: Any, options: Any, lines: list[str]
) -> None:
    """Drop what Python itself says of a named tuple's field; keep the first colon of others."""
    if what not in ("attribute", "data", "property"):
        return
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    # an empty comment, before napoleon reads "What was trained: acts by ..." as "type: description"
    lines[:0] = ["..", ""]


def prefer_constructors() -> None:
    """Let arguments have their own types, not those of the attributes of the same name."""
    for algorithm in (PPO, SAC, BehaviourCloning):
        for argument in inspect.signature(algorithm).parameters:
            vars(algorithm)["__annotations__"].pop(argument, None)


def link_readmes(app: Any, page: str, source: list[str]) -> None:
    """Link READMEs outside of these pages as files: Sphinx takes them for missing pages."""
    link = re.compile(r"\[([^\]]+)\]\((\.\./\S+?/README\.md)(#[\w-]+)?\)")
    source[0] = link.sub(lambda m: f"{{download}}`{m[1].replace('`', '')} <{m[2]}>`", source[0])


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", link_readmes)
    app.connect("autodoc-process-docstring", prepare_attribute, priority=100)
    prefer_constructors()
