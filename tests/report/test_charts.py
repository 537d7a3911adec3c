"""Plots as PNG files, and the page that holds them."""

from matplotlib.figure import Figure

from attnzoo.report.page import FOLDER, Plot, line_plot, matrix_plot, write_page
from attnzoo.report.table import Table

NAMES = [r"$\nosuch$", r"a\$b^{", "a_1 $", "<b>&amp;"]  # mathtext, markup


def drawn(plot):
    axes = Figure().add_subplot()
    plot.draw(axes)
    return axes


def lines(values, **given):
    texts = {"name": "x", "title": NAMES[0], "x": "tokens", "y": "MiB"}
    return line_plot(values, **(texts | given))


def test_lines_over_lengths():
    axes = drawn(lines({name: {"1024": 1.5, "3000": 40.0} for name in NAMES}))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1k", "2.9k"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    found = axes.get_legend_handles_labels()[1]
    assert [name.replace(r"\$", "$") for name in found] == NAMES
    looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in axes.get_lines()}
    assert len(looks) == len(NAMES)


def test_many_positions_have_no_markers_and_a_linear_scale():
    axes = drawn(lines({"a": dict(enumerate([0.5] * 60))}, scale="linear", log=False))
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    assert axes.get_lines()[0].get_marker() == ""


def test_a_matrix_has_its_first_row_at_the_top():
    texts = {"name": "m", "title": "", "x": "key", "y": "query", "color": "bits"}
    axes = drawn(matrix_plot([[0.0, 1.0], [2.0, 3.0]], **texts, limits=(-1.5, None)))
    assert axes.yaxis_inverted()
    assert axes.images[0].get_clim() == (-1.5, 3.0)


def test_a_page_has_its_parts_and_pictures(tmp_path):
    table = Table(columns=["a", "b"], rows=[["<x>", "1"]], title="numbers")
    empty = Plot(name="e", title="", draw=lambda axes: None)
    plots = [lines({"a" * 40: {64: 1.0}, "b": {128: 2.0}}), empty]
    page = write_page(tmp_path / "page.html", "a <title>", ["one & two", None, table, *plots])
    text = page.read_text()
    for part in ("<h1>a &lt;title&gt;</h1>", "<p>one &amp; two</p>", "&lt;x&gt;", "numbers"):
        assert part in text
    assert text.count("data:image/png;base64,") == 2
    for name in "xe":
        path = tmp_path / FOLDER / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_page_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("attnzoo.report.page.can_draw", lambda: False)
    assert write_page(tmp_path / "page.html", "title", ["text"]) is None
    assert not list(tmp_path.iterdir())
