"""Commands on the environment of programs: run, autoload, doctor."""

from __future__ import annotations

import json
import os
import runpy
import sys
import sysconfig
import traceback
from collections import Counter
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.errors import AttnzooError

# A line of a .pth file that begins with "import" is run whenever Python starts. The finder imports
# attnzoo when transformers is about to be imported, and finds no module itself. It needs nothing of
# attnzoo before, so that it does no harm after attnzoo has been uninstalled.
AUTOLOAD_FILE = "attnzoo-autoload.pth"
AUTOLOAD = """import sys; sys.meta_path.insert(0, type("AttnzooAutoload", (), {"find_spec": \
staticmethod(lambda name, path=None, target=None: None if name != "transformers" or \
"attnzoo" in sys.modules or not __import__("importlib.util").util.find_spec("attnzoo") \
else __import__("attnzoo") and None)}))
"""


class Switch(StrEnum):
    """What ``attnzoo autoload`` does."""

    ON = "on"
    OFF = "off"
    STATUS = "status"


def run(
    program: Annotated[str, typer.Argument(help="path of a script, or with -m, name of a module")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="arguments of the program; all that follow")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="PROGRAM is a module, as in `python -m`")
    ] = False,
) -> None:
    """Run a Python script or module that loads swapped models, without a change to it.

    Examples: `attnzoo run train.py --epochs 2`, `attnzoo run -m lm_eval --model hf ...`, and on two
    processes `torchrun --nproc-per-node 2 -m attnzoo run train.py`.
    """
    if not module and not Path(program).is_file():
        raise typer.BadParameter(f"there is no script {program!r}; for a module, give -m")
    sys.argv = [program, *(arguments or ())]
    try:
        folder = os.getcwd() if module else str(Path(program).resolve().parent)
        if not sys.flags.safe_path:
            sys.path[0] = folder
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except Exception:  # of the program: with its traceback, as under `python`
        traceback.print_exc()
        raise SystemExit(1) from None


def autoload(
    switch: Annotated[Switch, typer.Argument(help="on, off or status")] = Switch.STATUS,
) -> None:
    """Import attnzoo whenever a program of this Python environment imports transformers.

    `on` writes one file into the site-packages folder of the environment; `off` removes it.
    """
    file = Path(sysconfig.get_path("purelib"), AUTOLOAD_FILE)
    if switch is not Switch.STATUS:
        try:
            if switch is Switch.ON:
                file.write_text(AUTOLOAD, "utf-8")
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise AttnzooError(
                f"autoload cannot be switched {switch.value}: {error}; use an environment that you "
                "may write to, or `attnzoo run`"
            ) from error
    state = f"on ({file})" if file.is_file() else f"off (no {file})"
    console.print(f"autoload is {state}", markup=False, highlight=False, soft_wrap=True)


def doctor(as_json: AsJson = False) -> None:
    """Check versions, kernels, xformers and transformers; prints a table for an issue.

    On a GPU, it compares every implementation with float64 and times it, in two to three minutes.
    The results are kept: impl="auto" selects attnzoo's kernels where they are right and fastest.

    The exit code is 1 if a check fails, and 0 if something is merely not available.
    """
    from attnzoo.evaluation.installation import WRONG, check_installation
    from attnzoo.report.table import Table

    rows = []
    with problems.status("checking") as progress:
        for row in check_installation():
            rows.append(row)
            progress.update(f"checked {row.check}")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        cells = [[row.check, row.status, f"{row.seconds:.1f} s", row.detail] for row in rows]
        columns = ["check", "result", "time", "detail"]
        table = Table(columns=columns, rows=cells, numeric=False)
        if console.is_terminal:
            table.print(console)
        else:  # Markdown, for an issue
            console.print(table.markdown(), soft_wrap=True, end="")
        counts = Counter(row.status for row in rows)
        console.print(", ".join(f"{n} {status}" for status, n in counts.items()))
    raise typer.Exit(any(row.status == WRONG for row in rows))
