"""Commands that recover quality after a swap: plan, recover, finetune."""

from __future__ import annotations

import os
import shlex
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.options import (
    Data,
    DatasetTextField,
    MaxTokens,
    Model,
    argument_of,
    model_folder,
    spec_of,
)
from attnzoo.commands.terminal import console
from attnzoo.errors import ConfigError, SpecError
from attnzoo.report.live import show_status

MaxLength = Annotated[
    int | None, typer.Option(help="tokens per row; default: --target-length, or 512")
]
PlanTarget = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="tokens for which the swap is meant: candidates that save neither memory nor time "
        "there are left out; default: 4096, or the model's positions",
    ),
]
KeepSoftmax = Annotated[
    float | None,
    typer.Option(help="fraction or number of layers that keep softmax; default: 0.25"),
]
CacheBytes = Annotated[
    str | None, typer.Option(help="instead of --keep-softmax: largest cache, such as 1MiB")
]
PlanFrom = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="run of `recover` with transfer only, in all layers: measure its trained layers",
    ),
]
PlanClass = Annotated[
    str | None,
    typer.Option(
        metavar="CLASS",
        help="what a stock class holds (attnzoo convert --to CLASS): windows of one size, within "
        "--cache-bytes, or the recurrent layers of a student, which --from has transferred",
    ),
]
EqualWindow = Annotated[
    int | None, typer.Option(min=1, help="window of every candidate that has one, in tokens")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="measure and print, but write nothing")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing --output-file")]


def plan(
    path: Model,
    data: Data,
    keep_softmax: KeepSoftmax = None,
    cache_bytes: CacheBytes = None,
    cache_length: Annotated[
        str, typer.Option(help="context length of --cache-bytes in tokens")
    ] = "16k",
    output_file: Annotated[Path | None, typer.Option(help="JSON file for the plan")] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND (by its presets) or BACKEND:NAME=VALUE,... (repeatable)"),
    ] = None,
    from_: PlanFrom = None,
    equal_window: EqualWindow = None,
    rows: Annotated[int, typer.Option(min=1, help="rows to measure on")] = 8,
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    target_length: PlanTarget = None,
    window: Annotated[int, typer.Option(min=1, help="report attention beyond so many tokens")] = 32,
    to: PlanClass = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    dataset_text_field: DatasetTextField = "text",
) -> None:
    """Measure how much each layer needs softmax, and choose an attention for each layer."""
    from attnzoo.report.output_path import check_file
    from attnzoo.training.plan import make_plan
    from attnzoo.training.reuse import read_transferred

    if keep_softmax is not None and cache_bytes is not None:
        raise SpecError("plan takes either --keep-softmax or --cache-bytes")
    if output_file is not None and not dry_run:
        check_file(output_file, overwrite=overwrite)
    keep = 0.25 if keep_softmax is None else keep_softmax
    row_length = max_length or target_length or 512
    if to is not None and _has_recurrent_layers(to):
        given = {"cache-bytes": cache_bytes, "candidate": candidate, "equal-window": equal_window}
        run = _transferred_student(from_, given)
        measured = _plan_rows(path, data, dataset_text_field, row_length, max_tokens, rows)
        _plan_student(path, run, measured, to, keep, None if dry_run else output_file)
        return
    budget = None if cache_bytes is None else _budget(cache_bytes, cache_length)
    if to is not None:
        _refuse_with_class(from_, equal_window)
        candidate, budget = _for_class(path, to, candidate, budget)
    transferred = None if from_ is None else read_transferred(from_)
    specs = {} if transferred and not candidate else _candidate_specs(candidate, equal_window)
    measured = _plan_rows(path, data, dataset_text_field, row_length, max_tokens, rows)
    with show_status(console) as show:
        options: dict[str, Any] = {"window": window, "target_length": target_length}
        options |= {"budget": budget, "transferred": transferred}
        made_plan = make_plan(path, measured, specs, keep_softmax=keep, on_step=show, **options)
    _print_plan(made_plan)
    if output_file is None or dry_run:
        console.print("Nothing was written; give --output-file FILE to save the plan.")
        return
    _write_plan(made_plan, output_file, path)


def _plan_rows(
    path: Path, data: list[Path], column: str, length: int, max_tokens: str | None, count: int
) -> Any:
    """Return rows of training text, each with a repeated segment in a document that takes one."""
    from attnzoo.training.data import RowOptions, load_rows

    options = RowOptions(
        dataset_text_field=column, max_length=length, repeat_share=1.0, max_tokens=max_tokens
    )
    return load_rows(path, data, options)[0].select(slice(count))


def _has_recurrent_layers(to: str) -> bool:
    """Return whether a plan for a class chooses recurrent layers."""
    from attnzoo.hf.stock.classes import stock_class

    return bool(stock_class(to).recurrent)


def _transferred_student(from_: Path | None, given: dict[str, Any]) -> Path:
    """Return ``--from`` of a plan of a student's layers.

    Raises:
        SpecError: It is not given, or an option is given that does not apply.
    """
    for name, value in given.items():
        if value:
            raise SpecError(
                "A plan of recurrent layers has one candidate, and --keep-softmax sets its "
                f"memory; leave --{name} out"
            )
    if from_ is None:
        raise SpecError(
            "Recurrent layers are ranked after a transfer: run `attnzoo convert DIR --to CLASS "
            "--recurrent LAYERS` with all layers that may become recurrent, then `attnzoo recover "
            "STUDENT --teacher DIR --config student_transfer`, and give the folder of "
            "its result by --from"
        )
    return from_


def _plan_student(path: Path, run: Path, rows: Any, to: str, keep: float, out: Path | None) -> None:
    """Choose the recurrent layers of a student; print them and the next command."""
    from attnzoo.training.student_plan import plan_student

    with show_status(console) as show:
        made_plan = plan_student(path, run, rows, to=to, keep_softmax=keep, on_step=show)
    made_plan.table().print(console)
    choice = ["--recurrent", made_plan.layers]
    if out is not None:
        made_plan.write(out)
        console.print(f"Plan:   {out}", soft_wrap=True)
        choice = ["--plan", str(out)]
    command = ["attnzoo", "convert", argument_of(path), "--to", to, *choice]
    console.print(f"Next:   {shlex.join(command)} --output-dir STUDENT", soft_wrap=True)


def _budget(cache_bytes: str, cache_length: str) -> Any:
    """Return the limit of ``--cache-bytes`` at ``--cache-length``."""
    from attnzoo.training.budget import CacheBudget, parse_size

    tokens = parse_size(cache_length, "--cache-length")
    return CacheBudget(bytes=parse_size(cache_bytes, "--cache-bytes"), length=tokens)


def _refuse_with_class(from_: Path | None, equal_window: int | None) -> None:
    """Raise ``SpecError`` for options of a plan that choose other candidates than ``--to``."""
    for name, value in (("--from", from_), ("--equal-window", equal_window)):
        if value is not None:
            raise SpecError(
                f"--to plans windows of the sizes that it tries itself; leave {name} out"
            )


def _for_class(
    path: Path, to: str, candidate: list[str] | None, budget: Any
) -> tuple[list[str], Any]:
    """Return the candidates and the budget of a plan that a stock class holds."""
    from attnzoo.hf.saving.files import read_config
    from attnzoo.training.class_plan import OneWindow, window_candidates

    if candidate:
        raise SpecError(
            "--to plans windows of the sizes that it tries itself; leave --candidate out"
        )
    if budget is None:
        raise SpecError("--to chooses windows and layers within --cache-bytes; give it")
    return window_candidates(read_config(path).model_type, to), OneWindow(budget=budget)


def _candidate_specs(candidates: list[str] | None, window: int | None) -> dict[str, Any]:
    """Return the specs of ``--candidate`` by their texts; names have their presets' options.

    Args:
        candidates: The texts; the default candidates when ``None``.
        window: Window of every candidate that has one; ``None`` for their own.
    """
    from attnzoo.training.candidates import CANDIDATE_BACKENDS, preset_candidates, with_window

    specs = {}
    for given in candidates or CANDIDATE_BACKENDS:
        for text in [given] if ":" in given else preset_candidates([given]):
            name, spec = text, spec_of(text)
            if window is not None:
                name, spec = with_window(text, spec, window)
            specs[name] = spec
    return specs


def _print_plan(made_plan: Any) -> None:
    """Print the candidates, those that are left out with the reason, and the choice."""
    from attnzoo.training.plan_report import candidates_table, plan_table, windows_note

    for name, reason in made_plan.left_out.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True, highlight=False)
    candidates_table(made_plan).print(console)
    if note := windows_note(made_plan):
        console.print(note, soft_wrap=True, highlight=False)
    console.print(plan_table(made_plan))


def _write_plan(made_plan: Any, out: Path, path: Path) -> None:
    """Write a plan, and print the next command."""
    made_plan.write(out)
    console.print(f"Plan:   {out}", soft_wrap=True)
    command = shlex.join(["attnzoo", "recover", argument_of(path), "--plan", str(out)])
    if made_plan.transfer_from is not None:
        command += f" --transfer-from {shlex.quote(made_plan.transfer_from)}"
    console.print(f"Next:   {command} ...", soft_wrap=True)


def recover(context: typer.Context) -> None:
    """Swap a model and recover its quality by attention transfer and distillation."""
    given = _arguments("recover", context.args)
    if given is None:
        return
    path, swap, args = given
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
    teacher = None if swap.teacher is None else model_folder(swap.teacher)
    options: dict[str, Any] = {"teacher": teacher, "weights": weights}
    _run(partial(start, path, spec, swap.data_paths(), args, **options), args)


def finetune(context: typer.Context) -> None:
    """Fine-tune a model on text, swapped by --attention or already swapped."""
    given = _arguments("finetune", context.args)
    if given is None:
        return
    path, swap, args, model_args = given
    from attnzoo.training.finetune import finetune as start

    options = {"compare": swap.compare}
    _run(partial(start, path, swap.spec(), swap.data_paths(), args, model_args, **options), args)


def _arguments(command: str, argv: list[str]) -> tuple[Any, ...] | None:
    """Return the model's folder and the arguments of a command line; ``None`` after a help text."""
    if not argv or {"-h", "--help"} & {*argv}:
        print((files("attnzoo.commands") / "help" / f"{command}.txt").read_text("utf-8"), end="")
        return None
    from attnzoo.commands.arguments import Parser

    if "--help-all" in argv:
        print(Parser(command).format_help(), end="")
        return None
    if argv[0].startswith("-"):
        raise ConfigError(
            f"The model comes first: attnzoo {command} MODEL {argv[0]} ...; see attnzoo {command} "
            "--help"
        )
    path = model_folder(argv[0])
    return path, *Parser(command).parse(argv[1:])


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
