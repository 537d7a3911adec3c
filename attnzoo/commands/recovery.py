"""Commands that recover quality after a swap, and measure it: recover, finetune, evaluate."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.options import Data, DatasetTextField, MaxTokens, Model, model_folder
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.errors import SpecError


def recover(context: typer.Context) -> None:
    """Swap a model and recover its quality by attention transfer and distillation."""
    given = _arguments("recover", context.args)
    if given is None:
        return
    swap, args, path = given
    from attnzoo.training.plan import read_plan
    from attnzoo.training.recover import recover as start

    if [swap.attention, swap.plan, swap.teacher].count(None) != 2:
        raise SpecError(
            "recover takes either --attention (with --layers) or --plan FILE, or --teacher MODEL "
            "for a student of a stock class"
        )
    spec, weights = swap.spec(), None
    if swap.plan is not None:
        spec, weights = read_plan(Path(swap.plan))
        if isinstance(spec, str):
            raise SpecError(
                f"{swap.plan!r} has the recurrent layers of a student; give it to attnzoo convert"
            )
    teacher = None if swap.teacher is None else model_folder(swap.teacher)
    options: dict[str, Any] = {"teacher": teacher, "weights": weights}
    _run(partial(start, path, spec, swap.data_paths(), args, **options), args)


def finetune(context: typer.Context) -> None:
    """Fine-tune a model on text, swapped by --attention or already swapped."""
    given = _arguments("finetune", context.args)
    if given is None:
        return
    swap, args, model_args, path = given
    from attnzoo.training.finetune import finetune as start

    options = {"compare": swap.compare}
    _run(partial(start, path, swap.spec(), swap.data_paths(), args, model_args, **options), args)


def _arguments(command: str, argv: list[str]) -> tuple[Any, ...] | None:
    """Return the arguments of a command line and the model; ``None`` after a help text."""
    if not argv or {"-h", "--help"} & {*argv}:
        print((files("attnzoo.commands") / "help" / f"{command}.txt").read_text("utf-8"), end="")
        return None
    from attnzoo.commands.arguments import Parser

    if "--help-all" in argv:
        print(Parser(command).format_help(), end="")
        return None
    return Parser(command).parse(argv)


def _run(start: Any, args: Any) -> None:
    """Run a training command and print its results, in the first process."""
    from accelerate import PartialState

    is_first = os.environ.get("RANK", "0") == "0"
    log = partial(console.print, soft_wrap=True, highlight=False)
    results = start(log=log if is_first else lambda text: None)
    PartialState().destroy_process_group()  # gloo's threads may abort a process that ends before
    if is_first:
        print_results(results)
        after = "" if "student" in results else " after `import attnzoo`"
        log(f"Model:  {args.output_dir} (load it with from_pretrained{after})")


def print_results(results: dict[str, Any]) -> None:
    """Print the quality of every model and the verdict; of fine-tuning, held-out losses."""
    if "verdict" not in results:
        for name, loss in results["lines"].items():
            console.print(f"{name:13} {loss:.4f} nats a token of held-out text", highlight=False)
        return
    from attnzoo.training.report import results_table

    results_table(results).print(console)
    console.print(results["verdict"], style="bold", soft_wrap=True)


Control = Annotated[
    int | None,
    typer.Option(min=1, help="window of the baseline, in tokens; default: the swap's window"),
]
TargetLength = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="tokens for which the swap is meant: it is evaluated there too, and compared with the "
        "window of equal memory; default: --max-length",
    ),
]
Rows = Annotated[int, typer.Option(min=1, help="held-out rows")]


def evaluate(
    path: Model,
    data: Data,
    rows: Rows = 32,
    max_tokens: MaxTokens = None,
    max_length: Annotated[int, typer.Option(min=8, help="tokens per row")] = 512,
    control: Control = None,
    target_length: TargetLength = None,
    dataset_text_field: DatasetTextField = "text",
    as_json: AsJson = False,
) -> None:
    """Compare a swapped model with softmax and with its window alone."""
    from attnzoo.training.arguments import token_count
    from attnzoo.training.evaluator import evaluate as evaluate_model

    results = evaluate_model(
        path,
        data,
        column=dataset_text_field,
        row_length=max_length,
        rows=rows,
        max_tokens=token_count(max_tokens),
        control=control,
        target_length=target_length,
        log=partial((problems if as_json else console).print, soft_wrap=True, highlight=False),
    )
    if as_json:
        print(json.dumps(results, indent=2, default=str))
    else:
        print_results(results)
