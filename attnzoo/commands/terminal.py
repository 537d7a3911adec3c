"""Consoles of the commands: results go to standard output, errors to standard error.

Neither reads markup, so that paths and names with brackets are printed as they are. Styled output
is a ``Text`` or has a ``style``. Terminals and pipes that are not UTF-8 get other characters in
place of those that they cannot encode.
"""

from __future__ import annotations

import codecs
import io
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

console = Console(markup=False, emoji=False)
problems = Console(stderr=True, markup=False, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def print_error(message: str) -> None:
    """Print the message of an error."""
    text = Text.assemble(("error:", "bold red"), f" {message}")
    problems.print(text, highlight=False, soft_wrap=True)


REPLACE = "attnzoo.replace"  # name of an error handler of encodings
_IN_ASCII = {"\N{HORIZONTAL ELLIPSIS}": "~", "\N{PLUS-MINUS SIGN}": "+-", "\N{MIDDLE DOT}": "*"}


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Return characters in place of those that an encoding lacks, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(character, "?") for character in lacking), error.end


codecs.register_error(REPLACE, _replace)


_GIVEN: list[tuple[io.TextIOWrapper, str]] = []  # standard output, and its own error handler


def replace_unencodable() -> None:
    """Print characters that standard output cannot encode as others, instead of raising an error.

    Standard error does so by itself. A handler that was chosen by ``PYTHONIOENCODING`` remains.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        _GIVEN.append((stream, stream.errors))
        stream.reconfigure(errors=REPLACE)


def restore_output() -> None:
    """Undo :func:`replace_unencodable`."""
    while _GIVEN:
        stream, errors = _GIVEN.pop()
        stream.reconfigure(errors=errors)
