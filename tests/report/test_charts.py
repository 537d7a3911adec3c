"""Charts as inline SVG: what they contain, and what they do not."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from attnzoo.report.charts import (
    Axis,
    Plot,
    Series,
    _line_style,
    bar_chart,
    length_axis,
    line_chart,
    matrix_chart,
    to_svg,
    write_picture,
)


def plot(figure):
    return Plot(name="x", title='a "title" <b>', text="", figure=figure)


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter() if "text" in element.tag]


@pytest.fixture
def lines():
    series = [Series(name="one <1>", x=[1024, 2048], y=[1.0, 40.0])]
    x, y = length_axis([1024, 2048], "tokens"), Axis(label="memory, MiB", log=True)
    return plot(line_chart(series, x=x, y=y, reference=1.0))


def test_text_stays_text(lines):
    found = texts(to_svg(lines))
    assert {"1k", "2k", "tokens", "memory, MiB", "one <1>", "10"} <= set(found)


def test_a_legend_has_the_names_that_were_given():
    """Lines without a name have none; matplotlib calls them _child0."""
    series = [Series(name=n, x=[1.0, 2.0], y=[3.0, 1.0 + i]) for i, n in enumerate(["", "_a", ""])]
    found = texts(to_svg(plot(line_chart(series, x=Axis(label="x"), y=Axis(label="y")))))
    assert "_a" in found
    assert not [text for text in found if text and text.startswith("_child")]


def test_it_refers_to_nothing_outside_and_takes_the_colours_of_the_page(lines):
    svg = to_svg(lines)
    ElementTree.fromstring(svg)  # well-formed, the title included
    assert "http" not in svg.replace("http://www.w3.org/", "")
    for forbidden in ("<script", "<style", "font-family", "DejaVu", "#1b1f25", "#d0d7df"):
        assert forbidden not in svg
    assert "currentColor" in svg
    assert "var(--line)" in svg


def test_charts_are_deterministic_and_small(lines):
    first, other = to_svg(lines), to_svg(replace(lines, name="other"))
    assert first == to_svg(lines)
    assert len(first) < 30_000
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (first, other)]
    assert ids[0]
    assert not ids[0] & ids[1]  # both are in one page
    assert set(re.findall(r"""["(]#([^")]*)""", first)) <= ids[0]


@pytest.mark.parametrize("characters", [30, 31, 40])
def test_a_legend_is_not_wider_than_the_figure(characters):
    series = [Series(name="n" * characters, x=[0, 1], y=[i, 2]) for i in range(4)]
    figure = line_chart(series, x=Axis(label="x"), y=Axis(label="y"))
    figure.canvas.draw()
    (legend,) = figure.legends
    assert 0 <= legend.get_window_extent().x0 < legend.get_window_extent().x1 <= figure.bbox.width


@pytest.mark.parametrize(("label", "rotation"), [("transfer 10", 30), ("1k", 0)])
def test_long_labels_of_ticks_are_rotated(label, rotation):
    ticks = dict.fromkeys(range(8), label)
    series = [Series(name="a", x=[0, 7], y=[1, 2])]
    figure = line_chart(series, x=Axis(label="step", ticks=ticks), y=Axis(label="bits"))
    figure.canvas.draw()
    found = figure.axes[0].get_xticklabels()
    assert {text.get_rotation() for text in found} == {rotation}
    if not rotation:  # horizontal labels do not touch
        boxes = [text.get_window_extent() for text in found]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_twenty_series_differ_in_colour_or_dashes():
    styles = [_line_style(Series(name="", x=[], y=[], style=i)) for i in range(20)]
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 20


def test_missing_bars_are_left_out():
    figure = bar_chart(["a", "b"], {"x": [1.0, None], "y": [2.0, 3.0]}, value=Axis(label="bits"))
    assert {"a", "b", "x", "y", "bits"} <= set(texts(to_svg(plot(figure))))


def test_a_matrix_has_its_first_row_at_the_top():
    names = {0: "first", 1: "second"}
    figure = matrix_chart(
        [[0.0, 1.0], [2.0, 3.0]],
        x=Axis(label="key"),
        y=Axis(label="query", ticks=names),
    )
    assert figure.axes[0].yaxis_inverted()
    svg = to_svg(plot(figure))
    assert {"first", "second"} <= set(texts(svg))
    assert svg.count("data:image/png;base64") == 1


# mathtext, matplotlib's names of hidden artists, markup
NAMES = [r"$\nosuch$", r"a\$b^{", r"_x\frac", "a_1 $", "<b>&amp;", "\"quoted' $x$"]


@pytest.mark.parametrize("kind", ["line", "bar", "matrix"])
def test_names_are_drawn_as_they_are(kind, tmp_path):
    one, label = dict(enumerate(NAMES)), Axis(label=NAMES[0])
    axis = Axis(label=NAMES[1], ticks=one)
    match kind:
        case "line":
            series = [Series(name=name, x=[0, 1], y=[i, 2]) for i, name in one.items()]
            figure = line_chart(series, x=axis, y=label)
        case "bar":
            figure = bar_chart(NAMES, {name: list(one) for name in NAMES}, value=label)
        case "matrix":
            values = [[float(i) for i in one]] * len(NAMES)
            figure = matrix_chart(values, x=label, y=axis, color_label=NAMES[2])
    named = Plot(name="x", title=NAMES[0], text="", figure=figure)
    found = texts(to_svg(named))
    assert set(NAMES) <= set(found)
    if kind in ("line", "bar"):
        assert all(found.count(name) == 2 for name in NAMES[2:])  # in the legend too
    assert write_picture(tmp_path / "x.png", named).stat().st_size


def test_the_title_is_on_the_picture_only(lines, tmp_path):
    path = write_picture(tmp_path / "x.png", lines)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 'a "title" <b>' not in texts(to_svg(lines))
