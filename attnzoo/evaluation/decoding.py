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

from attnzoo.evaluation.timing import contradicted
from attnzoo.hf.seam import cache_argument

PREFILL_TOKENS = 1024  # per forward call while the cache is filled
TIMED_TOKENS = 12  # per context length


@dataclass(kw_only=True)
class DecodingCost:
    """Cost of decoding by context length in tokens.

    Attributes:
        decode_ms: Median milliseconds per token.
        rounds_ms: Milliseconds of each timed token.
        busy: Lengths whose times contradict those of longer contexts, also when measured again:
            the machine was busy.
    """

    decode_ms: dict[int, float] = field(default_factory=dict)
    rounds_ms: dict[int, list[float]] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)

    def contradicted(self) -> list[int]:
        """Return the lengths whose fastest time a longer context contradicts."""
        return contradicted({n: min(ms) for n, ms in self.rounds_ms.items()})


@torch.no_grad()
def measure_together(
    model: PreTrainedModel,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    stream: Tensor,
    lengths: Sequence[int],
    on_step: Callable[[], None] = lambda: None,
) -> dict[str, DecodingCost]:
    """Return the decoding costs of a model in several contexts, their tokens timed in alternation.

    Other load on the machine therefore affects all of them. Times that those of longer contexts
    contradict are measured again once, then marked.

    Args:
        model: A causal model in evaluation mode.
        contexts: By name, functions that return a context in which the model runs, such as that of
            :func:`~attnzoo.hf.swap.convert.original_attention`.
        stream: Tokens that fill the caches, ``[L]``, on the model's device.
        lengths: Context lengths, increasing, at most L.
        on_step: Called after each forward call that fills a cache and after each length.
    """
    costs = _measure_once(model, contexts, stream, lengths, on_step)
    if any(cost.contradicted() for cost in costs.values()):
        costs = _measure_once(model, contexts, stream, lengths, lambda: None)
        for cost in costs.values():
            cost.busy = cost.contradicted()
    return costs


def _measure_once(
    model: PreTrainedModel,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    stream: Tensor,
    lengths: Sequence[int],
    on_step: Callable[[], None],
) -> dict[str, DecodingCost]:
    costs = {name: DecodingCost() for name in contexts}
    caches = {name: DynamicCache(config=model.config) for name in contexts}

    def run(name: str, tokens: Tensor) -> None:
        with contexts[name]():
            model(tokens[None], **cache_argument(caches[name]), use_cache=True, logits_to_keep=1)

    seen = 0
    for length in lengths:
        for name in costs:
            for chunk in stream[seen:length].split(PREFILL_TOKENS) if length > seen else ():
                run(name, chunk)
                on_step()
        times: dict[str, list[float]] = {name: [] for name in contexts}
        for _ in range(TIMED_TOKENS):
            for name in contexts:
                start = time.perf_counter()
                run(name, stream[:1])
                times[name].append(1000 * (time.perf_counter() - start))
        for name, cost in costs.items():
            cost.rounds_ms[length], cost.decode_ms[length] = times[name], median(times[name])
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
