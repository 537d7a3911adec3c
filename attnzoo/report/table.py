"""Tables that render in a terminal, as HTML and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

PIPE_WIDTH = 160  # columns where the output is no terminal, at least
GAP = 2  # columns between two columns of a table
BORDER = 2  # columns on both sides of it
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

    def select(self, columns: Sequence[str]) -> Table:
        """Return a table with some of the columns."""
        return self._select([self.columns.index(name) for name in columns])

    def terminal(self, width: int) -> RenderableType:
        """Return the table for rich's console, in lines of at most ``width`` columns.

        Lines break between words, never inside of one. A table that is too wide for this becomes
        several: of short cells, one below the other, with the first column repeated; of text, one
        for each row. Only words that are longer than a line are broken.
        """
        parts = self._parts(width)
        if len(parts) == 1 and self._least_width() <= width:
            return self._lines(width)
        fit = all(part._least_width() <= width for part in parts)
        body = (
            [part._lines(width) for part in parts]
            if fit
            else [self._record(row, width) for row in self.rows]
        )
        title, caption = ([Text(text)] if text else [] for text in (self.title, self.caption))
        return Group(*title, *body, *caption)

    def print(self, console: Console) -> None:
        """Print the table: as wide as the terminal, or ``PIPE_WIDTH`` where there is none."""
        if not console.is_terminal and console.width < PIPE_WIDTH:
            console = Console(file=console.file, width=PIPE_WIDTH, quiet=console.quiet)
        console.print(self.terminal(console.width))

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
        return replace(
            self,
            columns=[self.columns[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )

    def _parts(self, width: int) -> list[Table]:
        """Return tables of short cells with some of the columns each, that fit; or one table."""
        least = self._least()
        short = self.numeric or max(_sizes(self.rows, str.splitlines)[1:], default=0) <= READABLE
        if not short or self._least_width() <= width:
            return [self]
        groups: list[list[int]] = [[0]]
        free = width - BORDER - least[0]
        for column in range(1, len(least)):
            if groups[-1] != [0] and free < least[column] + GAP:
                groups.append([0])
                free = width - BORDER - least[0]
            groups[-1].append(column)
            free -= least[column] + GAP
        untitled = replace(self, title="", caption="")
        return [untitled._select(group) for group in groups]

    def _least(self) -> list[int]:
        """Return the width that each column needs, so that no word is broken."""
        if self.numeric:  # only headers wrap
            empty = [""] * len(self.columns)
            cells = _sizes([empty, *self.rows], str.splitlines)
            return [*map(max, _sizes([self.columns], str.split), cells)]
        text = [self.columns, *self.rows]
        words, lines = _sizes(text, str.split), _sizes(text, str.splitlines)
        return [max(word, min(READABLE, line)) for word, line in zip(words, lines, strict=True)]

    def _least_width(self) -> int:
        least = self._least()
        return BORDER + sum(least) + GAP * (len(least) - 1)

    def _lines(self, width: int) -> RichTable:
        """Return the table; the columns that need the most share what the others leave."""
        table = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text(self.caption) if self.caption else None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        sizes, wanted = self._least(), _sizes([self.columns, *self.rows], str.splitlines)
        free = width - self._least_width()
        for column in sorted(range(len(sizes)), key=lambda i: wanted[i] - sizes[i]):
            still = len(sizes) - sum(size >= want for size, want in zip(sizes, wanted, strict=True))
            more = min(max(wanted[column] - sizes[column], 0), free // max(still, 1))
            sizes[column] += more
            free -= more
        for i, (name, size) in enumerate(zip(self.columns, sizes, strict=True)):
            right = self.numeric and i > 0
            table.add_column(name, justify="right" if right else "left", width=size)
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table

    def _record(self, row: Sequence[str | Text], width: int) -> RenderableType:
        """Return a row as lines of column and cell, with an empty line after it."""
        cells = [
            (Text(name, style="bold"), cell if isinstance(cell, Text) else Text(cell))
            for name, cell in zip(self.columns, row, strict=True)
            if str(cell)
        ]
        names = max(map(cell_len, self.columns))
        if names + GAP + max(_sizes([self.columns, *self.rows], str.split)) > width:
            lines = (line for name, cell in cells for line in (name, Padding(cell, (0, 0, 0, GAP))))
            return Group(*lines, Text())
        record = RichTable.grid(padding=(0, GAP, 0, 0))
        for name, cell in cells:
            record.add_row(name, cell)
        return Group(record, Text())


def _sizes(rows: Sequence[Sequence[str | Text]], split: Callable[[str], list[str]]) -> list[int]:
    """Return the size in each column of the longest piece that ``split`` makes of its cells."""
    return [
        max((cell_len(piece) for cell in column for piece in split(str(cell))), default=0)
        for column in zip(*rows, strict=True)
    ]
