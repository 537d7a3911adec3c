"""Decoding cost: time per token and cache size after a number of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.evaluation.quality import OnStep
from attnzoo.hf.seam import cache_argument

PREFILL_TOKENS = 1024  # per forward call while the cache is filled
TIMED_TOKENS = 12  # per context length


@dataclass(kw_only=True)
class DecodingCost:
    """Cost of decoding by context length in tokens.

    Attributes:
        decode_ms: Median milliseconds per token.
        cache_bytes: Bytes of the cache.
    """

    decode_ms: dict[int, float] = field(default_factory=dict)
    cache_bytes: dict[int, int] = field(default_factory=dict)


@torch.no_grad()
def measure_decoding(
    model: PreTrainedModel,
    stream: Tensor,
    lengths: Sequence[int],
    on_step: OnStep = lambda: None,
) -> DecodingCost:
    """Fill a cache and return the decoding time and the cache size at each context length.

    Args:
        model: A causal model in evaluation mode.
        stream: Tokens that fill the cache, ``[L]``, on the model's device.
        lengths: Context lengths, increasing, at most L.
        on_step: Called after each forward call that fills the cache and after each length.
    """
    cost, cache, seen = DecodingCost(), DynamicCache(config=model.config), 0
    for length in lengths:
        for chunk in stream[seen:length].split(PREFILL_TOKENS) if length > seen else ():
            model(chunk[None], **cache_argument(cache), use_cache=True, logits_to_keep=1)
            on_step()
        cost.cache_bytes[length] = cache_bytes(cache)
        cost.decode_ms[length] = _decode_ms(model, cache, stream[:1])
        seen = int(cache.get_seq_length())
        on_step()
    return cost


def _decode_ms(model: PreTrainedModel, cache: DynamicCache, token: Tensor) -> float:
    times = []
    for _ in range(TIMED_TOKENS):
        start = time.perf_counter()
        model(token[None], **cache_argument(cache), use_cache=True, logits_to_keep=1)
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all tensors in a cache."""
    return sum(layer_bytes(layer) for layer in cache.layers)


def layer_bytes(layer: Any) -> int:
    """Return the bytes of the tensors in one cache layer: a state, or keys and values."""
    state = getattr(layer, "state", None)
    if state is None:
        tensors: Any = (getattr(layer, "keys", None), getattr(layer, "values", None))
    else:
        tensors = state
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
