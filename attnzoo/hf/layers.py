"""Find a model's attention layers and read their geometry."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from attnzoo.contract.config import Geometry
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.configs import layer_config, read_field

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "groups"),
    "decoder_self_attention_heads",
)
_DROPOUTS = (
    "attention_dropout",
    "attn_dropout",
    "attn_drop",
    "dropout_prob",
    "dropout_p",
    "dropout",
)
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


class AttentionLayer(NamedTuple):
    """One attention module of a model."""

    name: str
    module: nn.Module
    geometry: Geometry


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return the modules that call the attention interface, in the order of ``named_modules``."""
    return [
        AttentionLayer(name, module, read_geometry(model, name, module))
        for name, module in model.named_modules()
        if seam.calls_attention_interface(module)
    ]


def layer_number(name: str, module: nn.Module) -> int:
    """Return a layer's ``layer_idx``, else the first number in its name, else 0."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        return index
    return number_in_name(name)


def number_in_name(name: str) -> int:
    """Return the first number in the name of a module, else 0."""
    match = _NUMBER.search(name)
    return int(match[1]) if match else 0


def _first(owners: tuple[Any, ...], *names: str) -> Any:
    for owner in owners:
        for name in names:
            value = read_field(owner, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
    return None


def read_geometry(model: nn.Module, name: str, module: nn.Module) -> Geometry:
    """Read the geometry of an attention module from its attributes, else from its config."""
    config = getattr(module, "config", None) or getattr(model, "config", None)
    number = layer_number(name, module)
    config = layer_config(config, number)
    owners = (module, config)
    heads = _first(owners, *_HEADS)
    hidden = _first((module,), "attention_hidden_size")  # Zamba 2 joins two hidden states
    hidden = hidden or _first(owners, "embed_dim", "hidden_size", "d_model", "dim", "n_embd")
    size = _first((module,), "qk_head_dim", *_SIZES) or _first((config,), "head_dim")
    if size is None and heads and hidden:
        size = hidden // heads
    if not heads or not size:
        raise UnsupportedError(
            f"{name}: the number of heads or their size cannot be read from "
            f"{type(module).__name__} or its config, so no backend can be built for it"
        )
    groups = _first((module,), "num_key_value_groups") or 1
    key_heads = _first((module,), "num_key_value_heads")
    if key_heads is None or getattr(module, "num_key_value_groups", None) == 1:
        key_heads = heads // groups  # some layers repeat their keys before they call the interface
    cross = bool(_CROSS.search(name) or _CROSS.search(type(module).__name__))
    cross = cross or getattr(module, "is_cross_attention", False) is True
    cross = cross or seam.attends_to_both_sequences(module)
    causal = (is_causal(module, config) or _in_causal_tower(model, module)) and not cross
    sinks = getattr(module, "sinks", getattr(module, "sink_proj", None))  # or a projection
    longest = "max_target_positions" if causal else "max_source_positions"
    window = sliding_window(module, config, number)
    return Geometry(
        num_heads=int(heads),
        num_key_heads=int(key_heads),
        head_dim=int(size),
        value_dim=_first((module,), "v_head_dim"),
        hidden_size=hidden,
        causal=causal,
        cross_attention=cross,
        scale=_first((module,), "scaling", "scale"),
        window=window,
        chunk_size=chunk_size(config, number),
        softcap=_first((module,), "attn_logit_softcapping"),
        sinks=sinks is not None and not isinstance(sinks, bool | int),
        dropout=attention_dropout(module),
        position_bias=has_position_bias(module, cross_attention=cross),
        own_mask=seam.own_mask(model, module, has_window=window is not None),
        last_tokens=seam.may_compute_last_tokens(model, module),
        max_length=_first((config,), "max_position_embeddings", "n_positions", longest),
        layer=number,
        name=name,
    )


def attention_dropout(module: nn.Module) -> float:
    """Return the probability of attention dropout in training, from a number or a module."""
    for name in _DROPOUTS:
        value = getattr(module, name, None)
        value = getattr(value, "p", value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return 0.0


def is_causal(module: nn.Module, config: Any) -> bool:
    """Return whether a layer is causal; a config can make a decoder bidirectional."""
    if getattr(module, "is_decoder", None) is False:  # encoders may set is_causal
        return False
    is_causal = getattr(module, "is_causal", None)
    if is_causal is not None and not is_causal:
        return False
    return read_field(config, "is_causal", True) is not False


def _in_causal_tower(model: nn.Module, module: nn.Module) -> bool:
    """Return whether the model around a layer makes it causal, as CLIP's text model does.

    Text and image towers share the class of their layers, so the layers are bidirectional; the text
    tower passes them a causal mask and ``is_causal``.
    """
    if getattr(module, "is_causal", None) is not False:
        return False
    owners = [m for m in seam.pretrained_models(model) if any(x is module for x in m.modules())]
    innermost = owners[-1:]  # pretrained_models lists outer models first
    return any(
        seam.reads_name(owner, "create_causal_mask") and seam.reads_name(owner, "is_causal")
        for owner in innermost
    )


def has_image_mask(model: nn.Module, layer: AttentionLayer) -> bool:
    """Return whether a decoder's layer is bidirectional within an image, as in Gemma 3."""
    return layer.geometry.causal and any(
        seam.reads_name(owner, "block_sequence_ids") and layer.module in set(owner.modules())
        for owner in seam.pretrained_models(model)
    )


def has_position_bias(module: nn.Module, *, cross_attention: bool) -> bool:
    """Return whether a layer passes a relative position bias to the attention function."""
    if not seam.reads_name(module, "position_bias"):
        return False
    kind = str(getattr(module, "position_embeddings_type", "relative"))  # set by some configs
    return "relative" in kind and not position_bias_is_zero(module, cross_attention=cross_attention)


def position_bias_is_zero(module: nn.Module, *, cross_attention: bool) -> bool:
    """Return whether the position bias of a layer is all zeros, as in T5's cross-attention."""
    return cross_attention and getattr(module, "has_relative_attention_bias", None) is False


def chunk_size(config: Any, number: int) -> int | None:
    """Return the size of the chunks within which the model attends in this layer, or ``None``."""
    kinds = read_field(config, "layer_types") or ()
    is_chunked = number < len(kinds) and kinds[number] == "chunked_attention"
    return read_field(config, "attention_chunk_size") if is_chunked else None


def sliding_window(module: nn.Module, config: Any, number: int) -> int | None:
    """Return the sliding window of the model in this layer, or ``None``."""
    if getattr(module, "is_sliding", None) is False:  # EXAONE 4: the size is set in every layer
        return None
    if hasattr(module, "sliding_window"):
        window: Any = module.sliding_window
        return window if isinstance(window, int) and not isinstance(window, bool) else None
    if not seam.reads_name(module, "sliding_window"):
        return None
    kinds = read_field(config, "layer_types")
    if kinds is not None and number < len(kinds) and "sliding" not in kinds[number]:
        return None
    window = read_field(config, "sliding_window")
    return window if isinstance(window, int) else None


def unwrap_model(model: nn.Module) -> PreTrainedModel | None:
    """Return the outermost transformers model in a wrapper (PEFT, DDP, compiled), or ``None``."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    return None
