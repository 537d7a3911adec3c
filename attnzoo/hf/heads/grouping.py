"""Convert multi-head attention to grouped-query attention by averaging key and value heads.

The cache shrinks by the same factor. Quality drops, and training recovers it.
Source: Ainslie et al., 2023, arXiv:2305.13245 (GQA), section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.files import (
    model_class,
    read_config,
    require_new_folder,
    save_copy,
)

FIELD = "num_key_value_heads"


def convert_heads(model: PreTrainedModel, kv_heads: int) -> PreTrainedModel:
    """Return a model with fewer key and value heads, each the mean of several of the given model.

    The heads of a group are neighbours, and the queries keep the group that they had, so a model
    whose key and value heads are equal within each group computes the same as before.

    Args:
        model: A model of a family whose config has ``num_key_value_heads``; it is not changed.
        kv_heads: New number of key and value heads, a smaller divisor of the present one.

    Raises:
        SpecError: The model is swapped or quantized, its family has no grouped heads or keeps
            queries, keys and values in one weight, or ``kv_heads`` is no smaller divisor.

    Example:
        >>> attnzoo.convert_heads(model, 1).config.num_key_value_heads
        1
    """
    config = deepcopy(model.config)
    present = _present_heads(config)
    if getattr(config, NAME, None) is not None:
        raise SpecError(
            "The model is swapped, and backends have states per key head; convert the heads of the "
            "original model, then swap it"
        )
    divisors = [n for n in range(1, present) if present % n == 0]
    if kv_heads not in divisors:
        raise SpecError(
            f"kv_heads must be a smaller divisor of the model's {present} key and value heads, got "
            f"{kv_heads}; give one of {', '.join(map(str, divisors)) or '(none: it has one)'}"
        )
    setattr(config.get_text_config(), FIELD, kv_heads)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in type(model)(config).state_dict().items()}
    linear = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for part in ("weight", "bias")
    }
    state = {}
    for name, tensor in model.state_dict().items():
        shape = shapes.get(name)
        if shape is None or (shape != tensor.shape and name not in linear):
            raise SpecError(
                f"The parameter {name} of {config.model_type} depends on the number of key heads "
                "in a way that is not known; only linear layers of keys and of values can be "
                "averaged"
            )
        state[name] = tensor
        if shape != tensor.shape:
            state[name] = _average_heads(name, tensor, shape, present, kv_heads)
    converted: Any = type(model)._from_config(config, dtype=model.dtype)
    converted.load_state_dict(state)
    converted.generation_config = deepcopy(model.generation_config)
    converted.to(model.device).train(model.training)
    return cast(PreTrainedModel, converted)


def _present_heads(config: Any) -> int:
    """Return the number of key and value heads in a config.

    Raises:
        SpecError: The family has no grouped heads.
    """
    present = getattr(config.get_text_config(), FIELD, None)
    if not isinstance(present, int):
        raise SpecError(
            f"The config of {config.model_type} has no integer {FIELD}, so this family has no "
            "grouped-query attention to convert to"
        )
    return present


def _average_heads(
    name: str, tensor: Tensor, shape: torch.Size, present: int, kv_heads: int
) -> Tensor:
    """Return the means over neighbouring heads of a weight or bias ``[heads * D, ...]``."""
    rows = tensor.shape[0]
    if not tensor.is_floating_point():
        raise SpecError(f"{name} is quantized ({tensor.dtype}); give the model before quantization")
    if rows % present or shape != (rows // present * kv_heads, *tensor.shape[1:]):
        raise SpecError(
            f"{name} has {rows} rows, which are not those of {present} key or value heads alone: "
            "this family keeps queries, keys and values in one weight, which is not supported"
        )
    groups = tensor.float().view(kv_heads, present // kv_heads, rows // present, *tensor.shape[1:])
    return groups.mean(1).flatten(0, 1).to(tensor.dtype)


def convert_heads_files(path: Path, kv_heads: int, out: Path) -> Mapping[str, int]:
    """Write a copy of a saved model with fewer key and value heads; see :func:`convert_heads`.

    Returns:
        The number of key and value heads before and after, ``{"before": 8, "after": 2}``.

    Raises:
        SpecError: ``out`` is not empty, or the model cannot be read or converted.
    """
    require_new_folder(out)
    config = read_config(path)
    before = _present_heads(config)
    try:
        model = model_class(config, path).from_pretrained(path, dtype="auto")
    except OSError as error:
        raise SpecError(
            f"The weights in {str(path)!r} cannot be read ({error}); nothing was written."
        ) from error
    save_copy(convert_heads(model, kv_heads), path, out)
    return {"before": before, "after": kv_heads}
