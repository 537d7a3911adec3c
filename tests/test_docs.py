"""Python code in README.md, CONTRIBUTING.md, docs/ and integrations/ runs, and links resolve.

The command line accepts the commands of the page about large models, which are too large to run.

The blocks of a page run in one namespace, in a new process and a temporary folder. A block after
``<!-- not run: REASON -->`` is reported as skipped.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from attnzoo.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md", "integrations/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
# The conformance suite; PEFT's import and training
SLOW = {"docs/extending.md", "integrations/peft/README.md"}
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# The examples name a model of the reader's; here it is the embedded one.
PLACEHOLDER = '"your-org/your-causal-model"'
EMBEDDED = "str(__import__('attnzoo.evaluation.models').evaluation.models.embedded_model_path())"


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


class Block(NamedTuple):
    line: int
    code: str
    reason: str | None


def blocks(page: str) -> list[Block]:
    """Return the Python blocks of a page: first line, code, and why it is not run."""
    found = []
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("code")) + 1
        found.append(Block(line, match["code"], match["reason"]))
    return found


def script(page: str) -> str:
    """Return the blocks to run as a script with the line numbers of the page."""
    lines = [""] * page.count("\n")
    for block in blocks(page):
        if block.reason is None:
            code = block.code.replace(PLACEHOLDER, EMBEDDED).splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines)


TEXTS = {page: (ROOT / page).read_text("utf-8") for page in PAGES}
RUN = [page for page, text in TEXTS.items() if script(text).strip()]
NOT_RUN = [(page, b) for page, text in TEXTS.items() for b in blocks(text) if b.reason is not None]


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in RUN]
)
def test_code_runs(page, tmp_path, fresh_python):
    file = tmp_path / f"page_{Path(page).stem}.py"  # no name of a library, such as peft.py
    file.write_text(script(TEXTS[page]), "utf-8")
    done = fresh_python(file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "block"), NOT_RUN, ids=lambda x: x if isinstance(x, str) else "")
def test_code_that_is_not_run(page, block):
    compile(block.code, page, "exec")
    pytest.skip(f"{page}:{block.line} is not run: {block.reason}")


TOO_LARGE = ("docs/large_models.md",)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """Return the arguments of each complete attnzoo command in the shell blocks of a page."""
    found = []
    for block in SHELL.findall(page):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"(?:^|-m )attnzoo (.*)$", line)
            if match and not re.search(r"\.\.\.( |$)|\$", match[1]):
                found.append(shlex.split(match[1].split(" > ")[0], comments=True))
    return found


@pytest.mark.parametrize("page", TOO_LARGE)
def test_the_command_line_accepts_commands(page):
    known = typer.main.get_command(app).commands
    given = commands(TEXTS[page])
    assert len(given) > 2
    for name, *arguments in given:
        known[name].make_context(name, arguments)  # raises a UsageError


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).strip().replace(" ", "-") for x in headings}


def broken_links(page: str, folder: Path) -> list[str]:
    """Return the relative links of a page in a folder that lead to no file or no heading."""
    broken = []
    for name, anchor in LINK.findall(page):
        target = folder / name
        if name and not target.exists():
            broken.append(name)
        elif anchor and anchor not in anchors(target.read_text("utf-8") if name else page):
            broken.append(f"{name}#{anchor}")
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    assert broken_links(TEXTS[page], (ROOT / page).parent) == []


def test_broken_links_are_found():
    page = (
        "# A page\n[a](none.md) [b](README.md) [c](README.md#none) [d](#a-page) [e](#b) ![f](g.png)"
    )
    assert broken_links(page, ROOT) == ["none.md", "README.md#none", "#b", "g.png"]


def test_blocks_are_found():
    page = (
        "text\n```python\na = 1\n```\n<!-- not run: needs a GPU -->\n```python\nb = 2\n```\n"
        "```sh\nls\n```\n```python\nc = a\n```\n"
    )
    assert [block.line for block in blocks(page)] == [3, 7, 13]
    assert [block.reason for block in blocks(page)] == [None, "needs a GPU", None]
    assert script(page).splitlines()[2::10] == ["a = 1", "c = a"]
    assert "b = 2" not in script(page)


def test_readme_has_code():
    assert "README.md" in RUN
