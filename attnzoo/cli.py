"""The command line; what a command does is in attnzoo/commands."""

from __future__ import annotations

import typer

from attnzoo.commands import compare, families, models, recovery, terminal
from attnzoo.errors import AttnzooError

app = typer.Typer(
    help="Swap the attention of a transformers model, and see what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("list")(models.list_backends)
app.command("describe")(models.describe)
app.command("swap")(models.swap)
app.command("demo")(models.demo)
app.command("families")(families.families)
app.command("plan")(recovery.plan)
app.command("recover")(recovery.recover)
app.command("finetune")(recovery.finetune)
app.command("evaluate")(recovery.evaluate)
app.command("compare")(compare.compare)
app.command("tasks")(compare.tasks)
app.command("inspect")(compare.inspect)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2, not a traceback."""
    try:
        app(prog_name="attnzoo")
    except AttnzooError as error:
        terminal.problems.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
