"""Which modules of a model are attention layers, and their geometry, read from those modules."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from attnzoo.backends.config import Geometry
from attnzoo.errors import UnsupportedError
from attnzoo.integrations import compat

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "groups"),
    "decoder_self_attention_heads",
)
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


class AttentionLayer(NamedTuple):
    """One attention module of a model."""

    name: str
    module: nn.Module
    geometry: Geometry


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Find the modules that call the attention interface, in the model's order."""
    return [
        AttentionLayer(name, module, read_geometry(model, name, module))
        for name, module in model.named_modules()
        if compat.calls_attention_interface(module)
    ]


def layer_number(name: str, module: nn.Module) -> int:
    """Return a layer's number: its ``layer_idx``, else the first number in its name, else 0."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        return index
    match = _NUMBER.search(name)
    return int(match[1]) if match else 0


def _first(owners: tuple[Any, ...], *names: str) -> Any:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
    return None


def read_geometry(model: nn.Module, name: str, module: nn.Module) -> Geometry:
    """Read heads, sizes and limits of an attention module, from itself first and its config second.

    Raises:
        UnsupportedError: The number of heads or their size is nowhere to be found.
    """
    config = getattr(module, "config", None) or getattr(model, "config", None)
    owners = (module, config)
    number = layer_number(name, module)
    heads = _first(owners, *_HEADS)
    hidden = _first(owners, "embed_dim", "hidden_size", "d_model", "dim", "n_embd")
    size = _first((module,), "qk_head_dim", *_SIZES) or _first((config,), "head_dim")
    if size is None and heads and hidden:
        size = hidden // heads
    if not heads or not size:
        raise UnsupportedError(
            f"{name}: the number of heads or their size cannot be read from "
            f"{type(module).__name__} or its config, so no backend can be fitted to it"
        )
    groups = _first((module,), "num_key_value_groups") or 1
    key_heads = _first((module,), "num_key_value_heads")
    if key_heads is None or getattr(module, "num_key_value_groups", None) == 1:
        key_heads = heads // groups  # a layer may have repeated its keys before it attends
    cross = bool(_CROSS.search(name) or _CROSS.search(type(module).__name__))
    cross = cross or getattr(module, "is_cross_attention", False) is True
    causal = is_causal(module, config) and not cross
    sinks = getattr(module, "sinks", getattr(module, "sink_proj", None))  # or one for each query
    longest = "max_target_positions" if causal else "max_source_positions"
    return Geometry(
        num_heads=int(heads),
        num_key_heads=int(key_heads),
        head_dim=int(size),
        value_dim=_first((module,), "v_head_dim"),
        hidden_size=hidden,
        causal=causal,
        cross_attention=cross,
        scale=_first((module,), "scaling", "scale"),
        window=sliding_window(module, config, number),
        softcap=_first((module,), "attn_logit_softcapping"),
        sinks=sinks is not None and not isinstance(sinks, bool | int),
        position_bias=has_position_bias(module, cross_attention=cross),
        max_length=_first((config,), "max_position_embeddings", "n_positions", longest),
        layer=number,
        name=name,
    )


def is_causal(module: nn.Module, config: Any) -> bool:
    """Whether a layer is causal; a config may switch that off for a decoder used as an encoder."""
    own = getattr(module, "is_causal", None)
    if own is not None and not bool(own):
        return False
    if getattr(module, "is_decoder", None) is False:  # an encoder's layer that says it is causal
        return False
    return bool(getattr(config, "is_causal", True) is not False) and (own is None or bool(own))


def has_position_bias(module: nn.Module, *, cross_attention: bool) -> bool:
    """Whether a layer hands the attention function a bias made from relative positions."""
    if not compat.reads_name(module, "position_bias"):
        return False
    kind = str(getattr(module, "position_embeddings_type", "relative"))  # some may be set to others
    return "relative" in kind and not position_bias_is_zero(module, cross_attention=cross_attention)


def position_bias_is_zero(module: nn.Module, *, cross_attention: bool) -> bool:
    """Whether the position bias that a layer hands over is all zeros: in T5's cross-attention."""
    return cross_attention and getattr(module, "has_relative_attention_bias", None) is False


def sliding_window(module: nn.Module, config: Any, number: int) -> int | None:
    """Return the model's own sliding window in this layer, if it has one."""
    if hasattr(module, "sliding_window"):
        window: Any = module.sliding_window
        return window if isinstance(window, int) and not isinstance(window, bool) else None
    if not compat.reads_name(module, "sliding_window"):
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and number < len(kinds) and "sliding" not in kinds[number]:
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def whole_model(model: nn.Module) -> PreTrainedModel | None:
    """Return the outermost transformers model in a wrapper (PEFT, DDP, compiled), or itself."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    return None
