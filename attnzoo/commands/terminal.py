"""Consoles of the commands: results go to standard output, errors to standard error.

Neither reads markup, so that paths and names with brackets are printed as they are. Styled output
is a ``Text`` or has a ``style``.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console(markup=False, emoji=False)
problems = Console(stderr=True, markup=False, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
