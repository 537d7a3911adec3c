"""How results of runs are presented: one table, in the terminal and in the model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub import ModelCardData

import attnzoo
from attnzoo.evaluation.margins import plus_minus
from attnzoo.evaluation.models import embedded_name
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.card import hub_id, kept_metadata, loading_section
from attnzoo.report.format import format_bytes, number
from attnzoo.report.table import Table
from attnzoo.training.data import HUB_ID


def _share(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that writes a fraction of a line with its standard error."""

    def cell(line: Mapping[str, Any]) -> str:
        error = line.get(f"{name}_error")
        return "-" if line.get(name) is None else plus_minus(line[name], error, percent=True)

    return cell


# Columns: the key in a line, the header and the cell. A column is shown if a line has the number.
COLUMNS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("loss", "loss", lambda line: number(line["loss"])),
    ("loss_share", "recovered", _share("loss_share")),
    ("recall", "recall", lambda line: number(line["recall"])),
    ("recall_share", "recovered", _share("recall_share")),
    ("agreement", "equal tokens", _share("agreement")),
    ("equal_tokens", "before a difference", lambda line: number(line.get("equal_tokens"), 1)),
    ("copies", "copies", _share("copies")),
    ("needles", "needles", _share("needles")),
    ("cosine", "mean cosine", lambda line: number(line["cosine"])),
    ("least", "least", lambda line: number(line["least"])),
)
CAUSAL_TEXT = (
    "Bits per byte on held-out text (loss) and on the second copy of a repeated segment (recall); "
    "recovered is the closed fraction of the gap between the window alone and softmax, with its "
    "standard error over the rows. Of greedy generation: the fraction of generated tokens that "
    "equal the original model's at the same position, the mean number of tokens before the first "
    "that differs, the fraction of right tokens in generated copies of a segment, and that of "
    "needles, which are numbers given earlier in the text, without an error."
)
ENCODER_TEXT = (
    "Cosine similarity between the embeddings of held-out texts and those of the original model; "
    "an embedding is the mean of the last hidden states."
)


def results_table(results: Mapping[str, Any]) -> Table:
    """Return a table with a row per model, and one per model and longer length."""
    lines = {_label(name, results): line for name, line in results["lines"].items()}
    for length, longer in results.get("longer", {}).items():
        lines |= {f"{_label(x, results)} @ {length}": line for x, line in longer.items()}
    shown = [x for x in COLUMNS if any(line.get(x[0]) is not None for line in lines.values())]
    return Table(
        columns=("", *(header for _, header, _ in shown)),
        rows=[[label, *(cell(line) for *_, cell in shown)] for label, line in lines.items()],
        title="held-out text",
    )


def _label(name: str, results: Mapping[str, Any]) -> str:
    if name == "window alone":
        return f"window alone ({results['window']})"
    if name == "equal window":
        return f"window of equal memory ({results['equal_window']['label']})"
    return name


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


def about_run(run: Any) -> dict[str, Any]:
    """Return what a card says about the origin of a model, as plain data without paths.

    Args:
        run: A :class:`~attnzoo.training.recovery.Recovery`, whose model may be in the cache of the
            Hub, and whose data are files, folders, and ids of data sets.
    """
    path, args = run.path, run.args
    named = [str(x) for x in run.data if not x.exists()]
    ids = [x.partition(":")[0] for x in named if HUB_ID.fullmatch(x)]
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    stages = {name: history for name, history in run.stages.items() if history}
    return {
        "attnzoo": attnzoo.__version__,
        "base_model": hub_id(path),
        "base_name": hub_id(path) or embedded_name(path) or path.resolve().name,
        "metadata": kept_metadata(path),
        "data": [str(x) if str(x).partition(":")[0] in ids else x.resolve().name for x in run.data],
        "datasets": ids,
        "rows": len(run.rows),
        "row_length": args.max_length,
        "held_out_rows": len(run.held_out),
        "steps": {name: x[-1]["step"] for name, x in stages.items() if name != "softmax"},
        "batch": batch // args.cp_size,
        "name": args.hub_model_id or run.folder.out.resolve().name,
    }


def card(results: Mapping[str, Any]) -> str:
    """Return the model card of ``attnzoo recover`` in Markdown: the verdict, then the results."""
    about, encoder = results["about"], "cosine" in results["lines"]["result"]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="feature-extraction" if encoder else "text-generation",
        tags=[NAME],
        base_model=about["base_model"],
        datasets=about["datasets"] or None,
        **about["metadata"],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        *_title(results, "AutoModel" if encoder else "AutoModelForCausalLM"),
        _training_text(about),
        f"## Results\n\n{ENCODER_TEXT if encoder else CAUSAL_TEXT}\n",
        results_table(results).markdown(),
    ]
    if (equal := results.get("equal_window")) is not None:
        swap, softmax = (format_bytes(equal[f"{name}_bytes"]) for name in ("swap", "exact"))
        parts.append(f"Cache of {equal['length']:,} tokens: {swap}; softmax: {softmax}.\n")
    named = {"The swap": results["spec"], "All settings of the run": results["config"]}
    for name, value in named.items():
        if value is not None:
            parts.append(f"{name}:\n\n```json\n{json.dumps(value, indent=2)}\n```\n")
    return "\n".join(parts)


def _title(results: Mapping[str, Any], auto_class: str) -> list[str]:
    """Return the first paragraphs of a model card: what the model is, and the verdict."""
    verdict = f"**{results['verdict']}**\n"
    student = results.get("student")
    if student is None:
        loading = loading_section(results["about"]["name"], auto_class)
        return ["# A model with swapped attention\n", verdict, loading]
    return [
        f"# A student of the class {student['class']}\n",
        verdict,
        "**Experimental.** Its recurrent layers were trained to return what softmax attention "
        "returns; the table has windows of equal memory in the same layers, which need no "
        "training, for comparison. It runs without attnzoo.\n",
        f"Layers: {', '.join(student['layer_types'])}.\n",
    ]


def _training_text(about: Mapping[str, Any]) -> str:
    """Return from what, on what and in how many steps a model was trained."""
    stages = ", ".join(f"{count:,} of {stage}" for stage, count in about["steps"].items())
    name, base = about["base_name"], about["base_model"]
    source = f"[{name}](https://huggingface.co/{base})" if base else name
    return (
        f"## Training\n\nMade from {source} by `attnzoo recover` of attnzoo {about['attnzoo']}, in "
        f"{sum(about['steps'].values()):,} steps{f' ({stages})' if stages else ''} on "
        f"{about['batch']:,} of {about['rows']:,} rows of {about['row_length']:,} tokens from "
        f"{', '.join(about['data'])}. Another {about['held_out_rows']:,} rows are held out for "
        "evaluation.\n"
    )
