"""Pages of HTML from one template: no script, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from mtrl_lightning.reports.charts import Chart, svg_uri
from mtrl_lightning.runs import replacing

REPORT = "report.html"
TEMPLATE = "report.html.jinja"


class Section(NamedTuple):
    """A part of a page under its own heading; it is left out if it is empty."""

    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    table: Sequence[Sequence[str]] = ()
    """The first line is the header."""
    num_texts: int = 1
    """Columns of text, on the left of the table; columns of numbers follow."""
    videos: Sequence[str] = ()
    """Paths relative to the page, with slashes."""
    links: Sequence[str] = ()
    """Paths relative to the page, with slashes."""
    details: str = ""
    """A text that is shown when it is clicked."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing below the title."""
        contents = (self.note, self.charts, self.table, self.videos, self.links, self.details)
        return not any(contents)


class Page(NamedTuple):
    """A whole page."""

    title: str
    facts: Sequence[str]
    """Lines below the title."""
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    refresh_seconds: int = 0
    """After which a browser reloads the page; 0 for a page that is complete."""


def render(page: Page) -> str:
    """Return a page as HTML."""
    environment = Environment(
        loader=PackageLoader("mtrl_lightning.reports", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(page=page, draw=svg_uri)


def write_page(path: Path, page: Page) -> None:
    """Write a page that appears under its name only when it is complete."""
    with replacing(path) as unfinished:
        unfinished.write_text(render(page), encoding="utf-8")
