"""Decoding cost: time per token after a number of tokens, and the bytes of a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from attnzoo.hf.seam import cache_argument

PREFILL_TOKENS = 1024  # per forward call while the cache is filled
TIMED_TOKENS = 12  # per context length


@dataclass(kw_only=True)
class DecodingCost:
    """Time of decoding by context length in tokens.

    Attributes:
        rounds_ms: Milliseconds of each timed token.
    """

    rounds_ms: dict[int, list[float]] = field(default_factory=dict)

    @property
    def decode_ms(self) -> dict[int, float]:
        """Median milliseconds per token."""
        return {length: median(ms) for length, ms in self.rounds_ms.items()}


@torch.no_grad()
def measure_together(
    model: PreTrainedModel,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    stream: Tensor,
    lengths: Sequence[int],
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, DecodingCost]:
    """Return the decoding costs of a model in several contexts, their tokens timed in alternation.

    Other load on the machine therefore affects all of them.

    Args:
        model: A causal model in evaluation mode.
        contexts: By name, functions that return a context in which the model runs, such as that of
            :func:`~attnzoo.hf.swap.convert.original_attention`.
        stream: Tokens that fill the caches, ``[L]``, on the model's device.
        lengths: Context lengths, increasing, at most L.
        on_step: Called after each forward call that fills a cache and after each length.
    """
    costs = {name: DecodingCost() for name in contexts}
    caches = {name: DynamicCache(config=model.config) for name in contexts}

    def run(name: str, tokens: Tensor) -> float:
        start = time.perf_counter()
        with contexts[name]():
            model(tokens[None], **cache_argument(caches[name]), use_cache=True, logits_to_keep=1)
        return 1000 * (time.perf_counter() - start)

    seen = 0
    for length in lengths:
        for name in costs:
            for chunk in stream[seen:length].split(PREFILL_TOKENS) if length > seen else ():
                run(name, chunk)
                on_step()
        for _ in range(TIMED_TOKENS):
            for name, cost in costs.items():
                cost.rounds_ms.setdefault(length, []).append(run(name, stream[:1]))
        seen = int(next(iter(caches.values())).get_seq_length())
        on_step()
    return costs


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all tensors in a cache."""
    return _bytes([vars(layer) for layer in cache.layers])


def layer_bytes(layer: Any) -> int:
    """Return the bytes of all tensors in one cache layer: states, or keys and values."""
    return _bytes(vars(layer))


def _bytes(tree: Any) -> int:
    found = {id(x): x for x in tree_leaves(tree) if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in found.values())
