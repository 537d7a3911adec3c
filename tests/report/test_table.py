"""One table in a terminal, as HTML and as Markdown."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from attnzoo.report.format import byte_unit
from attnzoo.report.table import Table

TABLE = Table(
    columns=["name", "value", "why"],
    rows=[["a [bold]", "1.5", "<b>"], ["b", Text("2.0", style="red"), ""]],
    title="A title [x]",
)


def printed(table, width, **options):
    console = Console(file=io.StringIO(), width=width)
    table.print(console, **options)
    return console.file.getvalue()


def test_text_is_not_markup():
    for text in ("a [bold]", "A title [x]", "<b>", "2.0"):
        assert text in printed(TABLE, 80)
    html = TABLE.html()
    assert "<td>&lt;b&gt;</td>" in html
    assert "<td>2.0</td>" in html
    assert TABLE.markdown().splitlines()[1:3] == ["| --- | --- | --- |", "| a [bold] | 1.5 | <b> |"]


def test_columns_are_selected_by_name():
    table = TABLE.select(["why", "name"])
    assert table.rows == [["<b>", "a [bold]"], ["", "b"]]
    assert table.title == TABLE.title


def test_a_wide_table_is_not_wrapped():
    table = Table(columns=["n" * 50] * 2, rows=[["1", "2"]])
    assert "n" * 50 in printed(table, 40, wide=True)


@pytest.mark.parametrize(
    ("count", "unit"),
    [(0, (1, "B")), (1023, (1, "B")), (1024, (1024, "KiB")), (2e13, (2**30, "GiB"))],
)
def test_byte_unit(count, unit):
    assert byte_unit(count) == unit
