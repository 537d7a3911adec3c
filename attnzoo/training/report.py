"""How results of runs are presented: in the terminal, and as the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnzoo.evaluation.margins import plus_minus
from attnzoo.evaluation.timing import BUSY
from attnzoo.report.format import format_bytes, number
from attnzoo.report.table import Table
from attnzoo.training.model_card import loading_text, metadata_block, training_text

GENERATION_TEXT = (
    "Greedy generation on held-out text. Equal tokens: the fraction of generated tokens that equal "
    "the original model's at the same position. Before a difference: the mean number of tokens "
    "before the first that differs. Copies: the fraction of right tokens in generated copies of a "
    "segment. Needles: the fraction of numbers, given earlier in the text, that are generated "
    "without an error."
)
COLUMNS = ("", "loss", "recovered", "recall", "recovered")
GENERATION_COLUMNS = ("", "equal tokens", "before a difference", "copies", "needles")
ENCODER_COLUMNS = ("", "mean cosine", "least")
DECODING_COLUMNS = (
    "context tokens",
    "softmax, ms per token",
    "swap, ms per token",
    "softmax cache",
    "swap cache",
)


def is_encoder(results: Mapping[str, Any]) -> bool:
    """Return whether results are those of an encoder."""
    return "cosine" in results["lines"]["result"]


def results_table(results: Mapping[str, Any]) -> Table:
    """Return a table with a row per model: loss and recall with their recovered fractions.

    A row of an encoder has the mean and the least cosine similarity instead.
    """
    encoder = is_encoder(results)
    rows = []
    for name, line in results["lines"].items():
        cells = [_label(name, results)]
        if encoder:
            cells += [number(line["cosine"]), number(line["least"])]
        for metric in () if encoder else ("loss", "recall"):
            share, error = line[f"{metric}_share"], line.get(f"{metric}_share_error")
            recovered = "" if share is None else plus_minus(share, error, percent=True)
            cells += [number(line[metric]), recovered]
        rows.append(cells)
    cosines = "cosine similarity of embeddings of held-out text to softmax's"
    return Table(
        columns=ENCODER_COLUMNS if encoder else COLUMNS,
        rows=rows,
        title=cosines if encoder else "bits per byte on held-out text",
    )


def longer_tables(results: Mapping[str, Any]) -> list[tuple[Table, str]]:
    """Return a table of each longer length, and the sentence who wins there at equal memory."""
    return [
        (
            replace(
                results_table({**results, "lines": found["lines"]}),
                title=f"bits per byte on held-out text, rows of {int(length):,} tokens",
            ),
            found["verdict"],
        )
        for length, found in results.get("longer", {}).items()
    ]


def _label(name: str, results: Mapping[str, Any]) -> str:
    if name == "window alone":
        return f"window alone ({results['window']})"
    if name == "equal window":
        return f"window of equal memory ({results['equal_window']['label']})"
    return name


def generation_table(results: Mapping[str, Any]) -> Table | None:
    """Return a table of the quality of greedy generation, a row per model, if it was measured."""
    if results["lines"]["result"].get("agreement") is None:
        return None
    rows = []
    for name, line in results["lines"].items():
        shares = [line[key] for key in ("agreement", "copies", "needles")]
        agreement, copies, needles = ("-" if x is None else f"{x:.0%}" for x in shares)
        if line["agreement"] is not None:
            agreement = plus_minus(line["agreement"], line.get("agreement_error"), percent=True)
        length = number(line["equal_tokens"], 1)
        rows.append([_label(name, results), agreement, length, copies, needles])
    return Table(columns=GENERATION_COLUMNS, rows=rows, title="greedy generation")


def tasks_table(results: Mapping[str, Any]) -> Table:
    """Return a table of the metrics of lm-evaluation-harness, a column per model."""
    models = results["tasks"]
    first = next(iter(models.values()))
    rows = []
    for task, metrics in first.items():
        for name, value in metrics.items():
            metric, _, kept_by = name.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            label = metric if kept_by in ("", "none") else f"{metric} ({kept_by})"
            error = metrics.get(f"{metric}_stderr,{kept_by}")
            cells = [number(scores[task].get(name)) for scores in models.values()]
            rows.append([task, label, *cells, number(error if isinstance(error, float) else None)])
    return Table(
        columns=("task", "metric", *(_label(name, results) for name in models), "standard error"),
        rows=rows,
        title="tasks of lm-evaluation-harness",
        caption=f"the standard error is that of {next(iter(models))}",
    )


def decoding_table(results: Mapping[str, Any]) -> Table | None:
    """Return a table of milliseconds per token and cache size by context length, if measured."""
    costs = results.get("decoding")
    if not costs:
        return None
    softmax, swap = costs["softmax"], costs["result"]
    rows = [
        [
            str(length),
            *(_milliseconds(cost, length) for cost in (softmax, swap)),
            *(format_bytes(cost["cache_bytes"].get(length)) for cost in (softmax, swap)),
        ]
        for length in swap["milliseconds"]
    ]
    busy = any(cost.get("busy") for cost in (softmax, swap))
    caption = f"{BUSY}: marked times contradict those of longer contexts" if busy else ""
    return Table(columns=DECODING_COLUMNS, rows=rows, caption=caption)


def _milliseconds(cost: Mapping[str, Any], length: Any) -> str:
    """Return the time of a token with its standard error; one that cannot be right is marked."""
    error = cost.get("milliseconds_error", {}).get(length)
    text = plus_minus(cost["milliseconds"][length], error, 1)
    return f"{text} (busy)" if int(length) in cost.get("busy", ()) else text


def _summary(results: Mapping[str, Any], command: str) -> str:
    metrics = (
        "Bits per byte on held-out text (loss) and on the second copy of a repeated segment "
        "(recall); recovered is the closed fraction of the gap between the window alone and "
        "softmax, with its standard error over the rows."
    )
    if is_encoder(results):
        metrics = (
            "Cosine similarity between the embeddings of held-out texts and those of the original "
            "model; an embedding is the mean of the last hidden states."
        )
    return f"attnzoo {command}. {metrics}"


def _title(results: Mapping[str, Any], about: Mapping[str, Any], kind: str) -> list[str]:
    """Return the first paragraphs of a model card: what the model is, and the verdict."""
    verdict = f"**{results['verdict']}**\n"
    student = results.get("student")
    if student is None:
        return ["# A model with swapped attention\n", verdict, loading_text(about, kind)]
    return [
        f"# A student of the class {student['class']}\n",
        verdict,
        "**Experimental.** Its recurrent layers were trained to return what softmax attention "
        "returns; the table has windows of equal memory in the same layers, which need no "
        "training, for comparison. It runs without attnzoo.\n",
        f"Layers: {', '.join(student['layer_types'])}.\n",
    ]


def card(results: Mapping[str, Any], command: str) -> str:
    """Return the model card in Markdown: the verdict first, then the results."""
    kind = "feature-extraction" if is_encoder(results) else "text-generation"
    decoding, generation = decoding_table(results), generation_table(results)
    about = results.get("about", {})
    parts = [
        metadata_block(about, kind),
        *_title(results, about, kind),
        training_text(about, command),
        "## Results\n",
        _summary(results, command) + "\n",
        results_table(results).markdown(),
        f"{GENERATION_TEXT}\n\n{generation.markdown()}" if generation else "",
        *(
            f"{table.title}:\n\n{table.markdown()}\n\n{sentence}"
            for table, sentence in longer_tables(results)
        ),
        decoding.markdown() if decoding else "",
        f"The swap:\n\n```json\n{json.dumps(results['spec'], indent=2)}\n```\n"
        if results["spec"] is not None
        else "",
        f"All settings of the run:\n\n```json\n{json.dumps(results['config'], indent=2)}\n```\n"
        if "config" in results
        else "",
    ]
    return "\n".join(part for part in parts if part)
