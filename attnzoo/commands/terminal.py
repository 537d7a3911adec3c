"""Consoles of the commands: results go to standard output, errors to standard error.

Neither reads markup, so that paths and names with brackets are printed as they are. Styled output
is a ``Text`` or has a ``style``.
"""

from rich.console import Console
from rich.text import Text

console = Console(markup=False, emoji=False)
problems = Console(stderr=True, markup=False, emoji=False)


def print_error(message: str) -> None:
    """Print the message of an error."""
    text = Text.assemble(("error:", "bold red"), f" {message}")
    problems.print(text, highlight=False, soft_wrap=True)
