"""Quality and decoding cost of a causal model, whatever attention it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.demo.text import Judged

Tick = Callable[[], None]


@dataclass(kw_only=True)
class Result:
    """What one attention did to the model."""

    label: str
    spec: dict[str, Any]
    bits_per_byte: float | None = None  # on held-out text
    recall_bits_per_byte: float | None = None  # on the second copy of a segment
    parameters_added: int = 0
    decode_ms: dict[int, float] = field(default_factory=dict)  # context length -> per token
    cache_bytes: dict[int, int] = field(default_factory=dict)
    refused: str = ""


@torch.no_grad()
def token_losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Cross-entropy in nats of every token but the first, ``[N, T - 1]``."""
    logits = model(rows, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")


def measure_quality(model: PreTrainedModel, judged: Judged, result: Result, tick: Tick) -> None:
    """Fill in bits per byte on plain rows, and on the second copy in rows that repeat a segment."""
    to_bits = 1 / (math.log(2) * judged.bytes_per_token)
    plain, recall = [], []
    for first in range(0, len(judged.plain), 8):
        plain.append(token_losses(model, judged.plain[first : first + 8]).flatten())
        losses = token_losses(model, judged.twice[first : first + 8])
        for loss, repeat in zip(losses, judged.repeats[first : first + 8], strict=False):
            recall.append(loss[repeat.second - 1 : repeat.second - 1 + repeat.length])
        tick()
    result.bits_per_byte = float(torch.cat(plain).mean()) * to_bits
    if recall:
        result.recall_bits_per_byte = float(torch.cat(recall).mean()) * to_bits


def measure_decoding(
    model: PreTrainedModel, stream: Tensor, lengths: list[int], result: Result, tick: Tick
) -> None:
    """Fill a cache step by step, and at each length time the next tokens and weigh the cache."""
    cache = DynamicCache(config=model.config)
    seen = 0
    for length in lengths:
        for piece in _pieces(stream[seen:length]):
            model(piece[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            tick()
        result.cache_bytes[length] = cache_bytes(cache)
        result.decode_ms[length] = _decode_ms(model, cache, stream[:1])
        seen = int(cache.get_seq_length())
        tick()


def _pieces(tokens: Tensor, size: int = 1024) -> Iterator[Tensor]:
    yield from tokens.split(size) if len(tokens) else ()


def _decode_ms(
    model: PreTrainedModel, cache: DynamicCache, token: Tensor, steps: int = 12
) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model(token[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all tensors that a cache keeps from one token to the next."""
    return sum(layer_bytes(layer) for layer in cache.layers)


def layer_bytes(layer: Any) -> int:
    """Return the bytes of one layer of a cache."""
    state = getattr(layer, "state", None)
    stock = (getattr(layer, "keys", None), getattr(layer, "values", None))
    tensors = stock if state is None else state
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
