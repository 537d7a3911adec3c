"""The command line: one function per command; heavy modules load inside, so --help is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attnzoo.errors import AttnzooError, SpecError

app = typer.Typer(
    help="Swap the attention of a transformers model, and see what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
problems = Console(stderr=True)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2, not a traceback."""
    try:
        app(prog_name="attnzoo")
    except AttnzooError as error:
        problems.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


@app.command("list")
def list_backends(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """List the attention backends: what they are, and what they can do."""
    from attnzoo.registry import available_backends, get_backend

    rows = []
    for name in available_backends():
        backend = get_backend(name)
        flags = ("exact", "causal", "bidirectional", "cross_attention", "recurrent")
        rows.append(
            {
                "name": name,
                "summary": (backend.__doc__ or "").strip().splitlines()[0],
                "options": backend.config_class.default_options(),
                "impls": list(backend.impls),
                **{flag: getattr(backend, flag) for flag in flags},
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    table = Table()
    for head in ("backend", "what it is", "can", "options (defaults)"):
        table.add_column(head, overflow="fold")
    for row in rows:
        can = [f.replace("_", "-") for f in flags if row[f]]
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        table.add_row(row["name"], row["summary"], ", ".join(can), options)
    console.print(table)


@app.command()
def describe(
    path: Annotated[Path, typer.Argument(help="folder of a saved model")],
) -> None:
    """Tell, layer by layer, which attention a saved model runs; reads its config only."""
    from attnzoo.integrations.describe import describe as describe_model
    from attnzoo.integrations.files import empty_model

    console.print(describe_model(empty_model(path)).table())


@app.command()
def swap(
    path: Annotated[Path, typer.Argument(help="folder of a saved model")],
    attention: Annotated[str, typer.Option(help="backend for every layer not named otherwise")],
    out: Annotated[Path, typer.Option(help="new folder for the swapped model")],
    option: Annotated[
        list[str] | None, typer.Option("--set", help="option of the backend: NAME=VALUE")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="exceptions: LAYERS=BACKEND, such as 0-1,11=flash")
    ] = None,
    else_: Annotated[
        str | None, typer.Option("--else", help="backend for layers that the first one refuses")
    ] = None,
) -> None:
    """Write a copy of a model with its attention swapped; from_pretrained gives it back."""
    from attnzoo.integrations.describe import describe as describe_model
    from attnzoo.integrations.files import swap_files

    spec = _spec(attention, option, layers, else_)
    console.print(describe_model(swap_files(path, spec, out)).table())
    console.print(f"Written to {out}; load it with from_pretrained after `import attnzoo`.")


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="folder of a causal model; the embedded one without")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="text file to judge it on")] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="backend to show (repeatable); all without")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for results and report")] = Path("attnzoo-demo"),
    quick: Annotated[bool, typer.Option(help="fewer rows, contexts up to 1k")] = False,
) -> None:
    """Swap every attention into one model; show quality, recall, decoding speed and cache size."""
    from attnzoo.demo.report import summary, terminal_table, write_report
    from attnzoo.demo.run import run_demo

    results = run_demo(
        model=model, text=text, out=out, names=attention, quick=quick, console=console
    )
    console.print(terminal_table(results))
    for result in results:
        if result.refused:
            console.print(f"[bold]{result.label}[/] was refused: {result.refused}", soft_wrap=True)
    console.print(summary(results))
    console.print(f"Numbers: {out / 'results.json'}")
    page = write_report(out, results)
    missing = "no report without plotly (pip install attnzoo[report])"
    console.print(f"Report:  {page}" if page else missing, markup=False)


@app.command()
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
    return _spec(name, [part for part in options.split(",") if part], None, None)


@app.command()
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
    spec, weights = read_plan(plan) if plan else (_spec(attention, option, layers, else_), None)
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


@app.command()
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


def _spec(
    attention: str | None, option: list[str] | None, layers: list[str] | None, else_: str | None
) -> Any:
    """Make a spec of what the command line says."""
    from attnzoo.spec import AttentionSpec

    assert attention is not None
    return AttentionSpec(
        attention,
        layers=dict(_pair(text, "--layers", "0-1=flash") for text in layers or ()),
        else_=else_,
        **{
            name: _value(value)
            for name, value in (_pair(text, "--set", "feature_map=elu+1") for text in option or ())
        },
    )


def _pair(text: str, option: str, example: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise SpecError(f"{option} takes NAME=VALUE, such as {example}; got {text!r}")
    return name.strip(), value.strip()


def _value(text: str) -> Any:
    """Read a value as JSON where it is JSON (numbers, true, null, lists), else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
