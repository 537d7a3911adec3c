"""Tables and heat maps of a model's heads, and the file with all numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attnzoo
from attnzoo.evaluation.heads import CONTROLS, MEASURES, HeadStudy
from attnzoo.report import charts, page
from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.charts import Axis, Plot, Series
from attnzoo.report.format import number
from attnzoo.report.output_path import OutputError, cannot_be_written
from attnzoo.report.table import Table

DATA = "heads.json"
TITLES = {
    "gradient": "Importance by gradient",
    "ablation": "Importance by ablation",
    "entropy": "Entropy of the attention",
    "distance": "Mean distance of query and key",
    "beyond": "Attention beyond {window} tokens",
    "first": "Attention on the first token",
}
TEXTS = {
    "gradient": "Change of the result when a head's output is scaled (Michel et al., 2019).",
    "ablation": "What is lost without the head; below 0 the model is better without it.",
    "entropy": "In bits, mean over queries: 0 is one key, 8 are 256 keys of equal weight.",
    "distance": "In tokens, weighted by the attention.",
    "beyond": "Fraction of a head's weight on keys so many tokens away or more.",
    "first": "Fraction of a head's weight on the first token.",
}


def pruning_table(found: HeadStudy) -> Table:
    """Return the quality by the fraction of pruned heads and the choice of heads."""
    names = ["gradient", "ablation", "random"]
    rows = [
        [f"{fraction:.0%}", *(number(values[name], 4) for name in names)]
        for fraction, values in found.curve.items()
    ]
    return Table(
        columns=["heads pruned", "by gradient", "by ablation", f"random (mean of {CONTROLS})"],
        rows=rows,
        title=f"Pruned without training: {quality_text(found)}",
    )


def quality_text(found: HeadStudy) -> str:
    """Return what the quality of a study is."""
    if found.quality == "loss":
        return "loss in nats per token"
    return "cosine similarity of embeddings to the whole model's"


def importance_table(found: HeadStudy, count: int = 10) -> Table:
    """Return the heads that matter least and most by ablation, with all measures."""
    heads = [
        (found.measures["ablation"][name][i], name, i)
        for name in found.layers
        for i in range(len(found.numbers[name]))
    ]
    heads.sort()
    shown = heads if len(heads) <= 2 * count else [*heads[:count], *heads[-count:]]
    rows = [
        [
            f"{name}, {found.numbers[name][i]}",
            *(number(found.measures[measure][name][i], 4) for measure in ("ablation", "gradient")),
            number(found.measures["entropy"][name][i], 2),
            number(found.measures["distance"][name][i], 1),
            *(f"{found.measures[measure][name][i]:.0%}" for measure in ("beyond", "first")),
        ]
        for _, name, i in shown
    ]
    title = "All heads" if len(shown) == len(heads) else f"The {count} least and most important"
    columns = ["layer, head", "ablation", "gradient", "entropy", "distance"]
    return Table(
        columns=[*columns, f"beyond {found.window}", "first token"],
        rows=rows,
        title=f"{title}, by ablation",
    )


def plots(found: HeadStudy) -> list[Plot]:
    """Return the quality by pruned heads, and a heat map of every measure."""
    lines = [
        Series(name=name, x=list(found.curve), y=[v[key] for v in found.curve.values()], style=i)
        for i, (key, name) in enumerate(
            (("gradient", "by gradient"), ("ablation", "by ablation"), ("random", "random"))
        )
    ]
    curve = Plot(
        name="pruning",
        title="Quality by pruned heads",
        text="Least important first, without training; random choices are the control.",
        figure=charts.line_chart(
            lines, x=Axis(label="heads pruned", percent=True), y=Axis(label=found.quality)
        ),
    )
    return [curve, *(_heat_map(found, measure) for measure in MEASURES)]


def _heat_map(found: HeadStudy, measure: str) -> Plot:
    """Draw a number per layer and head; heads that a layer lacks are empty."""
    values = [found.measures[measure][name] for name in found.layers]
    width = max(max(found.numbers[name]) for name in found.layers) + 1
    rows = []
    for name, row in zip(found.layers, values, strict=True):
        placed = dict(zip(found.numbers[name], row, strict=True))
        rows.append([placed.get(i, float("nan")) for i in range(width)])
    title = TITLES[measure].format(window=found.window)
    step = -(-width // 16)
    every = -(-len(rows) // 16)
    figure = charts.matrix_chart(
        rows,
        x=Axis(label="head", ticks={i: str(i) for i in range(0, width, step)}),
        y=Axis(label="layer", ticks={i: str(i) for i in range(0, len(rows), every)}),
        color_label=measure,
    )
    return Plot(name=measure, title=title, text=TEXTS[measure], figure=figure)


def data(found: HeadStudy) -> dict[str, Any]:
    """Return a study as plain data."""
    return {"attnzoo": attnzoo.__version__, **asdict(found)}


def write_heads(out: Path, found: HeadStudy) -> Path | None:
    """Write ``heads.json``, ``heads.html`` and its plots; return ``None`` without matplotlib."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / DATA, json.dumps(data(found), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(cannot_be_written(out, error)) from error
    if not charts.can_draw():
        return None
    drawn = plots(found)
    charts.write_pictures(out, drawn)
    body = [page.heading("Attention heads", 1), page.plots_html(drawn)]
    for table in (pruning_table(found), importance_table(found)):
        body += [page.heading(table.title), table.html()]
    layers = ", ".join(f"{i}: {name}" for i, name in enumerate(found.layers))
    body += [page.heading("Layers"), page.paragraph(layers, muted=True)]
    body.append(page.footer(f"attnzoo {attnzoo.__version__}"))
    return page.write_page(out / "heads.html", title="attnzoo heads", body=body)
