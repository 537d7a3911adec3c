"""Hooks of mkdocs: which files are pages of the site; their paths are those of the tree."""

from __future__ import annotations

import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.notebooks import notebook_page, run_notebook
from tools.site.reference import reference_nav, reference_pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/*.md", "examples/*/*.md", "integrations/**/*.md")
NOTEBOOKS = ROOT / "docs" / "notebooks"
RUN = os.environ.get("RUN_NOTEBOOKS") != "0"  # running them takes minutes; else they have no output
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


_runs: dict[
    str, Future[Any]
] = {}  # notebooks by the names of their pages; they run beside the build


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Start the notebooks, and add the reference to the navigation."""
    executor = ThreadPoolExecutor()
    for path in sorted(NOTEBOOKS.glob("*.py")):
        name = path.relative_to(ROOT).with_suffix(".md").as_posix()
        _runs[name] = executor.submit(run_notebook if RUN else jupytext.read, path)
    assert config.nav is not None
    config.nav.append({"Reference": reference_nav()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of ``docs_dir`` by the pages of the tree, what they link to, and more."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in [*pages(), *linked_files()]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in [*reference_pages().items(), *((name, "") for name in _runs)]:
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the text of a notebook; let links to notebooks, Python files, lead to their pages."""
    name = page.file.src_uri
    if name in _runs:
        markdown = notebook_page(_runs[name].result(), f"{Path(name).stem}.ipynb")
    folder = (ROOT / name).parent

    def to_page(link: re.Match[str]) -> str:
        is_notebook = (folder / link[1]).resolve().parent == NOTEBOOKS
        return re.sub(r"\.py$", ".md", link[0]) if is_notebook else link[0]

    return _LINK.sub(to_page, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the notebooks, with what they printed, beside their pages."""
    for name, run in _runs.items():
        file = Path(config.site_dir, name).with_suffix(".ipynb")
        file.write_text(jupytext.writes(run.result(), "ipynb"), "utf-8")


def pages() -> list[Path]:
    """Return the Markdown files that are pages."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def linked_files() -> list[Path]:
    """Return the files that pages link to and that are no pages: figures and sources."""
    links = {
        (page.parent / link).resolve()
        for page in pages()
        for link in _LINK.findall(page.read_text("utf-8"))
    }
    others = links - {*pages()}
    return sorted(path for path in others if path.is_file() and path.parent != NOTEBOOKS)
