"""Commands that make ``import attnzoo`` unnecessary in other programs: run, autoload."""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnzoo.commands.terminal import console, restore_output
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
    sys.argv = [program, *(arguments or ())]
    try:
        folder = os.getcwd() if module else str(Path(program).resolve().parent)
        if not sys.flags.safe_path:
            sys.path[0] = folder
        restore_output()  # what the program prints is as it would be under `python`
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            if not Path(program).is_file():
                raise typer.BadParameter(f"there is no script {program!r}; for a module, give -m")
            runpy.run_path(program, run_name="__main__")
    except AttnzooError:  # of the program: with its traceback, as under `python`
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
