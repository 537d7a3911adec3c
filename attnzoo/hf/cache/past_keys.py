"""Continue from a cache of keys and values: backends read them into their state.

PEFT's prefix tuning passes its virtual tokens in such a cache, and so does a prompt that ran before
the swap. Gates are computed from hidden states, which the cache does not hold: those of a prompt
are lost, and a prefix has none, so its gates are those of hidden states of zero.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError


def mark_virtual_tokens(cache: Any) -> None:
    """Record that a stock cache holds virtual tokens, whose keys and values a prefix trains."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if isinstance(cache, Cache):
        for layer in cache.layers:
            vars(layer)["virtual_tokens"] = True


def refuse_unreadable(layer: Any, length: int, backend: AttentionBackend) -> None:
    """Raise if a backend cannot read the keys and values of a stock cache layer.

    Args:
        layer: The layer, which holds tokens.
        length: Their number.
        backend: The backend, or PEFT's wrapper around it.

    Raises:
        UnsupportedError: The message gives the reason.
    """
    keys: Any = layer.keys
    virtual = hasattr(layer, "virtual_tokens")
    can = backend.capabilities
    if can.needs_hidden_states and not virtual:
        what = can.from_hidden_states
        reason = f"it computes {what} from hidden states, which the cache does not hold"
    elif not can.state_from_keys:
        reason = "its state is not a sum over keys and values"
    elif type(layer) is not DynamicLayer or keys.shape[2] != length:
        reason = f"a {type(layer).__name__} does not hold all of them as plain tensors"
    else:
        return
    raise UnsupportedError(
        f"{backend.geometry.name}: the cache already holds {length} tokens as keys and values "
        f"({'virtual tokens of a prefix' if virtual else 'a prompt from before the swap'}), from "
        f"which backend {backend.name!r} cannot continue: {reason}. Start with an empty cache"
    )


def state_of_keys(
    backend: AttentionBackend,
    keys: Tensor,
    values: Tensor,
    mask: AttentionMask,
    scale: float | None,
) -> Any:
    """Return the state after the tokens of a stock cache layer.

    Args:
        backend: The backend, whose state depends on keys and values, and on gates.
        keys: ``[B, Hkv, S, D]``.
        values: ``[B, Hkv, S, E]``.
        mask: The mask of a call with new tokens after these.
        scale: Multiplies query-key products; ``None`` means the layer's own.

    Raises:
        UnsupportedError: The padding of these tokens is unknown.
    """
    padding, length = mask.padding, keys.shape[2]
    if padding is not None:
        if int(mask.q_offset) != length:
            raise UnsupportedError(
                f"the cache holds {length} tokens, but attention_mask covers {int(mask.q_offset)} "
                "tokens before the new ones; pass a mask over all tokens so far"
            )
        padding = padding[:, :length]
    queries = keys.new_zeros(keys.shape[0], backend.geometry.num_heads, *keys.shape[2:])
    hidden = None
    if backend.capabilities.needs_hidden_states:
        size = backend.geometry.hidden_size
        assert size is not None  # a layer without one was refused when it was built
        hidden = keys.new_zeros(keys.shape[0], length, size)
    output = backend(
        queries,
        keys,
        values,
        mask=AttentionMask(causal=True, padding=padding, window=mask.window),
        scale=scale,
        hidden_states=hidden,
        return_state=True,
    )
    return output.state


def refuse_export(layer: str, backend: str) -> NoReturn:
    """Raise because ``torch.export`` cannot put the state of a layer in a cache of the caller."""
    raise UnsupportedError(
        f"{layer}: torch.export cannot trace a cache that backend {backend!r} fills with a state. "
        "Export decoding with transformers' TorchExportableModuleForDecoderOnlyLM, whose cache "
        "holds the state from the start, or export the model with use_cache=False"
    )
