"""One self-contained HTML page: text, tables and plots that can be pointed at, no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from attnzoo.report.whole import write_whole

COLOURS = 10  # after which they come again, with other dashes
WITHOUT_PLOTLY = "no report without plotly (pip install attnzoo[report])"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot with what stands above it.

    Attributes:
        name: Of its picture, where it is saved as one.
        title: Above it.
        text: Under the title.
        figure: Of plotly.
    """

    name: str
    title: str
    text: str
    figure: Any


def can_plot() -> bool:
    """Whether plotly is there."""
    return find_spec("plotly") is not None


def write_page(path: Path, *, title: str, body: Sequence[str]) -> Path:
    """Write a page, whole or not at all.

    Args:
        path: Of the page.
        title: In its head.
        body: HTML, in order; plots by ``plots_html``.
    """
    from plotly.offline import get_plotlyjs

    here = files("attnzoo.report")
    parts = {
        "style": (here / "page.css").read_text("utf-8"),
        "script": (here / "page.js").read_text("utf-8"),
        "title": html.escape(title),
        "plotly": get_plotlyjs(),
        "body": "\n".join(body),
    }
    page = Template((here / "page.html").read_text("utf-8")).substitute(parts)
    write_whole(path, page)
    return path


def heading(text: str, level: int = 2) -> str:
    """Return a heading."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str, *, soft: bool = False) -> str:
    """Return a paragraph, quieter if ``soft``."""
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{html.escape(text)}</p>"


def footer(text: str) -> str:
    """Return what stands at the end."""
    return f"<footer>{paragraph(text)}</footer>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls by itself where it is too wide."""
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def reasons(title: str, found: Sequence[tuple[str, str]]) -> str:
    """Return a list of names and why something is not there; nothing where none is missing."""
    rows = "".join(
        f"<li><b>{html.escape(name)}</b>: {html.escape(reason)}</li>" for name, reason in found
    )
    return f"{heading(title)}<ul>{rows}</ul>" if rows else ""


def plots_html(plots: Sequence[Plot]) -> str:
    """Return plots one under another, each with its title."""
    import plotly.io as pio

    config = {"displaylogo": False, "responsive": True}
    return "".join(
        f"{heading(plot.title)}{paragraph(plot.text, soft=True)}"
        + pio.to_html(
            plot.figure,
            include_plotlyjs=False,
            full_html=False,
            config=config,
            default_height="420px",
        )
        for plot in plots
    )


def clear_figure() -> Any:
    """Return an empty figure that takes the colours of the page."""
    import plotly.graph_objects as go

    return go.Figure(
        layout={
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 60, "r": 10, "t": 10, "b": 50},
            "legend": {"orientation": "h", "y": -0.2},
        }
    )


def line_style(number: int) -> dict[str, str]:
    """Return what tells the line ``number`` from others: colours come again after ten."""
    again = number >= COLOURS
    return {
        "mode": "lines+markers",
        "line_dash": "dot" if again else "solid",
        "marker_symbol": "diamond" if again else "circle",
    }


def length_axis(figure: Any, lengths: Sequence[int], title: str) -> None:
    """Make the x axis one of lengths, each a power of two further."""
    from attnzoo.report.text import short

    figure.update_xaxes(
        type="log", title=title, tickvals=list(lengths), ticktext=[short(n) for n in lengths]
    )
