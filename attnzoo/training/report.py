"""How results of runs are presented: one table, in the terminal and in the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

import attnzoo
from attnzoo.evaluation.margins import plus_minus
from attnzoo.evaluation.models import embedded_name
from attnzoo.hf.names import NAME
from attnzoo.report.table import Table, format_bytes, number
from attnzoo.training import evaluator
from attnzoo.training.data import HUB_ID

KEPT = ("license", "license_name", "license_link", "language")  # of the base model's card
# the keys of a line and their headers; a column is shown if a line has its number
COLUMNS = {
    "loss": "loss",
    "loss_share": "recovered",
    "recall": "recall",
    "recall_share": "recovered",
    "agreement": "equal tokens",
    "equal_tokens": "before a difference",
    "cosine": "mean cosine",
    "least": "least",
}
FRACTIONS = ("loss_share", "recall_share", "agreement")  # with a standard error
CAUSAL_TEXT = (
    "Bits per byte on held-out text (loss) and on the second copy of a repeated segment (recall); "
    "recovered is the closed fraction of the gap between the window alone and softmax, with its "
    "standard error over the rows. Of greedy generation: the fraction of generated tokens that "
    "equal the original model's at the same position, and the mean number of tokens before the "
    "first that differs."
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
    shown = [x for x in COLUMNS if any(line.get(x) is not None for line in lines.values())]
    return Table(
        columns=("", *(COLUMNS[name] for name in shown)),
        rows=[[label, *(_cell(line, x) for x in shown)] for label, line in lines.items()],
        title="held-out text",
    )


def _cell(line: Mapping[str, Any], name: str) -> str:
    if name in FRACTIONS and line.get(name) is not None:
        return plus_minus(line[name], line.get(f"{name}_error"), percent=True)
    return number(line.get(name), 1 if name == "equal_tokens" else 3)


def _label(name: str, results: Mapping[str, Any]) -> str:
    if name == "window alone":
        return f"window alone ({results['window']})"
    if name == "equal window":
        return f"window of equal memory ({results['equal_window']['label']})"
    return name


def card(run: Any, results: Mapping[str, Any]) -> str:
    """Return the model card of ``attnzoo recover`` in Markdown: the verdict, then the results.

    Args:
        run: A :class:`~attnzoo.training.recovery.Recovery`, whose model may be in the cache of the
            Hub, and whose data are files, folders, and ids of data sets.
        results: Its results.
    """
    named = [str(x) for x in run.data if not x.exists()]
    ids = [x.partition(":")[0] for x in named if HUB_ID.fullmatch(x)]
    encoder = "cosine" in results["lines"]["result"]
    task, auto_class = "text-generation", "AutoModelForCausalLM"
    if encoder:
        task, auto_class = "feature-extraction", "AutoModel"
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=[NAME],
        base_model=_hub_id(run.path),
        datasets=ids or None,
        **_kept_metadata(run.path),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        *_title(results, run.args.hub_model_id or run.folder.out.resolve().name, auto_class),
        _training_text(run, ids),
        f"## Results\n\n{ENCODER_TEXT if encoder else CAUSAL_TEXT}\n",
        results_table(results).markdown(),
    ]
    if (equal := results.get("equal_window")) is not None:
        swap, softmax = (format_bytes(equal[f"{name}_bytes"]) for name in ("swap", "exact"))
        parts.append(f"Cache of {equal['length']:,} tokens: {swap}; softmax: {softmax}.\n")
    settings = {"The swap": results["spec"], "All settings of the run": results["config"]}
    for name, value in settings.items():
        if value is not None:
            parts.append(f"{name}:\n\n```json\n{json.dumps(value, indent=2)}\n```\n")
    return "\n".join(parts)


def _kept_metadata(folder: Path) -> dict[str, Any]:
    """Return license and language of the card in a model's folder; empty without a card."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    given = ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True).data
    return {name: given.get(name) for name in KEPT if given.get(name) is not None}


def _hub_id(folder: Path) -> str | None:
    """Return the id of a model in the cache of the Hub; ``None`` for other folders."""
    for part in folder.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return None


def _loading_text(name: str, auto_class: str) -> str:
    """Return how to install attnzoo and load a swapped model, in Markdown."""
    return (
        "## Attention\n\n"
        "The attention of this model was replaced by attnzoo. Install it, and import it before the "
        "model is loaded:\n\n"
        "```sh\npip install attnzoo\n```\n\n"
        f"```python\nimport attnzoo\nfrom transformers import {auto_class}\n\n"
        f'model = {auto_class}.from_pretrained("{name}")\n```\n'
    )


def _title(results: Mapping[str, Any], name: str, auto_class: str) -> list[str]:
    """Return the first paragraphs of a model card: what the model is, and the verdict."""
    verdict = f"**{results['verdict']}**\n"
    student = results.get("student")
    if student is None:
        return ["# A model with swapped attention\n", verdict, _loading_text(name, auto_class)]
    return [
        f"# A student of the class {student['class']}\n",
        verdict,
        "**Experimental.** Its recurrent layers were trained to return what softmax attention "
        "returns; the table has windows of equal memory in the same layers, which need no "
        "training, for comparison. It runs without attnzoo.\n",
        f"Layers: {', '.join(student['layer_types'])}.\n",
    ]


def _training_text(run: Any, ids: Sequence[str]) -> str:
    """Return from what, on what and in how many steps a model was trained."""
    path, args, base = run.path, run.args, _hub_id(run.path)
    source = embedded_name(path) or path.resolve().name
    source = f"[{base}](https://huggingface.co/{base})" if base else source
    histories = {name: x for name, x in run.stages.items() if x and name != "softmax"}
    steps = {name: history[-1]["step"] for name, history in histories.items()}
    stages = ", ".join(f"{count:,} of {stage}" for stage, count in steps.items())
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    data = [str(x) if str(x).partition(":")[0] in ids else x.resolve().name for x in run.data]
    return (
        f"## Training\n\nMade from {source} by `attnzoo recover` of attnzoo {attnzoo.__version__}, "
        f"in {sum(steps.values()):,} steps{f' ({stages})' if stages else ''} with "
        f"{batch // args.cp_size:,} rows a step, of {len(run.rows):,} rows of {args.max_length:,} "
        f"tokens from {', '.join(data)}. Of another {len(run.held_out):,} rows, which are held "
        f"out, {min(evaluator.ROWS, len(run.held_out)):,} are measured.\n"
    )
