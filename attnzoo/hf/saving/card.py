"""Model cards of swapped models: the tag, the license of the base model, and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import nn

from attnzoo.hf import seam
from attnzoo.hf.layers import unwrap_model
from attnzoo.hf.names import NAME

FILE = "README.md"
KEPT = ("license", "license_name", "license_link", "language")  # of the base model's card
HEADING = "## Attention"
PEFT_HAS = (  # the auto classes of transformers that PEFT has for adapters too
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
)


def kept_metadata(folder: Path) -> dict[str, Any]:
    """Return license and language of the card in a model's folder; empty without a card."""
    path = folder / FILE
    if not path.is_file():
        return {}
    given = ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True).data
    return {name: given.get(name) for name in KEPT if given.get(name) is not None}


def hub_id(folder: Path) -> str | None:
    """Return the id of a model in the cache of the Hub; ``None`` for other folders."""
    for part in folder.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return None


def loading_section(name: str, model_class: str) -> str:
    """Return how to install attnzoo and load a swapped model, in Markdown.

    Args:
        name: Id of the model on the Hub, or its folder.
        model_class: Class whose ``from_pretrained`` loads it, of transformers or of PEFT.
    """
    package = "peft" if "Peft" in model_class else "transformers"
    return (
        f"{HEADING}\n\n"
        "The attention of this model was replaced by attnzoo. Install it, and import it before the "
        "model is loaded:\n\n"
        "```sh\npip install attnzoo\n```\n\n"
        f"```python\nimport attnzoo\nfrom {package} import {model_class}\n\n"
        f'model = {model_class}.from_pretrained("{name}")\n```\n'
    )


def complete_card(folder: Path, name: str, model_class: str) -> None:
    """Add the tag ``attnzoo`` and the section about loading to the card in a folder, if any.

    Args:
        folder: Folder of a swapped model, or of an adapter.
        name: As in :func:`loading_section`.
        model_class: The same.
    """
    path = folder / FILE
    if not path.is_file():
        return
    card = ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True)
    tags = card.data.get("tags") or []
    card.data["tags"] = tags if NAME in tags else [*tags, NAME]
    if HEADING not in card.text:
        card.text = f"{card.text.rstrip()}\n\n{loading_section(name, model_class)}"
    card.save(path)


def complete_trainer_card(trainer: Any) -> None:
    """Complete the card that transformers' Trainer, or one of TRL, has written of its model.

    Args:
        trainer: The trainer; nothing is done if its model is not swapped.
    """
    if not trainer.is_world_process_zero() or not runs_swap(trainer.model):
        return
    folder = Path(trainer.args.output_dir)
    complete_card(folder, trainer.hub_model_id or folder.name, _auto_class(trainer.model))


def complete_adapter_card(model: Any, folder: Any) -> None:
    """Complete the card that PEFT has written of an adapter.

    Args:
        model: A ``PeftModel``; nothing is done if its base model is not swapped.
        folder: Folder of the adapter.
    """
    if runs_swap(model):
        complete_card(Path(folder), Path(folder).name, _auto_class(model))


def complete_uploaded_card(model: Any, folder: Any, repo: str) -> None:
    """Complete the card that ``push_to_hub`` uploads.

    Args:
        model: What is uploaded; nothing is done if it is no model, or not swapped.
        folder: Folder whose files are uploaded.
        repo: Id of the repository.
    """
    if isinstance(model, nn.Module) and runs_swap(model):
        complete_card(Path(folder), repo, _auto_class(model))


def runs_swap(model: Any) -> bool:
    """Return whether a part of a model, possibly in wrappers, runs a swap."""
    target = unwrap_model(model)
    return target is not None and any(
        config._attn_implementation == NAME for config in seam.all_configs(target)
    )


def _auto_class(model: Any) -> str:
    """Return the auto class that loads a model, or an adapter together with its base model."""
    name = type(model).__name__
    if not name.startswith("PeftModel"):
        return seam.auto_class_name(name)
    if name == "PeftModel":  # the adapter's config names no task: that of the base model
        base = seam.auto_class_name(type(unwrap_model(model)).__name__)
        name = base.replace("Auto", "Peft") if base in PEFT_HAS else name
    return f"Auto{name}"
