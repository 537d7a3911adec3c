"""The command line; attnzoo/commands has the commands."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from rich.text import Text
from safetensors import SafetensorError

from attnzoo import __version__
from attnzoo.commands import (
    compare,
    environment,
    models,
    plan,
    recovery,
    terminal,
)
from attnzoo.errors import AttnzooError

STRICT = ("strict", "surrogateescape")  # errors of an output that no PYTHONIOENCODING has set
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --max_length, as of TRL
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"attnzoo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """Swap the attention of a transformers model, and measure what it costs."""
    of_ours = context.invoked_subcommand != "run"  # a program has its own output
    if of_ours and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in STRICT:
        sys.stdout.reconfigure(errors="replace")


app.command("run", context_settings={"allow_interspersed_args": False})(environment.run)
app.command("autoload")(environment.autoload)
app.command("doctor")(environment.doctor)
app.command("list")(models.list_backends)
app.command("describe")(models.describe)
app.command("swap")(models.swap)
app.command("convert")(models.convert)
app.command("demo")(compare.demo)
app.command("plan")(plan.plan)
# their options are those of dataclasses, which commands/arguments.py parses
PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
app.command("recover", context_settings=PASSED_ON)(recovery.recover)
app.command("finetune", context_settings=PASSED_ON)(recovery.finetune)
app.command("evaluate")(recovery.evaluate)
app.command("compare")(compare.compare)
app.command("memory")(compare.memory)
app.command("heads")(compare.heads)
app.command("tasks")(compare.tasks)
app.command("inspect")(compare.inspect)


def main() -> None:
    """Run the command line; a user error is one message and exit code 2, without a traceback.

    So is a file that cannot be read or written, such as damaged weights or a full disk.
    """
    try:
        app(prog_name="attnzoo")
    except (AttnzooError, OSError, SafetensorError) as error:
        of_weights = isinstance(error, SafetensorError)  # it does not name the file
        what = "A safetensors file is truncated or damaged, or not writable: " if of_weights else ""
        message = Text.assemble(("error:", "bold red"), f" {what}{error}")
        terminal.problems.print(message, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
