"""Self-contained HTML pages: text, tables and inline SVG, without scripts or network requests."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.charts import Plot, to_svg


def write_page(path: Path, *, title: str, body: Sequence[str]) -> Path:
    """Write an HTML page atomically.

    Args:
        path: File.
        title: Title of the document.
        body: HTML elements, in order.
    """
    folder = files("attnzoo.report")
    parts = {
        "style": (folder / "page.css").read_text("utf-8"),
        "title": html.escape(title),
        "body": "\n".join(body),
    }
    page = Template((folder / "page.html").read_text("utf-8")).substitute(parts)
    atomic_write(path, page)
    return path


def heading(text: str, level: int = 2) -> str:
    """Return a heading element."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str, *, muted: bool = False) -> str:
    """Return a paragraph element, in a muted colour if asked for."""
    kind = ' class="muted"' if muted else ""
    return f"<p{kind}>{html.escape(text)}</p>"


def footer(text: str) -> str:
    """Return a footer element."""
    return f"<footer>{paragraph(text)}</footer>"


def reasons(title: str, found: Sequence[tuple[str, str]]) -> str:
    """Return a titled list of names and reasons; empty without any."""
    items = "".join(
        f"<li><b>{html.escape(name)}</b>: {html.escape(reason)}</li>" for name, reason in found
    )
    return f"{heading(title)}<ul>{items}</ul>" if items else ""


def plots_html(plots: Sequence[Plot]) -> str:
    """Return plots with their headings, side by side where the page is wide enough."""
    sections = "".join(
        f"<section>{heading(plot.title)}{paragraph(plot.text, muted=True)}"
        f'<figure class="plot">{to_svg(plot)}</figure></section>'
        for plot in plots
    )
    return f'<div class="plots">{sections}</div>' if sections else ""
