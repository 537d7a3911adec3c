"""The model card of a converted model: its layers, and which engines run them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from attnzoo.hf.saving.rope import rope_table
from attnzoo.hf.stock.classes import ENGINES, stock_class, windowed_class

KEPT = ("license", "license_name", "license_link", "language", "datasets")  # of the source's card
FILE = "README.md"
RECURRENT = "recurrent"
EXPERIMENTAL = (
    "**Experimental.** The recurrent layers have starting values, and the model predicts badly "
    "until they are trained: `attnzoo recover NEW --teacher SOURCE`. Sliding windows of equal "
    "memory in the same layers need no training and may predict better: the results of that "
    "command compare the two, and `attnzoo convert --to {}` writes a model with windows.\n"
)
Layer = int | str | None  # window in tokens, RECURRENT, or None for all keys


def write_card(
    out: Path, config: Any, layers: Sequence[Layer], *, source: str, source_card: str = ""
) -> None:
    """Write the model card of a converted model; it replaces a copy of the source's card.

    Args:
        out: Folder of the converted model.
        config: Its config.
        layers: The window of each layer in tokens, ``None`` where it sees all keys, or
            ``"recurrent"``.
        source: Name of the model that it was converted from.
        source_card: Text of that model's card, whose licence and language are kept.
    """
    (out / FILE).write_text(card(config, layers, source, source_card), "utf-8")


def card(config: Any, layers: Sequence[Layer], source: str, source_card: str = "") -> str:
    """Return the model card in Markdown."""
    given = ModelCard(source_card).data
    kept = {name: given.get(name) for name in KEPT if given.get(name) is not None}
    head = ModelCardData(library_name="transformers", **kept)
    name = (config.architectures or [config.model_type])[0]
    parts = [
        f"---\n{head.to_yaml()}\n---\n",
        f"# {source}, converted to {name}\n",
        f"Written by `attnzoo convert --to {config.model_type}`, which copied all weights and "
        "trained nothing. The model runs without attnzoo.\n",
        _layers(layers, stock_class(config.model_type).recurrent) + "\n",
    ]
    if positions := rope_table(config):
        parts.append(positions + "\n")
    if RECURRENT in layers:
        parts.append(EXPERIMENTAL.format(windowed_class(config.model_type)))
    if any(isinstance(x, int) for x in layers):
        parts.append(_engines(config.model_type))
    return "\n".join(parts)


def _layers(kinds: Sequence[Layer], recurrent: str) -> str:
    """Return the attention of the layers, neighbours with the same one on one line."""
    lines = ["| layers | attention |", "|---|---|"]
    first = 0
    for number, kind in enumerate(kinds):
        if number + 1 == len(kinds) or kinds[number + 1] != kind:
            layers = str(first) if first == number else f"{first}-{number}"
            lines.append(f"| {layers} | {_text(kind, recurrent)} |")
            first = number + 1
    return "\n".join(lines)


def _text(kind: Layer, recurrent: str) -> str:
    if kind is None:
        return "all keys"
    return f"{recurrent}, a state" if kind == RECURRENT else f"the latest {kind} keys"


def _engines(family: str) -> str:
    """Return what engines do with the windows of a class."""
    found = stock_class(family).engines
    lines = ["| engine | what it does with the windows |", "|---|---|", "| transformers | right |"]
    for key, label in ENGINES.items():
        lines.append(f"| {label} | {found.get(key, 'not tested')} |")
    return "\n".join(lines) + "\n"
