"""Write a saved model as a stock class: its tokens are checked, and its card says what it is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoTokenizer

from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.checkpoints import rope_table
from attnzoo.hf.saving.files import model_class, read_config, require_new_folder, save_copy
from attnzoo.hf.stock.classes import ENGINES, stock_class
from attnzoo.hf.stock.convert import convert, layer_windows
from attnzoo.hf.stock.gated_delta_net import recurrent_layers
from attnzoo.spec import AttentionSpec

KEPT = ("license", "license_name", "license_link", "language", "datasets")  # of the source's card
RECURRENT = "recurrent"
EXPERIMENTAL = (
    "**Experimental.** The recurrent layers have starting values, and the model predicts badly "
    "until they are trained: `attnzoo recover NEW --teacher SOURCE`. Sliding windows of equal "
    "memory in the same layers need no training and may predict better: the results of that "
    "command compare the two, and `attnzoo convert --to mellum` writes a model with windows.\n"
)
Layer = int | str | None  # window in tokens, RECURRENT, or None for all keys

# Words, numbers, contractions, indentation and other scripts, which tokenizers split differently
SAMPLE = "It's 12,345.67 dollars\n\n\tif x == 10:  # naïve 你好 мир\n        return  [a_b, 'c']\r\n"


def convert_files(
    path: Path,
    to: str,
    out: Path,
    plan: AttentionSpec | None = None,
    *,
    recurrent: str | None = None,
) -> list[str]:
    """Write a saved model as a stock class, with a model card; see :func:`convert`.

    Returns:
        The attention of each layer, ``"full"``, ``"window 64"`` or ``"recurrent"``.
    """
    require_new_folder(out)
    config = read_config(path)
    if plan is not None and read_field(config, NAME) is not None:
        raise SpecError(
            f"{str(path)!r} holds a swapped model, which has its own plan in config.json; leave "
            "--plan out, or give the original model"
        )
    try:
        model = load_pretrained(model_class(config, path), path, dtype="auto").eval()
    except OSError as error:
        raise SpecError(
            f"The weights in {str(path)!r} cannot be read ({error}); nothing was written."
        ) from error
    converted = convert(model, to, plan, recurrent=recurrent)
    require_same_tokens(path, converted.config)
    save_copy(converted, path, out)
    layers: list[Layer] = list(layer_windows(converted))
    for number in recurrent_layers(converted):
        layers.insert(number, RECURRENT)
    file = path / "README.md"
    text = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    (out / file.name).write_text(card(converted.config, layers, path.name, text), "utf-8")
    return ["full" if x is None else x if isinstance(x, str) else f"window {x}" for x in layers]


def require_same_tokens(source: Path, config: Any) -> None:
    """Raise if ``AutoTokenizer`` reads the source's files otherwise beside another config.

    It chooses the class of a tokenizer by the family in config.json: for some families whatever the
    tokenizer's own files name, as for Qwen 2 in transformers 5.24.
    """
    try:
        tokenizer = load_pretrained(AutoTokenizer, source)
    except (OSError, ValueError, KeyError):
        return  # not every model has one
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            loaded = load_pretrained(AutoTokenizer, folder)
            same = len(loaded) == len(tokenizer) and _tokens(loaded) == _tokens(tokenizer)
            found = type(loaded).__name__
        except (OSError, ValueError, KeyError, TypeError):
            same, found = False, "no tokenizer"
    if not same:
        raise UnsupportedError(
            f"Beside a {config.model_type} model, transformers loads {found} instead of this "
            f"model's {type(tokenizer).__name__}, so its tokens would be others, and nothing was "
            "written. Convert it to another class; attnzoo.convert converts the model alone"
        )


def _tokens(tokenizer: Any) -> list[int]:
    return list(tokenizer(SAMPLE)["input_ids"])


def card(config: Any, layers: Sequence[Layer], source: str, source_card: str = "") -> str:
    """Return the model card of a converted model in Markdown.

    The licence and the language of the card of its source are kept.
    """
    given = ModelCard(source_card).data
    kept = {name: given.get(name) for name in KEPT if given.get(name) is not None}
    head = ModelCardData(library_name="transformers", **kept)
    name = (config.architectures or [config.model_type])[0]
    parts = [
        f"---\n{head.to_yaml()}\n---\n",
        f"# {source}, converted to {name}\n",
        f"Written by `attnzoo convert --to {config.model_type}`, which copied all weights and "
        "trained nothing. The model runs without attnzoo.\n",
        _layers(layers) + "\n",
    ]
    if positions := rope_table(config):
        parts.append(positions + "\n")
    if RECURRENT in layers:
        parts.append(EXPERIMENTAL)
    if any(isinstance(x, int) for x in layers):
        parts.append(_engines(config.model_type))
    return "\n".join(parts)


def _layers(kinds: Sequence[Layer]) -> str:
    """Return the attention of the layers, neighbours with the same one on one line."""
    lines = ["| layers | attention |", "|---|---|"]
    first = 0
    for number, kind in enumerate(kinds):
        if number + 1 == len(kinds) or kinds[number + 1] != kind:
            layers = str(first) if first == number else f"{first}-{number}"
            lines.append(f"| {layers} | {_text(kind)} |")
            first = number + 1
    return "\n".join(lines)


def _text(kind: Layer) -> str:
    if kind is None:
        return "all keys"
    return "Gated DeltaNet, a state" if kind == RECURRENT else f"the latest {kind} keys"


def _engines(family: str) -> str:
    """Return what engines do with the windows of a class."""
    found = stock_class(family).engines
    lines = ["| engine | what it does with the windows |", "|---|---|", "| transformers | right |"]
    for key, label in ENGINES.items():
        lines.append(f"| {label} | {found.get(key, 'not tested')} |")
    return "\n".join(lines) + "\n"
