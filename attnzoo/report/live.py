"""Progress of long commands: in place in a terminal, otherwise in lines every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

FIRST_SECONDS = 2.0  # until the first line, so that short commands print none
LINE_SECONDS = 10.0  # between lines


def is_live(console: Console) -> bool:
    """Return whether a console can redraw what it shows, as pipes and log files cannot."""
    return console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)


class LineTimer:
    """Says when the next line of progress is due."""

    def __init__(self) -> None:
        self.next = time.monotonic() + FIRST_SECONDS

    def is_due(self) -> bool:
        """Return whether a line is due; the next one is then due after :data:`LINE_SECONDS`."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + LINE_SECONDS
        return True


@contextmanager
def show_status(console: Console) -> Iterator[Callable[[str], None]]:
    """Context that yields a function which shows what a command does now.

    In a terminal, each text replaces the one before it. Elsewhere a text is a line of its own, if
    one is due, with the seconds since the start.
    """
    if is_live(console):
        with console.status("") as status:
            yield lambda text: status.update(Text(text))
        return
    timer, start = LineTimer(), time.monotonic()

    def show(text: str) -> None:
        if timer.is_due():
            seconds = time.monotonic() - start
            console.print(f"{text} ({seconds:.0f} s)", soft_wrap=True, highlight=False)

    yield show
