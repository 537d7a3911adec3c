"""Command that plans a swap, or the recurrent layers of a student."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.options import (
    Data,
    DatasetTextField,
    MaxTokens,
    Model,
    argument_of,
    parse_size,
    spec_of,
)
from attnzoo.commands.terminal import console, show_status
from attnzoo.errors import SpecError
from attnzoo.evaluation.margins import mean_of, plus_minus
from attnzoo.report.table import Table, format_bytes

TargetLength = Annotated[
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
Transferred = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="run of `recover` with transfer only, in all layers: measure its trained layers",
    ),
]
Class = Annotated[
    str | None,
    typer.Option(
        metavar="CLASS",
        help="what a stock class holds (attnzoo convert --to CLASS): windows of one size, within "
        "--cache-bytes, or the recurrent layers of a student, which --from has transferred",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing --output-file")]
Candidates = Annotated[
    list[str] | None,
    typer.Option(help="BACKEND (by its presets) or BACKEND:NAME=VALUE,... (repeatable)"),
]


def plan(
    path: Model,
    data: Data,
    keep_softmax: KeepSoftmax = None,
    cache_bytes: CacheBytes = None,
    cache_length: Annotated[
        str, typer.Option(help="context length of --cache-bytes in tokens")
    ] = "16k",
    output_file: Annotated[Path | None, typer.Option(help="JSON file for the plan")] = None,
    candidate: Candidates = None,
    from_: Transferred = None,
    rows: Annotated[int, typer.Option(min=1, help="rows to measure on")] = 8,
    max_tokens: MaxTokens = None,
    max_length: Annotated[
        int | None, typer.Option(min=8, help="tokens per row; default: --target-length, or 512")
    ] = None,
    target_length: TargetLength = None,
    to: Class = None,
    overwrite: Overwrite = False,
    dataset_text_field: DatasetTextField = "text",
) -> None:
    """Measure how much each layer needs softmax, and choose an attention for each layer."""
    from attnzoo.hf.stock.gated_delta_net import FAMILY
    from attnzoo.report.output_path import check_file
    from attnzoo.training.data import RowOptions, load_rows
    from attnzoo.training.plan import make_plan
    from attnzoo.training.student import plan_student

    if keep_softmax is not None and cache_bytes is not None:
        raise SpecError("plan takes either --keep-softmax or --cache-bytes")
    if output_file is not None:
        check_file(output_file, overwrite=overwrite)
    is_student = to == FAMILY
    given = {"from": from_, "candidate": candidate, "cache-bytes": cache_bytes}
    _check_kind("swap" if to is None else "student" if is_student else "class", given)
    options: dict[str, Any] = {"run": from_}
    if not is_student:
        options = _candidates(path, to, candidate, from_) | {"target_length": target_length}
        options["cache_bytes"] = cache_bytes and parse_size(cache_bytes, "--cache-bytes")
        options["cache_length"] = parse_size(cache_length, "--cache-length")
    row_options = RowOptions(
        dataset_text_field=dataset_text_field,
        max_length=max_length or target_length or 512,
        repeat_share=1.0,  # a repeated segment in each document that takes one
        max_tokens=max_tokens,
    )
    options["rows"] = load_rows(path, data, row_options)[0].select(slice(rows))
    options["keep_softmax"] = 0.25 if keep_softmax is None else keep_softmax
    with show_status(console) as show:
        make: Any = plan_student if is_student else make_plan
        made_plan = make(path, on_step=show, **options)
    print_plan(made_plan)
    if output_file is None:
        console.print("Nothing was written; give --output-file FILE to save the plan.")
        return
    made_plan.write(output_file)
    console.print(f"Plan:   {output_file}", soft_wrap=True)
    _print_next(argument_of(path), output_file, to, from_)


def _print_next(model: str, file: Path, to: str | None, run: Path | None) -> None:
    """Print the command that uses a plan."""
    use, more = ["recover", model], [] if run is None else ["--transfer-from", str(run)]
    if to is not None:
        use, more = ["convert", model, "--to", to], ["--output-dir", "NEW"]
    command = shlex.join(["attnzoo", *use, "--plan", str(file), *more])
    console.print(f"Next:   {command}{' ...' if to is None else ''}", soft_wrap=True)


# by kind of plan: the options that it does not take, and why; that which it needs, and why
KINDS = {
    "swap": ((), "", "", ""),
    "student": (
        ("cache-bytes", "candidate"),
        "A plan of recurrent layers has one candidate, and --keep-softmax sets its memory",
        "from",
        "Recurrent layers are ranked after a transfer: run `attnzoo convert DIR --to CLASS "
        "--recurrent LAYERS` with all layers that may become recurrent, then `attnzoo recover "
        "STUDENT --teacher DIR --config student_transfer`, and give the folder of its result by "
        "--from",
    ),
    "class": (
        ("from", "candidate"),
        "--to plans windows of the sizes that it tries itself",
        "cache-bytes",
        "--to chooses windows and layers within --cache-bytes; give it",
    ),
}


def _check_kind(kind: str, given: dict[str, Any]) -> None:
    """Raise ``SpecError`` for an option that a kind of plan does not take, or needs."""
    excluded, why_not, needed, why = KINDS[kind]
    for name in excluded:
        if given[name]:
            raise SpecError(f"{why_not}; leave --{name} out")
    if needed and given[needed] is None:
        raise SpecError(why)


def _candidates(
    path: Path, to: str | None, texts: list[str] | None, run: Path | None
) -> dict[str, Any]:
    """Return the candidates of a plan of a swap, or of windows in a stock class."""
    from attnzoo.hf.saving.files import read_config
    from attnzoo.training.plan import preset_candidates, read_transferred, window_candidates

    if to is not None:
        names = window_candidates(read_config(path).model_type, to)
        return {"candidates": names, "one_for_all": True}
    names = [] if run and not texts else preset_candidates(*([texts] if texts else []))
    for name in names:
        spec_of(name)
    return {"candidates": names, "transferred": run and read_transferred(run)}


def print_plan(made_plan: Any) -> None:
    """Print the candidates, those that are left out with the reason, and the choice."""
    for name, reason in made_plan.left_out.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True, highlight=False)
    if made_plan.candidates:
        candidates_table(made_plan.candidates).print(console)
    layers_table(made_plan).print(console)


def candidates_table(candidates: list[dict[str, Any]]) -> Table:
    """Return a table of the candidates: what they save, and the window of equal memory."""
    rows = []
    for one in candidates:
        kl, window = mean_of(one["kl_rows"]), mean_of(one["window_rows"])
        rows.append(
            [
                one["name"],
                format_bytes(one["cache_bytes"]),
                f"{one['cache_bytes'] / one['exact_bytes']:.0%}",
                plus_minus(kl.mean, kl.error, 4),
                one["window"],
                plus_minus(window.mean, window.error, 4) if one["window_rows"] else "-",
                one["winner"],
            ]
        )
    return Table(
        columns=(
            "candidate, all layers",
            f"cache at {candidates[0]['length']:,} tokens",
            "of softmax's",
            "KL, nats",
            "window of equal memory",
            "its KL, nats",
            "changes predictions less",
        ),
        rows=rows,
        title="candidates in all layers, untrained",
    )


def layers_table(made_plan: Any) -> Table:
    """Return a table of a plan: KL by layer and candidate, and each layer's choice."""
    change = plus_minus(made_plan.divergence, made_plan.divergence_error, 4)
    return Table(
        columns=("layer", *made_plan.layers[0]["alone"], "choice"),
        rows=[
            [
                str(x["layer"]),
                *(f"{kl:.4f}" for kl in x["alone"].values()),
                made_plan.chosen.get(x["layer"], "softmax"),
            ]
            for x in made_plan.layers
        ],
        title="KL of the predictions in nats when only one layer is swapped",
        caption=f"under the plan, without training: {change} nats",
    )
