"""One table in a terminal, as HTML and as Markdown."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from attnzoo.report.table import Table, format_bytes

TABLE = Table(
    columns=["name", "value", "why"],
    rows=[["a [bold]", "1.5", "<b>"], ["b", Text("2.0", style="red"), ""]],
    title="A title [x]",
)


def printed(table, width, terminal=False):
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal,
        color_system=None,
        legacy_windows=False,
    )
    table.print(console)
    return console.file.getvalue()


def test_text_is_not_markup():
    for text in ("a [bold]", "A title [x]", "<b>", "2.0"):
        assert text in printed(TABLE, 80)
    html = TABLE.html()
    assert "<td>&lt;b&gt;</td>" in html
    assert "<td>2.0</td>" in html
    assert TABLE.markdown().splitlines()[1:3] == ["| --- | --- | --- |", "| a [bold] | 1.5 | <b> |"]


NUMBERS = Table(
    columns=["attention", *["milliseconds per token"] * 9],
    rows=[["gated_linear window 32", *["12.5 ± 0.5"] * 9], ["flash", *["1"] * 9]],
    title="Numbers",
    caption="of all",
)
WORDS = Table(
    columns=["backend", "description", "options (defaults)"],
    rows=[
        ["block_sparse", "exact softmax over a window and blocks", "feature_map=identity, top_k=4"],
        ["linear", "a state of constant size " * 9, "chunk_size=64"],
    ],
    numeric=False,
)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("table", [TABLE, NUMBERS, WORDS], ids=["text", "numbers", "words"])
def test_lines_fit_a_terminal_and_no_word_is_broken(table, width):
    out = printed(table, width, terminal=True)
    assert max(map(len, out.splitlines())) <= width
    words = out.split()
    for text in (
        table.title,
        table.caption,
        *table.columns,
        *(x for row in table.rows for x in row),
    ):
        assert set(str(text).split()) <= set(words)


def test_columns_of_numbers_that_do_not_fit_stand_below_with_the_names_of_the_rows():
    out = printed(NUMBERS, 80, terminal=True)
    assert out.count("12.5 ± 0.5") == 9
    assert 1 < out.count("gated_linear window 32") == out.count("flash") < 9
    assert out.count("Numbers") == out.count("of all") == 1


def test_rows_of_text_that_do_not_fit_are_printed_one_below_the_other():
    lines = printed(WORDS, 45, terminal=True).splitlines()
    assert [line.split()[0] for line in lines if line.strip()][:2] == ["backend", "description"]
    assert "backend             block_sparse" in lines[0]


def test_a_pipe_is_wider_than_a_terminal_and_only_as_wide_as_needed():
    lines = printed(NUMBERS, 80).splitlines()
    assert 80 < max(map(len, lines)) <= 160
    assert max(line.count("12.5 ± 0.5") for line in lines) == 9
    assert max(map(len, printed(TABLE, 80).splitlines())) < 40


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (2e13, "18626 GiB")],
)
def test_bytes(count, text):
    assert format_bytes(count) == text
