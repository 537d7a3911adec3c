"""Models to evaluate: the embedded one, saved ones with another attention, and their limits."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attnzoo.errors import SpecError
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.models.positions import table_positions
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import build_model, load_pretrained
from attnzoo.hf.saving.files import empty_model, read_config
from attnzoo.spec import AttentionSpec

EMBEDDED = "embedded"  # the command line's name of the model that ships with the package
EMBEDDED_LONG = "embedded-long"  # of a model that is in the repository only: it has 5 MB
_PACKAGE = Path(str(files("attnzoo")))
_LONG = "benchmarks/tiny-llama-long"
_EMBEDDED_FOLDERS = {
    EMBEDDED: _PACKAGE / "assets" / "tiny-llama",
    EMBEDDED_LONG: _PACKAGE.parent / _LONG,
}


def embedded_model_path(name: str = EMBEDDED) -> Path:
    """Return the folder of a pretrained model that ships with the package or the repository.

    Args:
        name: ``"embedded"``, of 512 positions, or ``"embedded-long"``, which recalls over 4,096 and
            is not in the wheel.

    Raises:
        SpecError: The model is not in this installation.
    """
    folder = _EMBEDDED_FOLDERS[name]
    if not folder.is_dir():
        raise SpecError(
            f"{name!r} is not part of the installed package, which it would nearly double; its "
            f"folder is {_LONG} in the repository: give the path of that folder, or run "
            "attnzoo from a clone"
        )
    return folder


def is_embedded(model: str) -> bool:
    """Return whether this is the name or the folder of an embedded model."""
    return model in _EMBEDDED_FOLDERS or Path(model) in _EMBEDDED_FOLDERS.values()


def embedded_name(folder: Path) -> str | None:
    """Return the name of an embedded model by its folder."""
    return next((name for name, path in _EMBEDDED_FOLDERS.items() if path == folder), None)


def spec_label(spec: AttentionSpec) -> str:
    """Return a short name of a spec for tables: its backend and the options that are set."""
    options = spec.default.options
    values = " ".join(f"{k} {v}" if isinstance(v, int) else str(v) for k, v in options.items())
    return f"{spec.default.backend} {values}".strip()


def load_swapped(path: Path, spec: AttentionSpec) -> Any:
    """Load a causal model in float32 with its attention replaced through its config."""
    config = read_config(path)
    config.attnzoo = spec.to_dict()
    return load_pretrained(
        AutoModelForCausalLM, path, config=config, attn_implementation=NAME, dtype=torch.float32
    ).eval()


def max_positions(path: Path) -> int | None:
    """Return the number of positions a model has; ``None`` for rotary or relative positions."""
    config: Any = read_config(path)
    rotary = any(read_field(config, name) for name in ("rope_parameters", "rope_theta"))
    limit = read_field(config, "max_position_embeddings")
    if rotary or limit is None:
        return None
    rows = table_positions(empty_model(path)) if read_field(config, "architectures") else None
    return rows or int(limit)


def require_causal(path: Path, reason: str) -> None:
    """Raise an error for a model that is not causal, because its language loss means nothing.

    Args:
        path: Folder of a saved model.
        reason: Why the model must be causal, for the message.

    Raises:
        SpecError: A layer of the model attends to future tokens.
    """
    config = read_config(path)
    with torch.device("meta"):
        layers = attention_layers(build_model(AutoModelForCausalLM, config))
    if not all(layer.geometry.causal for layer in layers):
        raise SpecError(
            f"{str(path)!r} holds a {config.model_type} model that is not causal; {reason}, so "
            "give a decoder"
        )
