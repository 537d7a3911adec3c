"""Continue from a cache of keys and values: backends with a sum as state read them into it.

PEFT's prefix tuning passes its virtual tokens in such a cache, and so does a prompt that ran before
the swap.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.masks import AttentionMask


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
    if backend.needs_hidden_states:
        what = "index keys" if backend.has_transfer_loss else "gates"
        reason = f"it computes {what} from hidden states, which the cache does not hold"
    elif not backend.state_from_keys:
        reason = "its state is not a sum over keys and values"
    elif type(layer) is not DynamicLayer or keys.shape[2] != length:
        reason = f"a {type(layer).__name__} does not hold all of them as plain tensors"
    else:
        return
    raise UnsupportedError(
        f"{backend.geometry.name}: the cache already holds {length} tokens as keys and values "
        "(virtual tokens of a prefix, or a prompt from before the swap), from which backend "
        f"{backend.name!r} cannot continue: {reason}. Start with an empty cache"
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
        backend: The backend, whose state depends on keys and values only.
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
    earlier = AttentionMask(causal=True, padding=padding)
    return backend(queries, keys, values, mask=earlier, scale=scale, return_state=True).state
