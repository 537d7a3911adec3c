"""Self-contained HTML pages: text, tables and plots, without scripts or network requests."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.charts import Plot, can_draw
from attnzoo.report.table import Table

Part = str | Table | Plot | None


def write_page(path: Path, title: str, parts: Sequence[Part]) -> Path | None:
    """Write an HTML page atomically, and its plots as PNG into ``pictures`` beside it.

    Args:
        path: File.
        title: Heading, and title of the document.
        parts: Paragraphs, tables and plots, in order; empty ones are left out.

    Returns:
        The file; ``None`` without matplotlib.
    """
    if not can_draw():
        return None
    body = "\n".join(_html(part, path.parent) for part in parts if part)
    template = (files("attnzoo.report") / "page.html").read_text("utf-8")
    page = Template(template).substitute(title=html.escape(title), body=body)
    atomic_write(path, page)
    return path


def _html(part: str | Table | Plot, folder: Path) -> str:
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>"
    if isinstance(part, Table):
        caption = f"<p>{html.escape(part.caption)}</p>" if part.caption else ""
        return f"<h2>{html.escape(part.title)}</h2>{part.html()}{caption}"
    image = b64encode(part.save(folder).read_bytes()).decode()
    return f'<img alt="{html.escape(part.title)}" src="data:image/png;base64,{image}">'
