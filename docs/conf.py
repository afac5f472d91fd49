"""How Sphinx builds these pages: ``python -m sphinx -n -W --keep-going docs docs/_build``."""

import inspect
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]  # the clone's package, not an installed one

from mtrl_lightning import __version__  # noqa: E402

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


def skip_member(
    app: Any, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of a named tuple that have no description of their own."""
    is_alias = (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_alias else None


def prefer_constructor(app: Any, what: str, name: str, member: Any, *rest: Any) -> None:
    """Let an argument have the constructor's type, not that of the attribute of the same name."""
    if what == "class":
        for argument in inspect.signature(member.__init__).parameters:
            vars(member).get("__annotations__", {}).pop(argument, None)


def setup(app: Any) -> None:
    """Connect the hooks above."""
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-signature", prefer_constructor, priority=100)
