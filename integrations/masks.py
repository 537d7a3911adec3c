"""From transformers' mask functions to an :class:`AttentionMask`, without building anything quadratic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError
from attnzoo.integrations import compat
from attnzoo.masks import AttentionMask, Window


@dataclass(frozen=True, kw_only=True)
class ModelMask(AttentionMask):
    """An :class:`AttentionMask` as it travels through a model, in the place of a mask tensor.

    ``ndim`` is what transformers looks at before it makes a mask: 4 means that there is one already.
    """

    ndim: int = 4

    def __getitem__(self, item: object) -> None:
        """Refuse what would change the mask behind our back."""
        raise UnsupportedError(
            "this model cuts its attention mask itself, which attnzoo cannot follow; use "
            "attn_implementation='sdpa' or 'eager' for it"
        )


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = compat.causal_mask_function,
    attention_mask: Tensor | ModelMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_: Any,
) -> ModelMask:
    """Describe a mask that transformers asks for; registered with its ``AttentionMaskInterface``.

    Args:
        batch_size: B.
        q_length: T.
        kv_length: S.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Says for indices (batch, head, query, key) whether the key is seen.
        attention_mask: Padding, ``[B, S]``, true where real.
        local_size: The model's sliding window or chunk.
        use_vmap: Whether the function was combined with one of the model's own.
        device: Where the mask would be built.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    padding = _padding(attention_mask, kv_length, kv_offset)
    read = _read_traced if torch.compiler.is_compiling() else _read
    found = read(mask_function, local_size, use_vmap, batch_size, q_length, device)
    mask = ModelMask(
        causal=found.causal,
        window=found.window,
        segment_ids=found.segment_ids,
        padding=padding,
        q_offset=q_offset - kv_offset,
    )
    if not found.unknown:
        return mask
    whole = partial(
        compat.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return replace(mask, function=whole, function_name=f"of an unusual shape ({found.unknown})")


def _padding(attention_mask: Tensor | None, length: int, offset: int | Tensor) -> Tensor | None:
    """Bring the padding to one entry per key; ``None`` when all are real and that can be looked up."""
    if attention_mask is None:
        return None
    if isinstance(offset, int) and isinstance(length, int):
        padding = attention_mask[:, offset : offset + length]
        if padding.shape[1] < length:  # keys of a static cache that are not written yet
            padding = torch.nn.functional.pad(padding, (0, length - padding.shape[1]))
    else:
        padding = attention_mask
    padding = padding.bool()
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding


@dataclass
class Found:
    """What a mask function was recognised as."""

    causal: bool = False
    window: Window | None = None
    segment_ids: Tensor | None = None
    unknown: str = ""


def _read(
    function: Callable[..., Any],
    local_size: int | None,
    use_vmap: bool,
    batch_size: int,
    q_length: int,
    device: torch.device | None,
) -> Found:
    """Take a mask function apart by what it closes over; anything not known by name is ``unknown``."""
    found = Found()
    _collect(function, found)
    return found


def _collect(function: Callable[..., Any], found: Found) -> None:
    if function is compat.causal_mask_function:
        found.causal = True
        return
    if function is compat.bidirectional_mask_function:
        return
    name = function.__qualname__.split(".<locals>")[0]
    inside = compat.function_cells(function)
    if name == "and_masks":
        for part in inside["mask_functions"]:
            _collect(part, found)
    elif name == "remap_positions_for_packed_sequence":
        _collect(inside["mask_function"], found)
    elif name == "packed_sequence_mask_function":
        found.segment_ids = inside["packed_sequence_mask"]
    elif name == "sliding_window_overlay":
        found.window = (inside["sliding_window"] - 1, 0)
    elif name == "sliding_window_bidirectional_overlay":
        found.window = (inside["sliding_window"], inside["sliding_window"])
    else:
        found.unknown = name


def _read_traced(
    function: Callable[..., Any],
    local_size: int | None,
    use_vmap: bool,
    batch_size: int,
    q_length: int,
    device: torch.device | None,
) -> Found:
    """Recognise a mask function under torch.compile, where closures cannot be looked into.

    Packed rows are found by asking whether each token sees the one before it.
    """
    if function is compat.causal_mask_function:
        return Found(causal=True)
    if function is compat.bidirectional_mask_function:
        return Found()
    if local_size is not None or use_vmap or not function.__qualname__.startswith("and_masks"):
        return Found(unknown="a window, chunks or a function of the model's own, under torch.compile")
    rows = torch.arange(batch_size, device=device)[:, None]
    later = torch.arange(1, q_length, device=device)[None]
    joined = function(rows, 0, later, later - 1)
    first = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    return Found(causal=True, segment_ids=torch.cat([first, (~joined).long().cumsum(1)], 1))


def given_mask(
    attention_mask: object,
    *,
    causal: bool,
    window: int | None,
    q_length: int,
    kv_length: int,
) -> tuple[AttentionMask, Tensor | None]:
    """Read what an attention layer was given as its mask: ours, a tensor, or nothing.

    Returns:
        The mask, and an additive bias where the tensor is one.

    Raises:
        UnsupportedError: The mask is neither.
    """
    if isinstance(attention_mask, AttentionMask):
        return attention_mask, None
    if attention_mask is None:
        causal = causal and q_length > 1
        reach = None
        if window is not None:
            reach = (window - 1, 0) if causal else (window, window)
        return AttentionMask(causal=causal, window=reach), None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        shape = f" of shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else ""
        raise UnsupportedError(
            f"the attention mask is a {type(attention_mask).__name__}{shape}; attnzoo takes a 2-D padding "
            "mask given to the model, or a 4-D mask [batch, heads, queries, keys]"
        )
    tensor = attention_mask[..., :kv_length]
    if tensor.dtype == torch.bool:
        return AttentionMask(function=lambda: tensor, function_name="an arbitrary 4-D tensor"), None
    return AttentionMask(), tensor
