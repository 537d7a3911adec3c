"""Read which sliding window each layer of a model attends within, if its attention is exact."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnzoo.backends.longformer import LongformerBackend
from attnzoo.backends.parts.exact import ExactBackend
from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import AttentionLayer, attention_layers
from attnzoo.hf.names import NAME

EXACT = "softmax and flash, also with a window, and longformer without global tokens"


def layer_windows(model: nn.Module) -> list[int | None]:
    """Return the window of each attention layer in tokens, ``None`` where it sees all keys.

    The window of a swapped layer is the smaller one of its backend's and of the model's.

    Raises:
        UnsupportedError: No stock class computes what a layer does; with every such layer.
    """
    layers = attention_layers(model)
    reasons = {}
    windows = []
    for layer in layers:
        backend = _running_backend(model, layer)
        reason = "" if backend is None else _reason(backend)
        if reason:
            reasons[layer.geometry.layer] = reason
        windows.append(_window(layer, backend))
    if reasons:
        lines = "; ".join(f"layer {number}: {reason}" for number, reason in reasons.items())
        raise UnsupportedError(
            f"No stock class holds the attention of {len(reasons)} of {len(layers)} layers "
            f"({lines}). Stock classes hold {EXACT}. Keep the swapped model, which transformers "
            "loads after `import attnzoo`, or convert one whose layers are exact"
        )
    return windows


def _running_backend(model: nn.Module, layer: AttentionLayer) -> AttentionBackend | None:
    """Return the backend that a layer runs, ``None`` if it runs stock attention."""
    config: Any = getattr(layer.module, "config", None) or model.config
    found = layer_backend(layer.module) if config._attn_implementation == NAME else None
    return found if isinstance(found, AttentionBackend) else None


def _reason(backend: AttentionBackend) -> str:
    """Return why no stock class computes what a backend does, or ``""``."""
    config: Any = backend.config
    if isinstance(backend, LongformerBackend):
        pattern = config.window, config.dilation
        if config.num_global or config.global_positions or config.global_projections:
            return "longformer has global tokens"
        if not all(isinstance(x, int) for x in pattern) or config.dilation != 1:
            return "longformer has dilated windows, or one for each head"
    elif not isinstance(backend, ExactBackend):
        return f"{backend.name} is not softmax attention"
    elif config.num_sinks:
        return f"num_sinks={config.num_sinks} keeps the first tokens beside the window"
    if config.window is not None and not backend.geometry.causal:
        return f"window={config.window} is bidirectional"
    return ""


def _window(layer: AttentionLayer, backend: AttentionBackend | None) -> int | None:
    """Return the window of a layer without a reason against it."""
    own = getattr(getattr(backend, "config", None), "window", None)
    windows = [x for x in (own, layer.geometry.window) if isinstance(x, int)]
    return min(windows, default=None)
