"""The window that needs as much memory as a swap: the fair baseline of a swap.

A swap keeps a state, a window, or all keys for later tokens. A window of as many bytes is exact
attention on the latest keys, needs no training, and is what else the memory could be used for. Each
swapped layer has its own; layers that the swap leaves exact stay exact, so that the whole caches
are equal too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from attnzoo.evaluation.allocations import fake_model
from attnzoo.evaluation.decoding import bytes_of_layers, layer_bytes
from attnzoo.evaluation.memory import build_model
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.evaluation.models import max_positions
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.saving.dtype import saved_dtype
from attnzoo.hf.seam import cache_argument
from attnzoo.spec import AttentionSpec

EXACT = "flash"


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
    def saves_memory(self) -> bool:
        """Whether the swap's cache is smaller than softmax's."""
        return any(window is not None for window in self.windows.values())

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


def equal_window(path: Path, spec: AttentionSpec, length: int) -> EqualWindow:
    """Return the windows that need as many bytes as a swap at a length.

    The bytes are those of the saved weights' dtype, computed without running the model. A window
    is at least one token.

    Args:
        path: Folder of a saved causal model.
        spec: The swap.
        length: Tokens of one sequence.

    Raises:
        AttnzooError: The model cannot be swapped so, or has too few positions.
    """
    exact = layer_cache_bytes(path, AttentionSpec(EXACT), length)
    swapped = layer_cache_bytes(path, spec, length)
    windows: dict[int, int | None] = {}
    for number in sorted(approximate_layers(spec, swapped)):
        whole = exact[number]
        fits = swapped[number] * length // whole
        windows[number] = None if fits >= length else max(1, fits)
    return EqualWindow(
        length=length,
        windows=windows,
        swap_bytes=sum(swapped.values()),
        exact_bytes=sum(exact.values()),
    )


def approximate_layers(spec: AttentionSpec, layers: Mapping[int, Any]) -> list[int]:
    """Return the indices of the layers that do not compute softmax over all keys."""
    return [
        number
        for number in layers
        if (entry := spec.for_layer(number)).backend not in (EXACT, "softmax")
        or entry.options.get("window")
    ]


def layer_cache_bytes(
    path: Path, spec: AttentionSpec | None, length: int, dtype: str | None = None
) -> dict[int, int]:
    """Return the bytes that each attention layer keeps for one sequence, computed without weights.

    Lengths above 2,048 tokens, or the model's positions, are extrapolated linearly from two shorter
    ones.

    Args:
        path: Folder of a saved causal model.
        spec: The swap; ``None`` for the attention of the model's config.
        length: Tokens of the sequence.
        dtype: Data type of the weights; that of the saved ones when ``None``.

    Returns:
        Bytes by layer index.
    """
    kind = dtype or str(saved_dtype(path)).removeprefix("torch.")
    return bytes_of_layers(
        lambda tokens: _layer_bytes(path, spec, tokens, kind), length, max_positions(path)
    )


@torch.no_grad()
def _layer_bytes(path: Path, spec: AttentionSpec | None, length: int, dtype: str) -> dict[int, int]:
    case = MemoryCase(
        path=str(path),
        spec=None if spec is None else spec.to_dict(),
        length=length,
        dtype=dtype,
    )
    model, mode = fake_model(lambda: build_model(case))
    with mode:
        cache = DynamicCache(config=model.config)
        tokens = torch.zeros(1, length, dtype=torch.long)
        model.eval()(input_ids=tokens, **cache_argument(cache), use_cache=True)
    numbers = {x.geometry.layer for x in attention_layers(model) if layer_backend(x.module)}
    return {number: layer_bytes(cache.layers[number]) for number in sorted(numbers)}
