"""The site: what ``make site`` builds, without the build, which fails on a broken link itself."""

import inspect
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import markdown
import pytest
from markdown_it import MarkdownIt
from mkdocs.config import load_config

from tests.processes import CalledProcessError
from tools.site.hooks import on_page_markdown, pages
from tools.site.notebooks import notebook_page, run_notebook
from tools.site.reference import COMMANDS, MODULES, page_of, reference_nav, reference_pages

ROOT = Path(__file__).resolve().parents[2]
CELLS = "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 2\n\n# %%\nprint(x + 1)\n"


def test_every_public_name_has_a_page_and_is_in_the_navigation():
    written = reference_pages()
    linked = re.findall(r"'([^']+\.md)'", str(reference_nav()))
    assert sorted(linked) == sorted(written)
    for module in MODULES:
        found = import_module(module)
        inner = {x for x in found.__all__ if inspect.ismodule(getattr(found, x))}
        assert {f"{module}.{name}" for name in inner} <= set(MODULES)  # have pages of their own
        names = set(found.__all__) - inner
        index = written[f"reference/{module}/README.md"]
        assert sorted(re.findall(r"^\| \[`(\w+)`\]", index, re.M)) == sorted(names)
        for name in names:
            (directive,) = re.findall(r"^::: ([\w.]+)$", written[page_of(module, name)], re.M)
            owner, _, attribute = directive.rpartition(".")
            value = getattr(import_module(module), name)
            assert getattr(import_module(owner), attribute) is value


def test_what_the_design_promises_is_in_the_reference():
    """Rows of "Who may rely on what" that are frozen or stable name public modules and names."""
    table = (ROOT / "docs/design.md").read_text("utf-8").partition("## Who may rely on what")[2]
    promised = [row for row in table.splitlines() if re.search(r"\| (frozen|stable)", row)]
    names = re.findall(r"`(attnzoo[\w.]*)`", " ".join(promised))
    assert len(promised) == 2
    assert len(names) >= 5
    written = reference_pages()
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert name in MODULES or page_of(module, attribute) in written, name


def test_every_command_is_in_the_reference():
    from attnzoo.cli import app

    names = {command.name for command in app.registered_commands}
    found = re.findall(r"^## `attnzoo ([\w-]+)`$", reference_pages()[COMMANDS], re.M)
    assert set(found) == names


TAGS = ("table", "tr", "ul", "ol", "li", "pre", "blockquote", "h1", "h2", "h3", "img", "strong")


def tags(html: str) -> Counter[str]:
    return Counter(tag for tag in re.findall(r"<([a-z0-9]+)[ >]", html) if tag in TAGS)


@pytest.fixture(scope="module")
def site_markdown():
    config = load_config(str(ROOT / "mkdocs.yml"))
    return markdown.Markdown(
        extensions=config.markdown_extensions, extension_configs=config.mdx_configs
    )


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_page_has_the_same_parts_on_github_and_on_the_site(page, site_markdown):
    """A list in a list, or code in one, takes four spaces on the site; GitHub takes two too."""
    text = page.read_text("utf-8")
    github = MarkdownIt("commonmark").enable("table").render(text)
    assert tags(site_markdown.reset().convert(text)) == tags(github)


def test_links_to_notebooks_lead_to_their_pages():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="docs/recover.md"))
    text = "[a](notebooks/swap_look_recover.py) [b](../attnzoo/spec.py) [c](swap.md#a)"
    changed = "[a](notebooks/swap_look_recover.md) [b](../attnzoo/spec.py) [c](swap.md#a)"
    assert on_page_markdown(text, page=page) == changed


def test_notebook_becomes_a_page_with_its_outputs(tmp_path):
    file = tmp_path / "cells.py"
    file.write_text(CELLS, "utf-8")
    notebook = run_notebook(file)
    assert [cell.cell_type for cell in notebook.cells] == ["markdown", "code", "code"]
    assert notebook_page(notebook, "cells.ipynb").split("\n\n") == [
        "# Title",
        "Text.",
        '<a href="../cells.ipynb" download>Download this page as a notebook</a>',
        "```python\nx = 2\n```",
        "```python\nprint(x + 1)\n```",
        "```text\n3\n```\n",
    ]


def test_notebook_whose_cell_fails_is_an_error(tmp_path):
    file = tmp_path / "cells.py"
    file.write_text(CELLS + "\n# %%\nprint(1 / 0)\n", "utf-8")
    with pytest.raises(CalledProcessError):
        run_notebook(file)
