"""Commands that bring quality back after a swap: plan, recover, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.spec_options import spec_of
from attnzoo.commands.terminal import console
from attnzoo.errors import SpecError


def plan(
    path: Annotated[Path, typer.Argument(help="folder of a saved causal model, not swapped")],
    data: Annotated[list[Path], typer.Option(help="text, .jsonl, .parquet, or folders of them")],
    keep_softmax: Annotated[
        float, typer.Option(help="share or number of layers kept exact")
    ] = 0.25,
    out: Annotated[Path | None, typer.Option(help="file for the plan; not written without")] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND or BACKEND:NAME=VALUE,NAME=VALUE (repeatable)"),
    ] = None,
    rows: Annotated[int, typer.Option(help="rows to measure on")] = 8,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    window: Annotated[int, typer.Option(help="tokens beyond which attention is far")] = 32,
    column: Annotated[str, typer.Option(help="field of JSON and parquet with the text")] = "text",
) -> None:
    """Measure which layers can do without softmax, and choose an attention for each."""
    from attnzoo.training.plan import CANDIDATES, make_plan
    from attnzoo.training.recover import RecoverConfig, load_rows
    from attnzoo.training.report import plan_table

    specs = {text: _candidate(text) for text in candidate or CANDIDATES}
    train, _ = load_rows(path, data, column, RecoverConfig(row_length=length, repeat_share=1.0))
    with console.status("") as status:
        made = make_plan(
            path,
            train.tokens[:rows],
            specs,
            keep_softmax=keep_softmax,
            window=window,
            tick=status.update,
        )
    console.print(plan_table(made))
    if out is None:
        console.print("Nothing was written; give --out FILE to keep the plan.")
        return
    made.write(out)
    console.print(f"Written to {out}; go on with: attnzoo recover {path} --plan {out} ...")


def _candidate(text: str) -> Any:
    """Read a backend with options."""
    name, _, options = text.partition(":")
    return spec_of(name, [part for part in options.split(",") if part], None, None)


def recover(
    path: Annotated[Path, typer.Argument(help="folder of a saved causal model, not swapped")],
    data: Annotated[list[Path], typer.Option(help="text, .jsonl, .parquet, or folders of them")],
    out: Annotated[Path, typer.Option(help="new folder for the recovered model")],
    attention: Annotated[str | None, typer.Option(help="backend for every other layer")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="option of the backend: NAME=VALUE")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="exceptions: LAYERS=BACKEND, such as 0-1,11=flash")
    ] = None,
    else_: Annotated[
        str | None, typer.Option("--else", help="backend for layers that the first one refuses")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="what `attnzoo plan` wrote")] = None,
    transfer_steps: Annotated[int, typer.Option(help="of what backends added, by layer")] = 100,
    distil_steps: Annotated[int, typer.Option(help="towards what softmax predicts")] = 100,
    train: Annotated[str, typer.Option(help="in distillation: extras, lora or full")] = "lora",
    batch: Annotated[int, typer.Option(help="rows of a step, over all processes")] = 8,
    accumulate: Annotated[int, typer.Option(help="parts that a batch is taken in")] = 1,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    column: Annotated[str, typer.Option(help="field of JSON and parquet with the text")] = "text",
    seed: int = 0,
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint in --out")] = False,
) -> None:
    """Swap a model and bring its quality back: transfer, distillation, an honest account."""
    from attnzoo.training.loop import LoopConfig
    from attnzoo.training.plan import read_plan
    from attnzoo.training.recover import RecoverConfig
    from attnzoo.training.recover import recover as recover_model
    from attnzoo.training.report import ProgressBar, lines_table

    if (attention is None) == (plan is None):
        raise SpecError("recover takes either --attention (with --set, --layers) or --plan FILE")
    spec, weights = read_plan(plan) if plan else (spec_of(attention, option, layers, else_), None)
    config = RecoverConfig(
        transfer_steps=transfer_steps,
        distil_steps=distil_steps,
        train=train,  # type: ignore[arg-type]
        row_length=length,
        loop=LoopConfig(batch_size=batch, accumulate=accumulate, seed=seed),
    )
    with ProgressBar(console, {"transfer": transfer_steps, "distil": distil_steps}) as bar:
        results = recover_model(
            path,
            spec,
            data,
            out,
            config,
            column=column,
            resume=resume,
            weights=weights,
            tell=bar.tell,
            tick=bar.tick,
        )
    if bar.main:
        console.print(lines_table(results))
        console.print(results["verdict"], style="bold", soft_wrap=True)
        console.print(f"Written to {out}; load it with from_pretrained after `import attnzoo`.")


def evaluate(
    path: Annotated[Path, typer.Argument(help="folder of a saved causal model that is swapped")],
    data: Annotated[list[Path], typer.Option(help="text, .jsonl, .parquet, or folders of them")],
    rows: Annotated[int, typer.Option(help="held-out rows to judge on")] = 32,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    column: Annotated[str, typer.Option(help="field of JSON and parquet with the text")] = "text",
) -> None:
    """Judge a swapped model against its own attention, the window alone, and each branch."""
    from attnzoo.training.recover import evaluate as evaluate_model
    from attnzoo.training.report import lines_table

    results = evaluate_model(
        path, data, column=column, row_length=length, rows=rows, tell=console.print
    )
    console.print(lines_table(results))
    console.print(results["verdict"], style="bold", soft_wrap=True)
