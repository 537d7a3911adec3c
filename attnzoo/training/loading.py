"""Loading of models for training."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.evaluation.models import require_causal
from attnzoo.hf.configs import read_field, set_dropout
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import build_model, explain_load_errors, load_pretrained
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.spec import AttentionSpec


def is_encoder(path: Path) -> bool:
    """Return whether a saved model is an encoder, whose attention is not causal.

    Raises:
        SpecError: The folder has no model, or the model is an encoder-decoder or has no attention
            layers.
    """
    config = read_config(path)
    # some models that were saved without a head are causal in their language model class
    causal_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    with torch.device("meta"), explain_load_errors(path):
        model = (causal_class or model_class(config, path))(config)
    causal = {layer.geometry.causal for layer in attention_layers(model)}
    if len(causal) != 1:
        raise SpecError(
            f"{str(path)!r} holds a {config.model_type} model with "
            + ("causal and bidirectional attention layers" if causal else "no attention layers")
            + "; give a decoder or an encoder"
        )
    return not causal.pop()


def load_causal(path: Path, spec: AttentionSpec | None, **options: Any) -> PreTrainedModel:
    """Load a causal model with swapped attention; see :func:`load_model`."""
    read_config(path)  # raises an error if the folder has no model
    require_causal(path, "training minimises a loss of text prediction")
    return load_model(path, spec, AutoModelForCausalLM, **options)


def require_original(path: Path) -> None:
    """Raise ``SpecError`` if a saved model is swapped."""
    if read_field(read_config(path), NAME) is not None:
        raise SpecError(
            f"{str(path)!r} is already swapped; give the original model, whose attention is to be "
            "replaced"
        )


def load_model(
    path: Path,
    spec: AttentionSpec | None,
    cls: Any,
    *,
    dtype: torch.dtype = torch.float32,
    load_in_4bit: bool = False,
    device: torch.device | None = None,
    disable_dropout: bool = False,
) -> PreTrainedModel:
    """Load a model with its attention swapped by ``spec`` or by its own config.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is already swapped.
        cls: Class whose ``from_pretrained`` loads it.
        dtype: Data type of the weights.
        load_in_4bit: Whether linear layers, but for the head and what backends add, are in 4 bits.
        device: Device of weights in 4 bits; ``None`` for the current one.
        disable_dropout: Whether all dropouts are 0; :func:`~attnzoo.hf.configs.set_dropout`
            restores those of the config that is saved.

    Raises:
        SpecError: The model is already swapped and a spec is given, or neither.
        UnsupportedError: ``load_in_4bit`` is set, but bitsandbytes is not installed, or the saved
            model is quantized.
    """
    config = read_config(path)
    swapped = read_field(config, NAME) is not None
    if spec is not None:
        require_original(path)
    if not swapped and spec is None:
        raise SpecError(f"{str(path)!r} is not swapped; give an attention to swap it with")
    if spec is not None:
        config.attnzoo = spec.to_dict()
    if disable_dropout:
        set_dropout(config)
    options = {"config": config, "attn_implementation": NAME, "dtype": dtype}
    if load_in_4bit:
        with init_empty_weights():
            skeleton = build_model(cls, deepcopy(config), attn_implementation=NAME)
        options["quantization_config"] = config_of_4_bits(skeleton)
        if device is not None:
            options["device_map"] = {"": device}
    model: PreTrainedModel = load_pretrained(cls, path, **options)
    return model


def config_of_4_bits(model: PreTrainedModel) -> BitsAndBytesConfig:
    """Return transformers' settings for linear layers in 4 bits, NF4 with double quantization.

    The head, as in transformers, and what backends add are not quantized. Source: Dettmers et al.,
    2023, arXiv:2305.14314 (QLoRA).

    Args:
        model: A model of the same architecture, which may be empty.

    Raises:
        UnsupportedError: bitsandbytes is not installed, the model has no such layers, or it is
            saved with quantized weights.
    """
    if find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            "weights in 4 bits (nf4) need bitsandbytes, which is not installed (pip install "
            "bitsandbytes); 'bfloat16' needs no other package"
        )
    if read_field(model.config, "quantization_config") is not None:
        raise UnsupportedError(
            "The saved model is quantized already; leave load_in_4bit out, or give the model "
            "that it was made from"
        )
    head = model.get_output_embeddings()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = [n for n, m in layers.items() if m is head or f".{NAME}." in n]
    if len(kept) == len(layers):
        raise UnsupportedError(
            f"{type(model).__name__} has no linear layers (torch.nn.Linear) that bitsandbytes "
            "could keep in 4 bits (nf4); use 'bfloat16'"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=kept,  # of 4 bits too
    )
