"""The plots of a page as PNG files, drawn by matplotlib from the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnzoo.report.page import Plot

FOLDER = "pictures"
_MARKERS = {"circle": "o", "circle-open": "o", "diamond": "D", "star": "*", "star-open": "*"}
_DASHES = {"solid": "-", "dot": ":", "dash": "--"}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_pictures(out: Path, plots: Sequence[Plot]) -> list[Path]:
    """Write one PNG a plot into ``out/pictures``; none without matplotlib.

    Args:
        out: Folder of the page.
        plots: What the page shows.
    """
    if not can_draw():
        return []
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return [write_picture(folder / f"{plot.name}.png", plot) for plot in plots]


def write_picture(path: Path, plot: Plot) -> Path:
    """Write one plot as a PNG; matplotlib must be there."""
    _draw(plot).savefig(path, dpi=110)
    return path


def _draw(plot: Plot) -> Any:
    """Draw a figure of plotly's with matplotlib: lines, marks, bars, one matrix."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 4.6), layout="constrained")
    axes = made.add_subplot()
    bars = [trace for trace in plot.figure.data if trace.type == "bar"]
    for trace in plot.figure.data:
        if trace.type == "heatmap":
            _draw_matrix(made, axes, trace)
        elif trace.type == "bar":
            _draw_bars(axes, trace, bars.index(trace), len(bars))
        else:
            _draw_line(axes, trace)
    for line in plot.figure.layout.shapes or ():
        axes.axhline(line.y0, color="gray", linestyle="--", linewidth=1)
    _set_axes(axes, plot.figure.layout)
    if axes.images:
        axes.grid(visible=False)
    axes.set_title(plot.title, fontsize=11, loc="left")
    if axes.get_legend_handles_labels()[0]:
        made.legend(loc="outside right upper", fontsize=8, frameon=False)
    return made


def _draw_line(axes: Any, trace: Any) -> None:
    mode = trace.mode or "lines"
    marker, line = trace.marker, trace.line
    symbol = marker.symbol or "circle"
    y = list(trace.y)
    axes.plot(
        list(trace.x) if trace.x is not None else range(len(y)),
        y,
        linestyle=_DASHES.get(line.dash or "solid", "-") if "lines" in mode else "none",
        linewidth=line.width or 1.6,
        drawstyle="steps-post" if line.shape == "hv" else "default",
        color=line.color or marker.color,
        marker=_MARKERS.get(symbol, "o") if "markers" in mode else None,
        markersize=(marker.size or 6) * 0.8,
        markerfacecolor="none" if str(symbol).endswith("open") else None,
        label=None if trace.showlegend is False else trace.name,
    )


def _draw_bars(axes: Any, trace: Any, index: int, count: int) -> None:
    width = 0.8 / count
    places = [i + (index - (count - 1) / 2) * width for i in range(len(trace.x))]
    axes.bar(places, list(trace.y), width=width, label=trace.name)
    axes.set_xticks(range(len(trace.x)), list(trace.x), rotation=30, ha="right", fontsize=8)


def _draw_matrix(made: Any, axes: Any, trace: Any) -> None:
    signed = trace.zmin is not None and trace.zmin == -trace.zmax
    image = axes.imshow(
        [list(row) for row in trace.z],
        cmap="RdBu_r" if signed else "viridis",
        vmin=trace.zmin,
        vmax=trace.zmax,
        aspect="auto",
        interpolation="nearest",
    )
    if trace.showscale is not False:
        made.colorbar(image, ax=axes, label=trace.colorbar.title.text or "")
    for axis, names in ((axes.xaxis, trace.x), (axes.yaxis, trace.y)):
        if names is not None and isinstance(names[0], str):
            axis.set_ticks(range(len(names)), labels=list(names), fontsize=8)
    for row, texts in enumerate(trace.text if trace.text is not None else ()):
        for column, text in enumerate(texts):
            dark = image.norm(trace.z[row][column]) < 0.5  # viridis is light above
            axes.text(
                column, row, text, ha="center", va="center", color="white" if dark else "black"
            )


def _set_axes(axes: Any, layout: Any) -> None:
    """Take over titles, scales and ticks."""
    from matplotlib.ticker import LogLocator

    for axis, own, name in ((layout.xaxis, axes.xaxis, "x"), (layout.yaxis, axes.yaxis, "y")):
        if axis.title.text:
            own.set_label_text(axis.title.text)
        if axis.type == "log":
            getattr(axes, f"set_{name}scale")("log", base=10)
            own.set_minor_locator(LogLocator(subs=(2, 5)))
            for place in (own.set_major_formatter, own.set_minor_formatter):
                place(lambda value, _: f"{value:g}")  # 20, not 2 x 10^1
        if axis.tickvals is not None:
            own.set_ticks(list(axis.tickvals), labels=list(axis.ticktext), minor=False)
            own.set_ticks([], minor=True)
    axes.grid(visible=True, color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
