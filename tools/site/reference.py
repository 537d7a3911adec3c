"""The reference: a page for every public name, an index for every public module, the commands."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import typer
from typer.cli import get_docs_for_click

# Public modules, in the order of the navigation: docs/design.md, "Who may rely on what"
MODULES = {
    "attnzoo": "Swap a model, describe it, extend attnzoo.",
    "attnzoo.ops": "Attention as pure functions on tensors.",
    "attnzoo.contract": "What a backend of your own is made of.",
    "attnzoo.testing": "Test a backend of your own.",
    "attnzoo.training": "Transfer, distillation and evaluation in a training loop of your own.",
    "attnzoo.errors": "Errors and warnings.",
}
COMMANDS = "reference/commands.md"


def public_names(module: str) -> list[str]:
    """Return the public names of a module but for its modules, which have pages of their own."""
    found = import_module(module)
    names = [name for name in found.__all__ if not inspect.ismodule(getattr(found, name))]
    return sorted(names, key=str.lower)


def page_of(module: str, name: str) -> str:
    """Return the page of a public name: that of the first module that has it."""
    value = getattr(import_module(module), name)
    for first in MODULES:
        if name in public_names(first) and getattr(import_module(first), name) is value:
            return f"reference/{first}/{name}.md"
    raise AssertionError(f"{module} is not in MODULES")


def reference_nav() -> list[Any]:
    """Return the part of the navigation."""
    nav: list[Any] = []
    for module in MODULES:
        own = f"reference/{module}/"
        pages = [(name, page_of(module, name)) for name in public_names(module)]
        entries = [{name: page} for name, page in pages if page.startswith(own)]
        nav.append({module: [f"{own}README.md", *entries]})
    return [*nav, {"Command line": COMMANDS}]


def reference_pages() -> dict[str, str]:
    """Return the Markdown of every page by its name; mkdocstrings renders the directives."""
    pages = {COMMANDS: _commands_page()}
    for module, summary in MODULES.items():
        rows = []
        for name in public_names(module):
            page = page_of(module, name)
            pages[page] = f"::: {page.split('/')[1]}.{name}\n"
            rows.append(f"| [`{name}`](../../{page}) | {_first_line(module, name)} |")
        table = "\n".join(["| name | |", "|---|---|", *rows])
        pages[f"reference/{module}/README.md"] = f"# {module}\n\n{summary}\n\n{table}\n"
    return pages


def _first_line(module: str, name: str) -> str:
    """Return the first sentence of the docstring of a name."""
    value = getattr(import_module(module), name)
    text = inspect.getdoc(value) if callable(value) else ""
    return (text or "").split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")


def _commands_page() -> str:
    """Return the help of every command."""
    from attnzoo.cli import app

    command = typer.main.get_command(app)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="attnzoo")
