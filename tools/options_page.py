"""Write docs/options.md, which explains every option of every backend, from their docstrings.

python -m tools.options_page
"""

from __future__ import annotations

from pathlib import Path

from attnzoo.commands.option_docs import backend_docs
from attnzoo.registry import available_backends
from attnzoo.report.table import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = """# Options of every backend

Written by `python -m tools.options_page` from the docstrings; `attnzoo list NAME` shows the same.
Options go into `attnzoo.swap(model, "linear", window=32)`, `AttentionSpec("linear", window=32)`, or
on the command line `--attention linear:window=32`.
"""
COLUMNS = ["option", "default", "accepts", "meaning"]


def page() -> str:
    """Return the page in Markdown."""
    parts = [HEAD]
    registered: dict[str, dict[str, str]] = {}
    for name in available_backends():
        docs = backend_docs(name)
        rows = [
            [
                *(f"`{option}`", f"`{default}`"),
                *(docs["accepted"][option].replace("|", "or"), docs["descriptions"][option]),
            ]
            for option, default in docs["options"].items()
        ]
        parts.append(f"## {name}\n\n{docs['summary']} {docs['config']}\n")
        parts.append(Table(columns=COLUMNS, rows=rows, numeric=False).markdown())
        registered |= docs["choices"]
    for option, values in registered.items():
        rows = [[f"`{value}`", text] for value, text in values.items()]
        parts.append(f"## Values of {option}\n")
        parts.append(Table(columns=[option, "meaning"], rows=rows, numeric=False).markdown())
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
