"""Commands that measure over length: compare, inspect, tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.spec_options import spec_of
from attnzoo.commands.terminal import console
from attnzoo.errors import SpecError


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def specs_of(attention: list[str], named: Callable[[list[str]], list[Any]]) -> list[Any] | None:
    """Read --attention: ``all`` (``None``), names separated by commas, or one with options.

    Args:
        attention: What was given.
        named: Makes specs of names without options.
    """
    found: list[Any] = []
    for text in attention:
        name, colon, options = text.partition(":")
        if colon:
            found.append(spec_of(name, [part for part in options.split(",") if part], None, None))
        elif text == "all":
            return None
        else:
            found += named(_parts(text))
    if not found:
        raise SpecError("--attention names no backend; give all, or names such as linear,reformer")
    return found


Model = Annotated[str, typer.Argument(help="folder of a saved model; the embedded one without")]
Attention = Annotated[
    list[str] | None, typer.Option(help="all, NAME,NAME or NAME:OPTION=VALUE,... (repeatable)")
]
Lengths = Annotated[str, typer.Option(help="tokens: 1k..64k doubles, 512,2k,3000 lists")]
Out = Annotated[Path, typer.Option(help="folder of results; goes on from what is in it")]
Level = Annotated[str, typer.Option(help="op, layer, model, several by commas, or all")]
Dtype = Annotated[str | None, typer.Option(help="float32 on a CPU, bfloat16 on a GPU without")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or both by commas; all without")]
Memory = Annotated[float | None, typer.Option(help="GiB a case may take; 3/4 of the free without")]


def compare(
    model: Model = "embedded",
    lengths: Lengths = "1k..16k",
    attention: Attention = None,
    out: Out = Path("attnzoo-compare"),
    mode: Annotated[str, typer.Option(help="forward, train or decode")] = "forward",
    level: Level = "all",
    tokens: Annotated[int, typer.Option(help="of a call: rows are as many as fit")] = 4096,
    batch: Annotated[int | None, typer.Option(help="rows, in place of --tokens")] = None,
    dtype: Dtype = None,
    device: Device = None,
    text: Annotated[Path | None, typer.Option(help="text to judge quality on")] = None,
    quality: Annotated[bool, typer.Option(help="judge quality over length, too")] = True,
    quality_length: Annotated[int, typer.Option(help="tokens of a row that is judged")] = 2048,
    timeout: Annotated[float, typer.Option(help="seconds a case may take")] = 60.0,
    memory: Memory = None,
    threads: Annotated[int | None, typer.Option(help="of torch; all cores without")] = None,
    fresh: Annotated[bool, typer.Option(help="set earlier results in --out aside")] = False,
) -> None:
    """Measure time, memory and quality over length: which attention, from where on, at what price.

    Every case runs in a process of its own; one that fails is a row with its reason.
    """
    from attnzoo.compare.lengths import parse_lengths

    tokens_of = parse_lengths(lengths)  # before torch loads
    from attnzoo.compare.cases import LEVELS, default_specs
    from attnzoo.compare.report import show, write_report
    from attnzoo.compare.results import FILE
    from attnzoo.compare.run import Plan
    from attnzoo.compare.run import compare as run_comparison
    from attnzoo.report.page import WITHOUT_PLOTLY

    plan = Plan(
        model=model,
        lengths=tokens_of,
        specs=specs_of(attention or ["all"], default_specs),
        out=out,
        levels=LEVELS if level == "all" else _parts(level),
        mode=mode,
        tokens=tokens,
        batch=batch,
        dtype=dtype,
        devices=_parts(device) if device else None,
        text=text,
        quality=quality,
        quality_length=quality_length,
        timeout=timeout,
        memory_gib=memory,
        threads=threads,
        fresh=fresh,
    )
    with console.status("") as status:
        rows = run_comparison(
            plan, lambda done, total, name: status.update(f"{done}/{total}  {name}")
        )
    show(console, rows, mode, model)
    console.print(f"Numbers: {out / FILE}")
    page = write_report(out, rows, mode, model)
    console.print(f"Report:  {page}" if page else WITHOUT_PLOTLY, markup=False)


def tasks(
    task: Annotated[str, typer.Option(help="mqar, duplication, induction, listops or bytes")],
    attention: Annotated[
        list[str] | None,
        typer.Option(help="NAME,NAME or NAME:OPTION=VALUE,... (repeatable); what it tells apart"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs of each attention")] = 3,
    steps: Annotated[int | None, typer.Option(help="of training; the task's own without")] = None,
    out: Out = Path("attnzoo-tasks"),
    threads: Annotated[int | None, typer.Option(help="of torch; all cores without")] = None,
    fresh: Annotated[bool, typer.Option(help="set earlier results in --out aside")] = False,
) -> None:
    """Train small models from scratch on a task that tells mechanisms apart; same budget for all.

    Accuracy in percent, mean over seeds and half the distance between the best and the worst.
    """
    import torch

    from attnzoo.compare.report import wide
    from attnzoo.compare.show import as_table
    from attnzoo.tasks.base import find_task
    from attnzoo.tasks.run import TaskPlan, default_specs, run_tasks, tabulate, tabulate_rounds

    found = find_task(task)
    torch.set_num_threads(threads or torch.get_num_threads())
    specs = specs_of(attention, lambda names: default_specs(names, task)) if attention else None
    plan = TaskPlan(task=task, specs=specs, seeds=seeds, steps=steps, out=out, fresh=fresh)
    with console.status("") as status:
        rows = run_tasks(plan, lambda what, share: status.update(f"{share:.0%}  {what}"))
    wide(console).print(as_table(f"{found.name}: {found.about}", *tabulate(found, rows)))
    head, body = tabulate_rounds(rows)
    if body:
        wide(console).print(as_table("Rounds of hashing, the longest words", head, body))
    console.print(f"Numbers: {out / 'results.jsonl'}")


def inspect(
    model: Model = "embedded",
    text: Annotated[Path | None, typer.Option(help="file; its first tokens are looked at")] = None,
    layer: Annotated[int, typer.Option(help="number of the layer")] = 0,
    head: Annotated[int, typer.Option(help="number of the head")] = 0,
    attention: Annotated[str, typer.Option(help="NAME or NAME:OPTION=VALUE,...")] = "linear",
    tokens: Annotated[int, typer.Option(help="of the text")] = 192,
    out: Annotated[Path, typer.Option(help="folder for maps.json, maps.html and pictures")] = Path(
        "attnzoo-maps"
    ),
) -> None:
    """Show what a head attends to, exactly and approximately: maps, difference, entropy, distance.

    The layer alone is swapped, so that both are of the same queries and keys.
    """
    from attnzoo.compare.maps import heads_table, make_maps, summary, write_maps
    from attnzoo.compare.report import wide
    from attnzoo.compare.show import as_table
    from attnzoo.report.page import WITHOUT_PLOTLY

    name, _, options = attention.partition(":")
    spec = spec_of(name, _parts(options), None, None)
    found = make_maps(model, spec, text=text, layer=layer, head=head, tokens=tokens)
    wide(console).print(as_table(f"Layer {layer}, all heads", *heads_table(found)))
    console.print(summary(found[0]), soft_wrap=True, highlight=False)
    page = write_maps(out, found)
    console.print(f"Report:  {page}" if page else WITHOUT_PLOTLY, markup=False)
