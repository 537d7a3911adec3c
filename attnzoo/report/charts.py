"""Line charts, bar charts and matrices, drawn by matplotlib: as inline SVG and as PNG files.

Text and grid lines of the SVG take the colours of the page, so that they suit light and dark
colour schemes. A chart is 345 points wide and legible at a width of 400 pixels.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from attnzoo.report.format import format_length

FOLDER = "pictures"
WITHOUT_MATPLOTLIB = "no report without matplotlib (pip install attnzoo[report])"

WIDTH, HEIGHT, LEGEND_ROW, BAR_ROW = 4.8, 2.9, 0.17, 0.26  # inches
COLORS = tuple(f"C{i}" for i in range(10))  # matplotlib's colour cycle
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
# Colours that the SVG replaces by those of the page.
TEXT_COLOR, GRID_COLOR = "#1b1f25", "#d0d7df"
_SETTINGS: dict[Any, Any] = {
    "font.size": 9.5,
    "text.parse_math": False,  # a name may contain a dollar sign
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "attnzoo",  # the same file for the same chart
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": GRID_COLOR,
    "axes.edgecolor": TEXT_COLOR,
    "axes.labelcolor": TEXT_COLOR,
    "text.color": TEXT_COLOR,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure with its heading.

    Attributes:
        name: File name of its PNG, without suffix.
        title: Heading.
        text: Paragraph below the heading.
        figure: A ``matplotlib.figure.Figure``.
    """

    name: str
    title: str
    text: str
    figure: Any


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one line.

    Attributes:
        name: In the legend; empty for no entry.
        x: Positions.
        y: Values.
        low: Lower ends of the bars that show the spread or the error; no bars when ``None``.
        high: Upper ends of the bars.
        style: Index that selects colour, dashes and marker; series of the same index look alike.
        kind: ``"line"``; ``"points"``, markers only; ``"prediction"``, thin with open markers;
            ``"crossing"`` and ``"predicted crossing"``, a filled and an open star; ``"step"``, a
            gray staircase; ``"plain"``, a line without markers.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int = 0
    kind: Literal[
        "line", "points", "prediction", "crossing", "predicted crossing", "step", "plain"
    ] = "line"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis.

    Attributes:
        label: Quantity and unit.
        log: Whether it is logarithmic.
        ticks: Labels by position; matplotlib's choice when ``None``.
        percent: Whether values are fractions, shown as percent.
    """

    label: str
    log: bool = False
    ticks: Mapping[float, str] | None = None
    percent: bool = False


def length_axis(lengths: Sequence[float], label: str) -> Axis:
    """Return a logarithmic axis with a tick at each sequence length."""
    return Axis(label=label, log=True, ticks={n: format_length(n) for n in lengths})


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def line_chart(
    series: Sequence[Series], *, x: Axis, y: Axis, reference: float | None = None
) -> Any:
    """Draw lines and points.

    Args:
        series: What to draw, in the order of the legend.
        x: Horizontal axis.
        y: Vertical axis.
        reference: Height of a dashed horizontal line.

    Returns:
        A ``matplotlib.figure.Figure``.
    """
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        figure, axes = _new_figure(legend=[s.name for s in series if s.name])
        legend: list[Any] = []
        for one in series:
            drawn = axes.plot(list(one.x), list(one.y), label=one.name, **_line_style(one))
            legend += drawn if one.name else []  # matplotlib names the others itself
            if one.low is not None and one.high is not None:
                color = COLORS[one.style % len(COLORS)]
                axes.vlines(list(one.x), list(one.low), list(one.high), color=color, linewidth=1)
        if reference is not None:
            axes.axhline(reference, color="gray", linestyle="--", linewidth=1)
        _set_axis(axes, "x", x)
        _set_axis(axes, "y", y)
        _add_legend(figure, legend)
    return figure


def bar_chart(
    categories: Sequence[str], groups: Mapping[str, Sequence[float | None]], *, value: Axis
) -> Any:
    """Draw horizontal bars, one group of bars per category; missing values have no bar."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        height = 0.6 + BAR_ROW * len(categories)
        figure, axes = _new_figure(legend=list(groups), height=height)
        thickness = 0.8 / len(groups)
        legend = []
        for index, (name, values) in enumerate(groups.items()):
            shift = (index - (len(groups) - 1) / 2) * thickness
            places = [i + shift for i in range(len(categories))]
            numbers = [float("nan") if v is None else v for v in values]
            bars = axes.barh(places, numbers, height=thickness, label=name, color=COLORS[index])
            legend.append(bars)
        axes.set_yticks(range(len(categories)), list(categories))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        _set_axis(axes, "x", value)
        _add_legend(figure, legend)
    return figure


def matrix_chart(
    values: Sequence[Sequence[float]],
    *,
    x: Axis,
    y: Axis,
    limits: tuple[float, float] | None = None,
    colormap: str = "viridis",
    color_label: str | None = None,
) -> Any:
    """Draw a matrix, its first row at the top.

    Args:
        values: Rows.
        x: Column axis.
        y: Row axis.
        limits: Values of the first and the last colour.
        colormap: Of matplotlib.
        color_label: Label of the colour bar; no colour bar when ``None``.
    """
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        figure, axes = _new_figure(legend=[], height=WIDTH * 0.8)
        low, high = limits or (None, None)
        image = axes.imshow(
            [list(row) for row in values],
            cmap=colormap,
            vmin=low,
            vmax=high,
            aspect="auto",
            interpolation="nearest",
        )
        axes.grid(visible=False)
        if color_label is not None:
            figure.colorbar(image, ax=axes, label=color_label)
        for axis, own in (("x", x), ("y", y)):
            _set_axis(axes, axis, own)
    return figure


def _new_figure(*, legend: Sequence[str], height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    height += LEGEND_ROW * -(-len(legend) // 2)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _line_style(series: Series) -> dict[str, Any]:
    """Return matplotlib's style of a series; 140 styles differ in colour, dashes or marker."""
    color = COLORS[series.style % len(COLORS)]
    marker = MARKERS[series.style % len(MARKERS)]
    dashes = DASHES[series.style % len(DASHES)]
    match series.kind:
        case "line":
            return {"color": color, "linestyle": dashes, "marker": marker}
        case "plain":
            return {"color": color, "linestyle": dashes}
        case "points":
            return {"color": color, "linestyle": "none", "marker": marker, "markersize": 8}
        case "prediction":
            style = {"linestyle": ":", "linewidth": 1, "marker": "o", "markersize": 5}
            return {"color": color, "markerfacecolor": "none", **style}
        case "crossing":
            return {"color": color, "linestyle": "none", "marker": "*", "markersize": 11}
        case "predicted crossing":
            star = {"linestyle": "none", "marker": "*", "markersize": 11}
            return {"color": color, "markerfacecolor": "none", **star}
        case "step":
            return {"color": "gray", "linestyle": ":", "linewidth": 1, "drawstyle": "steps-post"}


def _set_axis(axes: Any, which: str, axis: Axis) -> None:
    """Set label, scale and ticks of an axis; the ticks of a logarithmic one are plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    own = getattr(axes, f"{which}axis")
    own.set_label_text(axis.label)
    if axis.log:
        getattr(axes, f"set_{which}scale")("log", base=10)
        low, high = getattr(axes, f"get_{which}lim")()
        digits = (1, 2, 3, 4, 6, 8) if high / low < 10 else (1, 2, 5) if high / low < 3000 else (1,)
        own.set_major_locator(LogLocator(subs=digits))
        own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        own.set_minor_formatter(NullFormatter())
    if axis.percent:
        own.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if axis.ticks is not None:
        labels = list(axis.ticks.values())
        text = {"rotation": 30, "ha": "right"} if which == "x" and len("".join(labels)) > 40 else {}
        own.set_ticks(list(axis.ticks), labels=labels, **text)
        own.set_ticks([], minor=True)


def _add_legend(figure: Any, handles: Sequence[Any]) -> None:
    """Add a legend of some artists, whose labels may begin with an underscore."""
    labels = [artist.get_label() for artist in handles]
    if not labels:
        return
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=2)
    if legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (len(labels) // 2))


# -- output --------------------------------------------------------------------------------------


def to_svg(plot: Plot) -> str:
    """Return a plot as an ``<svg>`` element without scripts, fonts or references."""
    import matplotlib as mpl

    buffer = io.StringIO()
    unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context(_SETTINGS):
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata=unnamed)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<(g|text) id="[^"]*"', r"<\1", svg)  # unused, and the same in each figure
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page's font
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for number, name in enumerate(dict.fromkeys(re.findall(r' id="([^"]*)"', svg))):
        svg = re.sub(rf'(?<=["#]){re.escape(name)}(?=[")])', f"{plot.name}-{number}", svg)
    svg = svg.replace(TEXT_COLOR, "currentColor").replace(GRID_COLOR, "var(--line)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(plot.title)}"', 1)


def write_pictures(out: Path, plots: Sequence[Plot]) -> list[Path]:
    """Write plots as PNG files into ``out/pictures``."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return [write_picture(folder / f"{plot.name}.png", plot) for plot in plots]


def write_picture(path: Path, plot: Plot) -> Path:
    """Write a plot as a PNG file with its title."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        axes = plot.figure.axes[0]
        axes.set_title(plot.title, fontsize=10, loc="left")
        plot.figure.savefig(path, dpi=180)
        axes.set_title("", loc="left")
    return path
