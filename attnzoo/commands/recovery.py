"""Commands that bring quality back after a swap: plan, recover, finetune, evaluate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.spec_options import spec_of
from attnzoo.commands.terminal import console
from attnzoo.commands.train_options import (
    Column,
    Control,
    Data,
    Length,
    TrainOptions,
    with_train_options,
)
from attnzoo.errors import SpecError

TransferTarget = Annotated[
    str, typer.Option(help="of softmax, what a layer learns to equal: its output, or its attention")
]
LayersAtOnce = Annotated[
    int | None, typer.Option(help="layers that transfer teaches at once; all without")
]
TopK = Annotated[int | None, typer.Option(help="of softmax's predictions that count one by one")]
CrossEntropy = Annotated[float, typer.Option(help="share of the text's next token in distillation")]
Train = Annotated[str, typer.Option(help="extras, lora or full")]


def plan(
    path: Annotated[Path, typer.Argument(help="folder of a saved causal model, not swapped")],
    data: Data,
    keep_softmax: Annotated[
        float | None, typer.Option(help="share or number of layers kept exact; 0.25 without")
    ] = None,
    cache_bytes: Annotated[
        str | None, typer.Option(help="in its place: what the cache may hold, such as 1MiB")
    ] = None,
    cache_length: Annotated[str, typer.Option(help="after so many tokens")] = "16k",
    out: Annotated[Path | None, typer.Option(help="file for the plan; not written without")] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND or BACKEND:NAME=VALUE,NAME=VALUE (repeatable)"),
    ] = None,
    rows: Annotated[int, typer.Option(help="rows to measure on")] = 8,
    length: Length = 512,
    window: Annotated[int, typer.Option(help="tokens beyond which attention is far")] = 32,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="measure and show, write nothing")] = (
        False
    ),
    column: Column = "text",
) -> None:
    """Measure which layers can do without softmax, and choose an attention for each."""
    from attnzoo.training.budget import CacheBudget, read_size
    from attnzoo.training.pages import write_plan_page
    from attnzoo.training.plan import CANDIDATES, make_plan
    from attnzoo.training.report import plan_table
    from attnzoo.training.runs import TrainConfig, load_rows

    if keep_softmax is not None and cache_bytes is not None:
        raise SpecError("plan takes either --keep-softmax or --cache-bytes")
    budget = None
    if cache_bytes is not None:
        length_then = read_size(cache_length, "--cache-length")
        budget = CacheBudget(bytes=read_size(cache_bytes, "--cache-bytes"), length=length_then)
    specs = {text: _candidate(text) for text in candidate or CANDIDATES}
    train, _ = load_rows(path, data, column, TrainConfig(row_length=length, repeat_share=1.0))
    with console.status("") as status:
        made = make_plan(
            path,
            train.tokens[:rows],
            specs,
            keep_softmax=0.25 if keep_softmax is None else keep_softmax,
            budget=budget,
            window=window,
            tick=status.update,
        )
    console.print(plan_table(made))
    if out is None or dry_run:
        console.print("Nothing was written; give --out FILE to keep the plan.")
        return
    made.write(out)
    drawn = ", ".join(map(str, write_plan_page(out.with_suffix(".html"), made)))
    console.print(f"Written to {out}" + (f", and drawn in {drawn}" if drawn else ""))
    console.print(f"Go on with: attnzoo recover {path} --plan {out} ...")


def _candidate(text: str) -> Any:
    """Read a backend with options."""
    name, _, options = text.partition(":")
    return spec_of(name, [part for part in options.split(",") if part], None, None)


@with_train_options
def recover(
    path: Annotated[Path, typer.Argument(help="folder of a saved model, not swapped")],
    plan: Annotated[Path | None, typer.Option(help="what `attnzoo plan` wrote")] = None,
    transfer_steps: Annotated[int, typer.Option(help="of what backends added, by layer")] = 100,
    transfer_target: TransferTarget = "output",
    layers_at_once: LayersAtOnce = None,
    distil_steps: Annotated[int, typer.Option(help="towards what softmax predicts")] = 100,
    top_k: TopK = None,
    cross_entropy: CrossEntropy = 0.0,
    train: Train = "lora",
    *,
    options: TrainOptions,
) -> None:
    """Swap a model and bring its quality back: transfer, distillation, an honest account."""
    from attnzoo.training import recover as recovery
    from attnzoo.training.plan import read_plan

    if (options.attention is None) == (plan is None):
        raise SpecError("recover takes either --attention (with --set, --layers) or --plan FILE")
    spec, weights = read_plan(plan) if plan else (options.spec(), None)
    config = recovery.RecoverConfig(
        transfer_steps=transfer_steps,
        transfer_target=transfer_target,  # type: ignore[arg-type]
        layers_at_once=layers_at_once,
        distil_steps=distil_steps,
        top_k=top_k,
        cross_entropy=cross_entropy,
        train=train,  # type: ignore[arg-type]
        **options.config(),
    )
    stages = {"softmax": distil_steps, "transfer": transfer_steps, "distil": distil_steps}
    start = partial(recovery.recover, path, spec, weights=weights)
    _run(start, config, stages, options)


@with_train_options
def finetune(
    path: Annotated[Path, typer.Argument(help="folder of a saved causal model, swapped or not")],
    steps: Annotated[int, typer.Option(help="of training")] = 200,
    compare: Annotated[bool, typer.Option(help="train softmax as long, to compare with")] = True,
    train: Train = "full",
    *,
    options: TrainOptions,
) -> None:
    """Train a swapped model on text; without --attention, one that is swapped already."""
    from attnzoo.training.finetune import FinetuneConfig
    from attnzoo.training.finetune import finetune as finetune_model

    if options.attention is None and (options.option or options.layers or options.else_):
        raise SpecError("--set, --layers and --else go with --attention, which is not given")
    spec = None if options.attention is None else options.spec()
    config = FinetuneConfig(
        steps=steps,
        tune_softmax=compare,
        train=train,  # type: ignore[arg-type]
        **options.config(),
    )
    stages = {"softmax": steps, "finetune": steps}
    _run(partial(finetune_model, path, spec), config, stages, options)


def _run(start: Any, config: Any, stages: dict[str, int], options: TrainOptions) -> None:
    """Run a training command under a progress bar, and tell what came out."""
    from attnzoo.training.report import ProgressBar, lines_table

    out = options.out
    with ProgressBar(console, stages) as bar:
        given = {"column": options.column, "resume": options.resume}
        results = start(options.data, out, config, **given, tell=bar.tell, tick=bar.tick)
    if bar.main:
        console.print(lines_table(results))
        console.print(results["verdict"], style="bold", soft_wrap=True)
        console.print(f"Written to {out}; load it with from_pretrained after `import attnzoo`.")


def evaluate(
    path: Annotated[Path, typer.Argument(help="folder of a saved causal model that is swapped")],
    data: Data,
    rows: Annotated[int, typer.Option(help="held-out rows to judge on")] = 32,
    length: Length = 512,
    control: Control = None,
    column: Column = "text",
) -> None:
    """Judge a swapped model against its own attention, the window alone, and each branch."""
    from attnzoo.training.judge import evaluate as evaluate_model
    from attnzoo.training.report import lines_table

    results = evaluate_model(
        path, data, column=column, row_length=length, rows=rows, control=control, tell=console.print
    )
    console.print(lines_table(results))
    console.print(results["verdict"], style="bold", soft_wrap=True)
