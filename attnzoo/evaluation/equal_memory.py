"""The bytes of a cache, and the window that needs as much memory as a swap: its fair baseline.

A swap keeps a state, a window, or all keys for later tokens. A window of as many bytes is exact
attention on the latest keys, needs no training, and is what else the memory could be used for. Each
swapped layer has its own; layers that the swap leaves exact stay exact, so that the whole caches
are equal too.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from attnzoo.evaluation.allocations import counted, fake_model
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import build_model
from attnzoo.hf.saving.files import empty_model, model_class, read_config, saved_dtype
from attnzoo.hf.seam import cache_argument
from attnzoo.spec import AttentionSpec

EXACT = "flash"
PREFILL_TOKENS = 1024  # per forward call while a cache is filled
STEP = 1024  # tokens, at least, after which a long cache grows evenly


@dataclass(frozen=True, kw_only=True)
class EqualWindow:
    """Windows that need as many bytes as a swap, by layer.

    Attributes:
        length: Tokens of one sequence at which the caches are compared.
        windows: Tokens by layer index; ``None`` for a layer that keeps as many bytes as softmax.
        swap_bytes: Bytes of the swap's cache, all layers.
        exact_bytes: Bytes of softmax's cache, all layers.
    """

    length: int
    windows: Mapping[int, int | None]
    swap_bytes: int
    exact_bytes: int

    @property
    def spec(self) -> AttentionSpec:
        """The swap with these windows in place of the mechanisms."""
        layers = {
            str(number): {"backend": EXACT, "options": {"window": window}}
            for number, window in sorted(self.windows.items())
            if window is not None
        }
        return AttentionSpec(EXACT, layers=layers)

    @property
    def widest(self) -> int:
        """The widest window in tokens; 0 if the swap saves no memory."""
        return max((w for w in self.windows.values() if w is not None), default=0)

    def __str__(self) -> str:
        """Return the window, such as ``"160"``, or the range of the layers' windows."""
        found = sorted({w for w in self.windows.values() if w is not None})
        return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}" if found else "-"

    def to_dict(self) -> dict[str, Any]:
        """Return the windows as JSON data."""
        return {
            "length": self.length,
            "windows": {str(n): w for n, w in sorted(self.windows.items())},
            "label": str(self),
            "swap_bytes": self.swap_bytes,
            "exact_bytes": self.exact_bytes,
        }


def equal_window(
    path: Path, spec: AttentionSpec, length: int, dtype: torch.dtype | None = None
) -> EqualWindow:
    """Return the windows that need as many bytes as a swap at a length.

    Args:
        path: Folder of a saved causal model.
        spec: The swap.
        length: Tokens of one sequence.
        dtype: Data type of the weights; that of ``from_pretrained`` when ``None``.

    Raises:
        AttnzooError: The model cannot be swapped so, or its prefill depends on values.
    """
    exact = saved_cache_bytes(path, AttentionSpec(EXACT), length, dtype)
    swapped = saved_cache_bytes(path, spec, length, dtype)
    numbers = sorted({layer.geometry.layer for layer in attention_layers(empty_model(path))})
    windows: dict[int, int | None] = {}
    for number in numbers:
        entry = spec.for_layer(number)
        if entry.backend not in (EXACT, "softmax"):
            windows[number] = window_of_bytes(swapped[number], exact[number], length)
        elif own := _largest(entry.config, "window"):  # beside the keys, it keeps their positions
            own += _largest(entry.config, "num_sinks")
            windows[number] = own if own < length else None
    return EqualWindow(
        length=length,
        windows=windows,
        swap_bytes=sum(swapped.values()),
        exact_bytes=sum(exact.values()),
    )


def window_of_bytes(held: int, exact: int, length: int) -> int | None:
    """Return the widest window whose cache is no larger; ``None`` if that is as large as softmax's.

    A window sees one token more than its cache keeps: that which is computed.

    Args:
        held: Bytes of a layer's cache.
        exact: Those of softmax.
        length: Tokens of both.
    """
    fits = held * length // exact
    return None if fits >= length else fits + 1


def saved_cache_bytes(
    path: Path, spec: AttentionSpec | None, length: int, dtype: torch.dtype | None = None
) -> dict[int, int]:
    """Return the bytes that each layer of a saved model keeps for one sequence.

    Args:
        path: Folder of a saved causal model; its weights are not read.
        spec: The swap; ``None`` for the attention of the model's config.
        length: Tokens of the sequence.
        dtype: Data type of the weights; that of ``from_pretrained`` when ``None``.

    Returns:
        Bytes by layer index, as of :func:`layer_cache_bytes`.
    """
    config = read_config(path)
    cls = model_class(config, path)
    return layer_cache_bytes(cls, config, spec, length, dtype or saved_dtype(path))


def layer_cache_bytes(
    cls: type[PreTrainedModel],
    config: Any,
    spec: AttentionSpec | None,
    length: int,
    dtype: torch.dtype,
) -> dict[int, int]:
    """Return the bytes that each layer keeps for one sequence, by a prefill on fake tensors.

    Every size of a cache that attnzoo gives comes from here, or is measured. Where a sequence is
    longer than all windows, the bytes grow by the same number every few blocks, so they follow from
    two shorter lengths.

    Args:
        cls: Class of the model, which is causal.
        config: Its config.
        spec: The swap; ``None`` for the attention of the config.
        length: Tokens of the sequence, of any number of positions.
        dtype: Data type of the weights.

    Returns:
        Bytes by layer index, of layers without attention too.

    Raises:
        UnsupportedError: A backend does not support the model, or the prefill depends on values.
    """
    text = json.dumps([config.to_dict(), spec and spec.to_dict()], default=str, sort_keys=True)
    key = cls, text, length, dtype
    if (known := _known.get(key)) is None:
        known = _known[key] = _prefill(cls, config, spec, length, dtype)
    return dict(known)


_known: dict[tuple[Any, ...], dict[int, int]] = {}  # of earlier calls of layer_cache_bytes


@torch.no_grad()
def _prefill(
    cls: type[PreTrainedModel],
    config: Any,
    spec: AttentionSpec | None,
    length: int,
    dtype: torch.dtype,
) -> dict[int, int]:
    model, mode = fake_model(lambda: _build(cls, config, spec, dtype))
    model.eval()

    def fill(tokens: int) -> dict[int, int]:
        with counted(mode):
            cache = DynamicCache(config=model.config)
            row = torch.zeros(1, tokens, dtype=torch.long)
            model(input_ids=row, **cache_argument(cache), use_cache=True)
        return {number: cache_bytes(layer) for number, layer in enumerate(cache.layers)}

    window, period = longest_window(model)
    step = period * -(-STEP // period)
    longest = window + 2 * step
    if length <= longest:
        return fill(length)
    steps = -(-(length - longest) // step)
    before, last = (fill(length - n * step) for n in (steps + 1, steps))
    return {n: size + steps * (size - before[n]) for n, size in last.items()}


def _build(
    cls: type[PreTrainedModel], config: Any, spec: AttentionSpec | None, dtype: torch.dtype
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if spec is not None:
        config.attnzoo = spec.to_dict()
    swapped = read_field(config, NAME) is not None
    # of the forms of a mixture of experts, one that takes fake tensors of every dtype
    options = {"experts_implementation": "batched_mm"}
    if swapped:
        options["attn_implementation"] = NAME
    model: PreTrainedModel = build_model(cls, config, dtype=dtype, **options)
    return model


def longest_window(model: nn.Module) -> tuple[int, int]:
    """Return the keys that the widest window of a model's layers spans, and its blocks' multiple.

    Returns:
        The first length from which a cache grows evenly, 0 without windows; and the number of
        tokens after which blocks of all layers end together, 1 without blocks.
    """
    longest, period = 0, 1
    for layer in attention_layers(model):
        config = getattr(layer_backend(layer.module), "config", None)
        window = max(_largest(config, "window"), layer.geometry.window or 0)
        kept = window * max(_largest(config, "dilation"), 1)
        kept += _largest(config, "num_sinks") + _largest(config, "num_global")
        blocks = [_largest(config, name) or 1 for name in ("block", "block_size")]
        longest, period = max(longest, kept), math.lcm(period, *blocks)
    return longest, period


def _largest(config: Any, option: str) -> int:
    """Return an option of a backend, the largest of all heads; 0 without it."""
    value = read_field(config, option) or 0
    return max(value) if isinstance(value, tuple) else int(value)


def cache_bytes(*layers: Any) -> int:
    """Return the bytes of all tensors in layers of a cache: states, or keys and values."""
    tensors = [x for x in tree_leaves([*map(vars, layers)]) if isinstance(x, Tensor)]
    return sum({id(x): x.nbytes for x in tensors}.values())
