"""Self-contained HTML pages: text, tables and plots, without scripts or network requests.

Plots are lines and matrices, drawn by matplotlib into PNG files.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any, Literal

from attnzoo.report.output_path import atomic_write
from attnzoo.report.table import Table, format_length

FOLDER = "pictures"
WITHOUT_MATPLOTLIB = "no report without matplotlib (pip install attnzoo[report])"
WIDTH, HEIGHT, LEGEND_ROW = 4.8, 3.2, 0.2  # inches
MARKERS, DASHES = "osD^vPX", ("-", "--", "-.", ":")
MANY = 50  # points of a line, above which it has no markers


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of a report.

    Attributes:
        name: File name of its PNG, without suffix.
        title: Title.
        draw: Draws it on a matplotlib ``Axes``; lines with a label are in the legend.
    """

    name: str
    title: str
    draw: Callable[[Any], None]

    def save(self, out: Path) -> Path:
        """Draw it into a PNG file in ``out/pictures``, with the legend below, and return the file.

        Args:
            out: Folder of the report.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        self.draw(axes)
        axes.set_title(escape(self.title), fontsize=10, loc="left")
        handles, names = axes.get_legend_handles_labels()
        if names:
            columns = 1 if max(map(len, names)) > 26 else 2
            figure.set_figheight(HEIGHT + LEGEND_ROW * -(-len(names) // columns))
            figure.legend(handles, names, loc="outside lower center", ncols=columns)
        path = out / FOLDER / f"{self.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=144)
        return path


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def escape(name: str) -> str:
    """Return a name so that matplotlib reads no formula in it."""
    return name.replace("$", r"\$")


def line_plot(
    lines: Mapping[str, Mapping[Any, float]],
    *,
    name: str,
    title: str,
    x: str,
    y: str,
    scale: Literal["lengths", "log", "linear"] = "lengths",
    log: bool = True,
) -> Plot:
    """Return values over length as one line per name.

    Args:
        lines: Values by position, by name; a single value is a point.
        name: File name.
        title: Title.
        x: Label of the positions.
        y: Label of the values.
        scale: Of the positions; ``"lengths"`` is logarithmic, with a tick at each position.
        log: Whether values have a logarithmic scale.
    """

    def draw(axes: Any) -> None:
        for index, (label, values) in enumerate(lines.items()):
            positions = [float(n) for n in values]
            marker = MARKERS[index % len(MARKERS)] if len(values) < MANY else ""
            dashes = DASHES[index % len(DASHES)]
            axes.plot(positions, list(values.values()), dashes, marker=marker, label=escape(label))
        if scale != "linear":
            axes.set_xscale("log")
        if scale == "lengths":
            ticks = sorted({float(n) for values in lines.values() for n in values})
            axes.set_xticks(ticks, [format_length(n) for n in ticks])
            axes.minorticks_off()
        axes.set(xlabel=x, ylabel=y, **({"yscale": "log"} if log else {}))
        axes.grid(alpha=0.4)

    return Plot(name=name, title=title, draw=draw)


def matrix_plot(
    values: Sequence[Sequence[float]],
    *,
    name: str,
    title: str,
    x: str,
    y: str,
    color: str,
    limits: tuple[float | None, float | None] = (None, None),
    colormap: str = "viridis",
) -> Plot:
    """Return a matrix, its first row at the top.

    Args:
        values: Rows.
        name: File name.
        title: Title.
        x: Label of the columns.
        y: Label of the rows.
        color: Label of the colours.
        limits: Values of the first and the last colour; those of the matrix when ``None``.
        colormap: Of matplotlib.
    """

    def draw(axes: Any) -> None:
        low, high = limits
        shown = {"cmap": colormap, "vmin": low, "vmax": high, "interpolation": "nearest"}
        image = axes.imshow(values, aspect="auto", **shown)
        axes.locator_params(integer=True)
        axes.set(xlabel=x, ylabel=y)
        axes.figure.colorbar(image, ax=axes, label=color)

    return Plot(name=name, title=title, draw=draw)


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
