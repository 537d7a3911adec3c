"""Consoles of the commands: results go to standard output, errors to standard error.

Neither reads markup, so that paths and names with brackets are printed as they are. Styled output
is a ``Text`` or has a ``style``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

console = Console(markup=False, emoji=False)
problems = Console(stderr=True, markup=False, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


FIRST_SECONDS, LINE_SECONDS = 2.0, 10.0  # until the first line, and between lines


@contextmanager
def show_status(console: Console) -> Iterator[Callable[[str], None]]:
    """Context that yields a function which shows what a command does now."""
    if console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal):
        with console.status("") as status:
            yield lambda text: status.update(Text(text))
        return
    start = time.monotonic()
    due = start + FIRST_SECONDS

    def show(text: str) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + LINE_SECONDS
            console.print(f"{text} ({now - start:.0f} s)", soft_wrap=True, highlight=False)

    yield show


def print_files(numbers: Path, page: Path | None) -> None:
    """Print where results are; ``page`` is ``None`` without matplotlib."""
    from attnzoo.report.page import WITHOUT_MATPLOTLIB

    console.print(f"Numbers: {numbers}")
    console.print(f"Report:  {page}" if page else WITHOUT_MATPLOTLIB)
