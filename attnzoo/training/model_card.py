"""What a model card says beside the results: base model, license, data, tokens, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

import attnzoo
from attnzoo.evaluation.models import embedded_name
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.card import hub_id, kept_metadata, loading_section
from attnzoo.training.data import HUB_ID

AUTO_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "feature-extraction": "AutoModel",
}


def about_run(
    path: Path,
    data: Sequence[Path],
    out: Path,
    *,
    rows: int,
    row_length: int,
    held_out: int,
    steps: Mapping[str, int],
    batch: int,
) -> dict[str, Any]:
    """Return what a card says about the origin of a model, as plain data without paths.

    Args:
        path: Folder of the base model, which may be in the cache of the Hub.
        data: Files, folders, and ids of data sets.
        out: Folder of the trained model.
        rows: Number of training rows.
        row_length: Tokens per row.
        held_out: Number of held-out rows.
        steps: Steps by the name of the stage.
        batch: Rows of a step.
    """
    ids = [str(x).partition(":")[0] for x in data if not x.exists() and HUB_ID.fullmatch(str(x))]
    return {
        "attnzoo": attnzoo.__version__,
        "base_model": hub_id(path),
        "base_name": hub_id(path) or embedded_name(path) or path.resolve().name,
        "metadata": kept_metadata(path),
        "data": [str(x) if str(x).partition(":")[0] in ids else x.resolve().name for x in data],
        "datasets": ids,
        "rows": rows,
        "row_length": row_length,
        "held_out_rows": held_out,
        "steps": {name: count for name, count in steps.items() if name != "softmax"},
        "batch": batch,
        "name": out.resolve().name,
    }


def metadata_block(about: Mapping[str, Any], kind: str) -> str:
    """Return the metadata of a card with its borders.

    Args:
        about: Of :func:`about_run`; empty if it is not known.
        kind: The pipeline of the model, such as ``text-generation``.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=kind,
        tags=[NAME],
        base_model=about.get("base_model"),
        datasets=about.get("datasets") or None,
        **about.get("metadata", {}),
    )
    return f"---\n{data.to_yaml()}\n---\n"


def loading_text(about: Mapping[str, Any], kind: str) -> str:
    """Return how to install attnzoo and load the model."""
    if not about:
        return "Load it with `from_pretrained` after `import attnzoo`.\n"
    return loading_section(about["name"], AUTO_CLASSES[kind])


def training_text(about: Mapping[str, Any], command: str) -> str:
    """Return from what, on what and in how many steps a model was trained; empty if unknown.

    Args:
        about: Of :func:`about_run`.
        command: ``recover`` or ``finetune``.
    """
    if not about:
        return ""
    stages = ", ".join(f"{count:,} of {stage}" for stage, count in about["steps"].items())
    name, base = about["base_name"], about["base_model"]
    source = f"[{name}](https://huggingface.co/{base})" if base else name
    data, rows = ", ".join(about["data"]), f"{about['batch']:,} of {about['rows']:,} rows"
    return (
        "## Training\n\n"
        f"Made from {source} by `attnzoo {command}` of attnzoo {about['attnzoo']}, in "
        f"{sum(about['steps'].values()):,} steps{f' ({stages})' if stages else ''} on {rows} of "
        f"{about['row_length']:,} tokens from {data}. Another {about['held_out_rows']:,} rows are "
        "held out for evaluation.\n"
    )
