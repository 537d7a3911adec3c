"""Tables that render in a terminal, as HTML and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

PIPE_WIDTH = 160  # columns where the output is no terminal, at least
GAP = 2  # columns between two columns of a table
READABLE = 20  # columns that a cell of several words gets, if it has so many


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text.

    Attributes:
        columns: Column headers.
        rows: Cells; a rich ``Text`` has a style in the terminal.
        title: Shown above the table in a terminal.
        caption: Shown below the table in a terminal.
        numeric: Whether columns after the first hold numbers, which are aligned right; else long
            cells are wrapped.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    title: str = ""
    caption: str = ""
    numeric: bool = True

    def print(self, console: Console) -> None:
        """Print the table: as wide as the terminal, or ``PIPE_WIDTH`` where there is none.

        Of a table that does not fit, columns of numbers stand below the others, with the first
        column repeated, and rows of text become lines of column and cell.
        """
        if not console.is_terminal and console.width < PIPE_WIDTH:
            console = Console(file=console.file, width=PIPE_WIDTH, quiet=console.quiet)
        width = console.width
        parts: list[RenderableType]
        if self._width() <= width:
            parts = [self._rich(width)]
        elif self.numeric:
            parts = [part._rich(width) for part in self._split(width)]
        else:
            parts = [self._record(row) for row in self.rows]
        title, caption = ([Text(text)] if text else [] for text in (self.title, self.caption))
        console.print(Group(*title, *parts, *caption))

    def html(self) -> str:
        """Return the table as HTML; a table that is wider than the page scrolls."""
        kind = "" if self.numeric else ' class="text"'
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return (
            f'<div class="scroll"><table{kind}><thead><tr>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )

    def markdown(self) -> str:
        """Return the table as GitHub Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)

    def _select(self, kept: Sequence[int]) -> Table:
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows)

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the width of each column: so that no word is broken, and that it would take."""
        sizes = []
        for name, *cells in zip(self.columns, *self.rows, strict=True):
            texts = [str(cell) for cell in cells]
            longest = max(map(cell_len, texts), default=0)
            words = [word for text in (name, *texts) for word in text.split()]
            least = longest if self.numeric else min(longest, READABLE)  # else only headers wrap
            least = max(least, *map(cell_len, name.split() if self.numeric else words), 1)
            sizes.append((least, max(longest, cell_len(name))))
        return sizes

    def _width(self) -> int:
        return sum(least + GAP for least, _ in self._sizes())

    def _rich(self, width: int) -> RichTable:
        """Return the table for rich; columns that need the most share what the others leave."""
        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        sizes, free = self._sizes(), width - self._width()
        widths = [least for least, _ in sizes]
        order = sorted(range(len(sizes)), key=lambda i: sizes[i][1] - sizes[i][0])
        for done, i in enumerate(order):
            more = min(sizes[i][1] - widths[i], free // (len(order) - done))
            widths[i] += more
            free -= more
        for i, name in enumerate(self.columns):
            right = self.numeric and i > 0
            table.add_column(Text(name), justify="right" if right else "left", width=widths[i])
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table

    def _split(self, width: int) -> list[Table]:
        """Return tables of some of the columns, each as many as fit, with the first one."""
        groups: list[list[int]] = [[0]]
        for i in range(1, len(self.columns)):
            if len(groups[-1]) > 1 and self._select([*groups[-1], i])._width() > width:
                groups.append([0])
            groups[-1].append(i)
        return [self._select(group) for group in groups]

    def _record(self, row: Sequence[str | Text]) -> RenderableType:
        """Return a row as lines of column and cell, with an empty line after it."""
        size = max(map(cell_len, self.columns)) + GAP
        cells = [pair for pair in zip(self.columns, row, strict=True) if str(pair[1])]
        lines = (Text.assemble((name.ljust(size), "bold"), cell) for name, cell in cells)
        return Group(*lines, Text())


BYTE_UNITS = ("B", "KiB", "MiB", "GiB")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals; ``None`` as a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Format a number with a number of significant digits, without an exponent."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text


def format_bytes(count: float | None) -> str:
    """Format a number of bytes with its unit, such as ``1.5 KiB``; ``None`` as a dash."""
    if count is None:
        return "-"
    power = 0
    while count >= 1024 ** (power + 1) and power + 1 < len(BYTE_UNITS):
        power += 1
    value, unit = count / 1024**power, BYTE_UNITS[power]
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def format_length(length: float) -> str:
    """Format a sequence length: 512, 1k, 1.5k, 64k."""
    for unit, name in ((1024**2, "M"), (1024, "k")):
        if length >= unit:
            value = length / unit
            whole = value == round(value) or value >= 10
            return f"{value:.0f}{name}" if whole else f"{value:.1f}{name}"
    return f"{length:.0f}"
