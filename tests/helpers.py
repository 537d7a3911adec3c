"""What several test files share: small layers, their inputs, and fewer garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.base import AttentionBackend
from attnzoo.backends.config import Geometry
from attnzoo.registry import build_backend

H, HKV, D, E, M = 4, 2, 8, 6, 12  # query heads, key heads, key, value and hidden sizes
MODEL_SIZES: dict[str, Any] = {  # of a small transformers model, by the names of most configs
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def geometry(**changes: Any) -> Geometry:
    """Return a small layer of :data:`H` query heads, with some fields replaced."""
    sizes = {"num_heads": H, "num_key_heads": HKV, "head_dim": D, "value_dim": E, "hidden_size": M}
    return Geometry(**{**sizes, "name": "layer.attn", **changes})


def build(
    name: str,
    dtype: torch.dtype = torch.float64,
    *,
    noise: float = 0.0,
    causal: bool = True,
    cross_attention: bool = False,
    layer: int = 0,
    sizes: Mapping[str, Any] = {},
    **options: Any,
) -> AttentionBackend:
    """Build a backend for a small layer.

    Args:
        name: Name of the backend.
        dtype: Dtype of its parameters.
        noise: Standard deviation of noise that is added to the parameters' initial values.
        causal: Whether the layer is causal.
        cross_attention: Whether keys come from another sequence than queries.
        layer: Number of the layer.
        sizes: Other fields of :func:`geometry`.
        options: Options of the backend.
    """
    layout = {"causal": causal, "cross_attention": cross_attention, "layer": layer}
    place = geometry(**{**layout, **sizes})
    backend = build_backend(name, options, place)
    with torch.no_grad():
        for parameter in backend.parameters():
            if noise:
                parameter.add_(noise * torch.randn_like(parameter))
    return backend.to(dtype)


def nan_padded(x: Tensor) -> Tensor:
    """Copy a tensor into storage that continues with NaN, so that a read past the end shows."""
    storage = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    storage[: x.numel()] = x.flatten()
    return storage[: x.numel()].view(x.shape)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers, drawn in float64, in storage that continues with NaN."""
    return nan_padded(torch.randn(shape, dtype=torch.float64).to(dtype))


def qkv(
    length: int = 9,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (H, HKV),
    sizes: tuple[int, int] = (D, E),
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return random queries, keys and values for the layer of :func:`geometry`.

    Args:
        length: Number of queries.
        keys: Number of keys; ``None`` means ``length``.
        batch: Number of rows.
        heads: Numbers of query heads and of key heads.
        sizes: Sizes of keys and of values per head.
        dtype: Dtype of the tensors.
    """
    keys = length if keys is None else keys
    shapes = (heads[0], length, sizes[0]), (heads[1], keys, sizes[0]), (heads[1], keys, sizes[1])
    return [draw(batch, *shape, dtype=dtype) for shape in shapes]


def hidden_states(length: int, *, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random hidden states, ``[B, T, M]``."""
    return draw(batch, length, M, dtype=dtype)


def freeze_garbage_collector() -> None:
    """Exclude all present objects from later garbage collections.

    Accelerate and torch.compile collect garbage explicitly. Each collection visits the modules and
    test items of the session, which takes up to a second, and longer than most tests.
    """
    gc.collect()
    gc.freeze()
