"""Where commands print: results to standard output, problems to standard error."""

from rich.console import Console

console = Console()
problems = Console(stderr=True)
