"""Notebooks: Python files of cells (jupytext's percent format) are run, and become pages.

``python -m tools.site.notebooks FILE`` runs one and prints what each cell prints, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
from nbformat.v4 import new_output

TIMEOUT_S = 1800


def run_notebook(path: Path) -> Any:
    """Run a notebook in a process and a folder of its own; return it with its outputs.

    Raises:
        subprocess.CalledProcessError: A cell raises an error, which is printed.
    """
    command = [sys.executable, "-m", "tools.site.notebooks", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    notebook = jupytext.read(path)
    for cell, printed in zip(_code(notebook), json.loads(done.stdout), strict=True):
        cell.outputs = [new_output("stream", text=printed)] if printed.strip() else []
    return notebook


def notebook_page(notebook: Any, name: str) -> str:
    """Return a notebook as Markdown, with a link to the file ``name`` beside it."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [f"```text\n{output.text.rstrip()}\n```" for output in cell.outputs]
    parts.insert(1, f'<a href="../{name}" download>Download this page as a notebook</a>')
    return "\n\n".join(parts) + "\n"


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _cell_outputs(path: Path) -> list[str]:
    """Run the code cells of a notebook in this process and return what each one prints."""
    outputs = []
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(_code(jupytext.read(path)), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.source, f"{path.name}, cell {number}", "exec"), namespace)
        outputs.append(printed.getvalue())
    return outputs


if __name__ == "__main__":
    file = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = _cell_outputs(file)
    print(json.dumps(found))
