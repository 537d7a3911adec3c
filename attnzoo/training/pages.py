"""What a run leaves to be read: ``report.html`` with its curves, and the model card, README.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnzoo.report import page
from attnzoo.report.picture import can_draw, write_picture
from attnzoo.report.text import number, size
from attnzoo.report.whole import write_whole
from attnzoo.training.plan import Plan

HEADS = ("", "loss", "recovered", "recall", "recovered")
ENCODER_HEADS = ("", "mean cosine", "least")


def write_pages(
    out: Path, results: Mapping[str, Any], losses: Iterable[Mapping[str, Any]], command: str
) -> None:
    """Write the model card, and the report where plotly is installed.

    Args:
        out: The model's folder.
        results: What ``recovery.json`` holds.
        losses: Of every step, as in ``losses.jsonl``.
        command: What was done, in a word: ``recover`` or ``finetune``.
    """
    write_whole(out / "README.md", card(results, command))
    if not page.can_plot():
        return
    decoding = _decoding_cells(results)
    body = [
        page.heading(_headline(results), 1),
        page.paragraph(_subject(results, command), soft=True),
        page.table(heads(results), lines_cells(results)),
        page.heading("Decoding") + page.table(DECODING, decoding) if decoding else "",
        page.plots_html([_curves(losses)]),
    ]
    page.write_page(out / "report.html", title=f"attnzoo {command}", body=body)


def is_encoder(results: Mapping[str, Any]) -> bool:
    """Whether an account is of an encoder, whose lines are cosines."""
    return "cosine" in results["lines"]["result"]


def heads(results: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what stands above the cells of an account's lines."""
    return ENCODER_HEADS if is_encoder(results) else HEADS


def lines_cells(results: Mapping[str, Any]) -> list[list[str]]:
    """Return every line of an account as text: name, loss, recall, how much of each came back.

    Of an encoder: name, mean and least cosine.
    """
    rows = []
    for name, line in results["lines"].items():
        label = f"window alone ({results['window']})" if name == "window alone" else name
        cells = [label]
        if is_encoder(results):
            rows.append([label, number(line["cosine"]), number(line["least"])])
            continue
        for what in ("loss", "recall"):
            share = line[f"{what}_share"]
            cells += [number(line[what]), "" if share is None else f"{share:.0%}"]
        rows.append(cells)
    return rows


def _decoding_cells(results: Mapping[str, Any]) -> list[list[str]]:
    """Return a row a length: milliseconds and cache of softmax and of the result."""
    found = results.get("decoding") or {}
    if not found:
        return []
    exact, own = found["softmax"], found["result"]
    return [
        [
            str(length),
            *(number(x["milliseconds"][length], 1) for x in (exact, own)),
            *(size(x["cache_bytes"][length]) for x in (exact, own)),
        ]
        for length in own["milliseconds"]
    ]


DECODING = ("tokens seen", "softmax, ms a token", "swap, ms a token", "softmax cache", "swap cache")


def _headline(results: Mapping[str, Any]) -> str:
    return str(results["verdict"])


def _subject(results: Mapping[str, Any], command: str) -> str:
    told = (
        "Bits per byte on held-out text (loss) and on the second copy of a repeated segment "
        "(recall); recovered is the share of the distance from the window alone to softmax."
    )
    if is_encoder(results):
        told = (
            "Cosine between the embeddings of held-out texts, each the mean of its tokens' last "
            "hidden states, and those of the model as it was."
        )
    return f"attnzoo {command}. {told} The swap: {json.dumps(results['spec'])}"


def _curves(losses: Iterable[Mapping[str, Any]]) -> page.Plot:
    """Plot the loss of every step, a line a stage."""
    figure = page.clear_figure()
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for line in losses:
        stages.setdefault(line["stage"], []).append(line)
    for name, taken in stages.items():
        figure.add_scatter(
            x=[line["step"] for line in taken], y=[line["loss"] for line in taken], name=name
        )
    figure.update_xaxes(title="step of the stage")
    figure.update_yaxes(title="loss", type="log")
    text = (
        "Transfer: a layer's relative squared error, or nats of its attention. Distil: nats of KL, "
        "or an encoder's relative squared error. Else cross-entropy."
    )
    return page.Plot(name="losses", title="Training", text=text, figure=figure)


def card(results: Mapping[str, Any], command: str) -> str:
    """Return the model card: the verdict first, then every line that it rests on."""
    spec = results["spec"]
    kind = "feature-extraction" if is_encoder(results) else "text-generation"
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {kind}\ntags: [attnzoo]\n---\n",
        "# A model whose attention was swapped\n",
        f"**{results['verdict']}**\n",
        "Load it with `from_pretrained` after `import attnzoo`.\n",
        _subject(results, command).rpartition(" The swap:")[0] + "\n",
        _markdown(heads(results), lines_cells(results)),
        _markdown(DECODING, _decoding_cells(results)) if results.get("decoding") else "",
        f"The swap:\n\n```json\n{json.dumps(spec, indent=2)}\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def _markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_plan_page(path: Path, plan: Plan) -> list[Path]:
    """Write a picture of a plan, layers by candidates: HTML, and PNG where matplotlib is installed.

    Args:
        path: Of the HTML; pictures stand beside it, and begin with its name.
        plan: What to draw.

    Returns:
        What was written; nothing without plotly.
    """
    if not page.can_plot():
        return []
    names = list(plan.layers[0].alone)
    figures = []
    for measure, title, text in (
        ("alone", "One layer swapped", "KL of the predictions, in nats, all other layers exact."),
        (
            "restored",
            "One layer exact",
            "KL of the predictions, in nats, all other layers swapped.",
        ),
    ):
        values = [[getattr(layer, measure)[name] for name in names] for layer in plan.layers]
        figure = page.clear_figure()
        figure.add_heatmap(
            z=values,
            x=names,
            y=[f"layer {layer.layer}" for layer in plan.layers],
            text=[[f"{value:.4f}" for value in row] for row in values],
            texttemplate="%{text}",
            colorscale="Reds",
            showscale=False,
        )
        figure.update_yaxes(autorange="reversed")
        figures.append(page.Plot(name=measure, title=title, text=text, figure=figure))
    gets = [
        [
            str(layer.layer),
            f"{layer.beyond:.0%}",
            f"{layer.entropy:.2f}",
            json.dumps(plan.spec.for_layer(layer.layer).to_dict()),
        ]
        for layer in plan.layers
    ]
    heads = ("layer", f"attention beyond {plan.window}", "entropy, nats", "gets")
    body = [
        page.heading("Which layer gets what", 1),
        page.paragraph(
            f"Under the plan, nothing trained, predictions change by {plan.divergence:.4f} nats."
        ),
        page.table(heads, gets),
        page.plots_html(figures),
    ]
    written = [page.write_page(path, title="attnzoo plan", body=body)]
    if can_draw():
        written += [write_picture(path.with_name(f"{path.stem}-{x.name}.png"), x) for x in figures]
    return written
