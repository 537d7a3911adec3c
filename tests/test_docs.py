"""The Python code in README.md, CONTRIBUTING.md and docs/ runs.

The blocks of a page run in one namespace, in a new process and a temporary folder. A block after
``<!-- not run: REASON -->`` is reported as skipped.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md"))),
]
SLOW = {"docs/extending.md", "docs/peft.md"}  # the conformance suite; PEFT's import and training
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# The examples name a model of the reader's; here it is the embedded one.
PLACEHOLDER = '"your-org/your-causal-model"'
EMBEDDED = "str(__import__('attnzoo.evaluation.models').evaluation.models.embedded_model_path())"


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
