"""Tables that render in a terminal, as HTML and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

MIN_WIDTH = 160  # columns of a wide table where the output is narrower or not a terminal


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
        kept = [self.columns.index(name) for name in columns]
        return Table(
            columns=columns,
            rows=[[row[i] for i in kept] for row in self.rows],
            title=self.title,
            caption=self.caption,
            numeric=self.numeric,
        )

    def terminal(self) -> RichTable:
        """Return the table for rich's console."""
        table = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text(self.caption) if self.caption else None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for i, name in enumerate(self.columns):
            right = self.numeric and i > 0
            table.add_column(
                name,
                justify="right" if right else "left",
                no_wrap=self.numeric and i == 0,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table

    def print(self, console: Console, *, wide: bool = False) -> None:
        """Print the table.

        Args:
            console: Where to.
            wide: Whether to use at least ``MIN_WIDTH`` columns.
        """
        if wide:
            width = max(console.width, MIN_WIDTH)
            console = Console(file=console.file, width=width, quiet=console.quiet)
        console.print(self.terminal())

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
