"""Decoding cost: time per token after a number of tokens, and the bytes of a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from attnzoo.hf.seam import cache_argument

PREFILL_TOKENS = 1024  # per forward call while the cache is filled
TIMED_TOKENS = 12  # per context length


@torch.no_grad()
def measure_together(
    model: PreTrainedModel,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    stream: Tensor,
    lengths: Sequence[int],
) -> dict[str, dict[int, list[float]]]:
    """Return the milliseconds of decoded tokens, by context and by length.

    Tokens of all contexts are timed in alternation, so that other load on the machine affects all.

    Args:
        model: A causal model in evaluation mode.
        contexts: By name, functions that return a context in which the model runs, such as that of
            :func:`~attnzoo.hf.swap.convert.original_attention`.
        stream: Tokens that fill the caches, ``[L]``, on the model's device.
        lengths: Context lengths, increasing, at most L.
    """
    taken: dict[str, dict[int, list[float]]] = {name: {} for name in contexts}
    caches = {name: DynamicCache(config=model.config) for name in contexts}

    def run(name: str, tokens: Tensor) -> float:
        start = time.perf_counter()
        with contexts[name]():
            model(tokens[None], **cache_argument(caches[name]), use_cache=True, logits_to_keep=1)
        return 1000 * (time.perf_counter() - start)

    seen = 0
    for length in lengths:
        for name in taken:
            for chunk in stream[seen:length].split(PREFILL_TOKENS) if length > seen else ():
                run(name, chunk)
        for _ in range(TIMED_TOKENS):
            for name, times in taken.items():
                times.setdefault(length, []).append(run(name, stream[:1]))
        seen = int(next(iter(caches.values())).get_seq_length())
    return taken


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all tensors in a cache."""
    return _bytes([vars(layer) for layer in cache.layers])


def layer_bytes(layer: Any) -> int:
    """Return the bytes of all tensors in one cache layer: states, or keys and values."""
    return _bytes(vars(layer))


def _bytes(tree: Any) -> int:
    found = {id(x): x for x in tree_leaves(tree) if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in found.values())
