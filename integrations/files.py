"""Saved models: read one without its weights, and write a swapped copy of one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.integrations.attention import NAME
from attnzoo.spec import AttentionSpec


def read_config(path: Path) -> Any:
    """Read the config of a saved model.

    Raises:
        SpecError: There is no such model.
    """
    if not (path / "config.json").is_file():
        raise SpecError(f"{str(path)!r} holds no saved model: config.json is not there")
    return AutoConfig.from_pretrained(path)


def asks_for_swap(path: Any, config: Any = None) -> bool:
    """Whether a saved model is loaded with a swap: by a given config, or by its own."""
    if config is None and isinstance(path, str | Path) and (Path(path) / "config.json").is_file():
        config = AutoConfig.from_pretrained(path)
    return getattr(config, NAME, None) is not None


def model_class(config: Any, path: Path) -> type[PreTrainedModel]:
    """Return the class that a saved model was, from its config.

    Raises:
        SpecError: The config does not say, or transformers has no such class.
    """
    names = getattr(config, "architectures", None) or []
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None:
        raise SpecError(
            f"{str(path)!r} does not name a model class of transformers (architectures: {names})"
        )
    return cls  # type: ignore[no-any-return]


def empty_model(path: Path) -> PreTrainedModel:
    """Build a saved model without weights, on the meta device."""
    config = read_config(path)
    with torch.device("meta"):
        return model_class(config, path)(config)


def swap_files(path: Path, spec: AttentionSpec, out: Path) -> PreTrainedModel:
    """Load a saved model with ``spec``, write it to ``out`` whole or not at all, and return it.

    Raises:
        SpecError: ``out`` exists, ``path`` is no model, or its weights cannot be read.
        UnsupportedError: A backend refuses a layer.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(f"{str(out)!r} exists and is not empty; give --out a new folder")
    config = read_config(path)
    cls = model_class(config, path)
    config.attnzoo = spec.to_dict()
    try:
        model = cls.from_pretrained(path, config=config, attn_implementation=NAME)
    except OSError as error:
        raise SpecError(
            f"The weights in {str(path)!r} cannot be read ({error}); nothing was written."
        ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / "model"
        model.save_pretrained(made)
        for auto in (AutoTokenizer, AutoProcessor):
            try:
                auto.from_pretrained(path).save_pretrained(made)
            except (OSError, ValueError, KeyError):
                continue  # a model may come without one
        if out.exists():
            out.rmdir()
        shutil.move(made, out)
    return model
