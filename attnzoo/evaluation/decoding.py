"""Decoding cost: time per token and cache size after a number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.evaluation.cost_laws import contradicted
from attnzoo.evaluation.quality import OnStep
from attnzoo.hf.seam import cache_argument

PREFILL_TOKENS = 1024  # per forward call while the cache is filled
TIMED_TOKENS = 12  # per context length
FILLED_TOKENS = 2048  # at most; beyond them a cache grows linearly or is constant


@dataclass(kw_only=True)
class DecodingCost:
    """Cost of decoding by context length in tokens.

    Attributes:
        decode_ms: Median milliseconds per token.
        cache_bytes: Bytes of the cache.
        rounds_ms: Milliseconds of each timed token.
        busy: Lengths whose times contradict those of longer contexts, also when measured again:
            the machine was busy.
    """

    decode_ms: dict[int, float] = field(default_factory=dict)
    cache_bytes: dict[int, int] = field(default_factory=dict)
    rounds_ms: dict[int, list[float]] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)

    def contradicted(self) -> list[int]:
        """Return the lengths whose fastest time a longer context contradicts."""
        return contradicted({n: min(ms) for n, ms in self.rounds_ms.items()})


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
    return measure_together(model, {"model": nullcontext}, stream, lengths, on_step)["model"]


@torch.no_grad()
def measure_together(
    model: PreTrainedModel,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    stream: Tensor,
    lengths: Sequence[int],
    on_step: OnStep = lambda: None,
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
    on_step: OnStep,
) -> dict[str, DecodingCost]:
    costs = {name: DecodingCost() for name in contexts}
    caches = {name: DynamicCache(config=model.config) for name in contexts}

    def run(name: str, tokens: Tensor) -> None:
        with contexts[name]():
            model(tokens[None], **cache_argument(caches[name]), use_cache=True, logits_to_keep=1)

    seen = 0
    for length in lengths:
        for name, cost in costs.items():
            for chunk in stream[seen:length].split(PREFILL_TOKENS) if length > seen else ():
                run(name, chunk)
                on_step()
            cost.cache_bytes[length] = cache_bytes(caches[name])
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
    return sum(layer_bytes(layer) for layer in cache.layers)


def bytes_of_layers(
    fill: Callable[[int], dict[int, int]], length: int, limit: int | None
) -> dict[int, int]:
    """Return the cache bytes of each layer at a length, by layer index.

    Lengths above ``FILLED_TOKENS``, or the model's positions, are extrapolated linearly from two
    shorter ones.

    Args:
        fill: Returns them at a length, of a cache that is filled.
        length: Tokens of one sequence.
        limit: Positions of the model; ``None`` without a limit.
    """
    last = FILLED_TOKENS if limit is None else min(FILLED_TOKENS, limit)
    if length <= last:
        return fill(length)
    first = last // 2
    short, long = fill(first), fill(last)
    steps = (length - last) / (last - first)
    return {n: long[n] + round((long[n] - short[n]) * steps) for n in long}


def layer_bytes(layer: Any) -> int:
    """Return the bytes of the tensors in one cache layer: a state, or keys and values."""
    state = getattr(layer, "state", None)
    if state is None:
        tensors: Any = (getattr(layer, "keys", None), getattr(layer, "values", None))
    else:
        tensors = state
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
