"""A page of HTML that needs no network: charts, tables and text, all of it escaped.

The script and the style stand in the page. A policy in its head lets the browser run this script
alone, and load nothing but pictures and videos that lie beside the page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from mtrl_lightning.runs import replacing

ASSETS = Path(__file__).parent / "assets"
SIGNIFICANT_DIGITS = 5
BAR_PIXELS = 300
"""Width of a share of 1."""
MAX_POINTS = 300
"""Points of a curve beyond which only some are drawn."""
STEPS = {"name": "environment steps", "key": "x"}
MINUTES = {"name": "minutes", "key": "minutes"}


def text(value: Any) -> str:
    """Return a value as text in which nothing is markup."""
    return html.escape(str(value), quote=True)


def page(title: str, parts: Iterable[str], state: str = "", seconds: float = 0.0) -> str:
    """Return a whole page.

    Args:
        title: of the page; escaped here.
        parts: HTML of its sections, in which texts are escaped.
        state: of what is watched; empty for a page that is not served.
        seconds: between two questions whether the state has changed.
    """
    script = _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " img-src 'self' file: data:; media-src 'self' file:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'"
    )
    watched = f' data-state="{text(state)}" data-seconds="{seconds:g}"' if state else ""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>{_asset('report.css')}</style>",
            "</head>",
            f"<body{watched}>",
            *parts,
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


@functools.cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def write_page(path: Path, content: str) -> None:
    """Write a page that appears under its name only when it is complete."""
    with replacing(path) as unfinished:
        unfinished.write_text(content, encoding="utf-8")


def section(title: str, *content: str) -> str:
    """Return a section with a heading."""
    return f"<section>\n<h2>{text(title)}</h2>\n" + "\n".join(content) + "\n</section>"


class Link(NamedTuple):
    """A text that leads to another file."""

    text: str
    path: str
    """Relative to the page, with slashes."""


Cell = str | Sequence[Link]
"""A cell of a table."""


def html_table(lines: Sequence[Sequence[Cell]], num_texts: int = 1) -> str:
    """Return a table; its first line is the header.

    Args:
        lines: texts of the cells, escaped here, or links.
        num_texts: columns of text, on the left; those of numbers follow.
    """
    head, *body = lines
    rows = [_row("th", head, num_texts), *(_row("td", line, num_texts) for line in body)]
    return '<div class="scroll"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _row(tag: str, cells: Sequence[Cell], num_texts: int) -> str:
    kinds = ["" if place < num_texts else ' class="number"' for place in range(len(cells))]
    shown = [f"<{tag}{kind}>{_cell(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)]
    return f"<tr>{''.join(shown)}</tr>"


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return text(cell)
    return " ".join(f'<a href="{text(quote(one.path))}">{text(one.text)}</a>' for one in cell)


def bars(shares: Mapping[str, float]) -> str:
    """Return a table of shares between 0 and 1, each with a bar, the largest first."""
    rows = [
        f"<tr><td>{text(name)}</td><td class='number'>{share:.1%}</td>"
        f"<td><span class='bar' style='width:{_pixels(share)}px'></span></td></tr>"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _pixels(share: float) -> int:
    return round(BAR_PIXELS * min(max(share, 0.0), 1.0))


def chart(name: str, title: str, groups: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return a chart of which one group of curves is shown at a time.

    Args:
        name: of the chart in the page: letters, digits and hyphens.
        title: what the chart shows.
        groups: each with ``name``, ``curves`` (see ``curve``), and ``bounded`` if its values lie
            between 0 and 1.
        options: ``axes``, the x-axes to choose from, each with ``name``, ``key``, and ``log`` if
            its values are logarithms to base 10, or ``labels`` of the values 0, 1, ...; ``small``;
            ``legend``.
    """
    data = {"id": name, "title": title, "groups": groups, "axes": [STEPS], **options}
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # no text can end the element that it stands in
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return (
        f'<div class="chart" id="{text(name)}"></div>\n'
        f'<script type="application/json" id="{text(name)}-data">{plain}</script>'
    )


def curve(
    name: str,
    x_N: npt.ArrayLike,
    y_N: npt.ArrayLike,
    minutes_N: npt.ArrayLike | None = None,
    bounds_N2: npt.NDArray[np.float64] | None = None,
    bold: bool = False,
    is_line: bool = True,
) -> dict[str, Any]:
    """Return a curve of a chart.

    Args:
        name: in the legend.
        x_N: environment steps, ascending.
        y_N: values; one that is not finite leaves a gap.
        minutes_N: minutes of training, for a second x-axis.
        bounds_N2: the interval around each value.
        bold: whether it stands out, as an average does.
        is_line: whether its points are joined; if not, they may be in any order.
    """
    x_N, y_N = np.asarray(x_N), np.asarray(y_N)
    kept = np.arange(len(x_N))
    if len(kept) > MAX_POINTS:
        kept = np.unique(np.linspace(0, len(x_N) - 1, MAX_POINTS).round().astype(int))
    made: dict[str, Any] = {"name": name, "x": x_N[kept].tolist(), "y": _numbers(y_N[kept])}
    if minutes_N is not None:
        made["minutes"] = _numbers(np.asarray(minutes_N)[kept])
    if bounds_N2 is not None:
        made["low"] = _numbers(bounds_N2[kept, 0])
        made["high"] = _numbers(bounds_N2[kept, 1])
    if bold:
        made["bold"] = True
    if not is_line:
        made["marks"] = True
    return made


def _numbers(values: npt.NDArray[Any]) -> list[float | None]:
    """Return numbers as JSON has them, with the digits that a chart shows."""
    return [
        float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
        for value in values.tolist()
    ]
