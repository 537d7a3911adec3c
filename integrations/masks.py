"""From transformers' mask functions to an :class:`AttentionMask`; nothing quadratic is built."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelMask(AttentionMask):
    """An :class:`AttentionMask` as it travels through a model, in the place of a mask tensor.

    ``ndim`` is what transformers looks at before it makes a mask; 4 means that there is one.
    ``shape`` is that of the mask which this one describes. A model that goes on to compute with its
    mask (adds to it, cuts it, joins it with another) gets the tensor that eager attention would
    have; what comes out of that is an additive bias, which exact backends take.
    """

    ndim: int = 4
    shape: tuple[int, ...] = (1, 1, 0, 0)  # [B, 1, T, S]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def to(self, device: torch.device | str, **_: Any) -> ModelMask:
        """Move what is a tensor; a model spread over several devices asks for it."""
        whole = self.function
        moved: dict[str, Any] = {
            name: x.to(device)
            for name in ("padding", "segment_ids", "q_offset")
            if isinstance(x := getattr(self, name), Tensor)
        }
        if whole is not None:
            moved["function"] = lambda: whole().to(device)
        return replace(self, device=device, **moved)

    def contiguous(self) -> ModelMask:
        """Return the mask itself: generation asks this of every mask."""
        return self

    def additive(self) -> Tensor:
        """Build the tensor of eager attention, ``[B, 1, T, S]``: 0 where seen, else the least."""
        seen = self.dense(self.shape[2], self.shape[3], torch.device(self.device))
        if seen is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        hidden = torch.finfo(self.dtype).min
        zero = torch.zeros((), dtype=self.dtype, device=seen.device)
        return torch.where(seen, zero, hidden).expand(self.shape)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take part in torch's functions as the tensor that this mask describes."""
        return function(*_as_tensors(args), **_as_tensors(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Offer whatever else a tensor has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.additive(), name)


def _as_tensors(value: Any) -> Any:
    """Build every :class:`ModelMask` inside the arguments of a torch function."""
    if isinstance(value, ModelMask):
        return value.additive()
    if isinstance(value, dict):
        return {name: _as_tensors(part) for name, part in value.items()}
    return type(value)(map(_as_tensors, value)) if type(value) in (list, tuple) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: ModelMask, *others: Any) -> Any:
        return getattr(self.additive(), name)(*_as_tensors(others))

    return apply


# Without these, an operator would miss ``__getattr__``, and a comparison be quietly False.
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "invert", "and", "or")
_OTHER = ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "len", "iter", "bool", "contains")
for _name in (*_ARITHMETIC, *_OTHER):
    setattr(ModelMask, f"__{_name}__", _operator(f"__{_name}__"))


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
    dtype: torch.dtype = torch.float32,
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
        dtype: What the mask would be built in.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if isinstance(q_offset, Tensor):  # a static cache's counter, which changes in place
        q_offset = q_offset.clone()
    padding = _padding(attention_mask, kv_length, kv_offset)
    read = _read_traced if torch.compiler.is_compiling() else _read
    found = read(mask_function, local_size, use_vmap, batch_size, q_length, device)
    mask = ModelMask(
        causal=found.causal,
        window=found.window,
        segment_ids=found.segment_ids,
        padding=padding,
        q_offset=q_offset - kv_offset,
        shape=(batch_size, 1, q_length, kv_length),
        dtype=dtype,
        device=device or "cpu",
    )
    if not found.unknown:
        return mask
    whole = partial(
        compat.materialise_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
    )
    return replace(mask, function=whole, function_name=f"of an unusual shape ({found.unknown})")


def _padding(attention_mask: Tensor | None, length: int, offset: int | Tensor) -> Tensor | None:
    """Bring the padding to one entry per key; ``None`` if all are real, where one can look."""
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
    """Take a mask function apart by what it closes over; what has no known name is ``unknown``."""
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
        return Found(unknown="a window, chunks or a function of its own, compiled")
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
        if causal and q_length not in (1, kv_length):
            raise UnsupportedError(
                f"{q_length} queries meet {kv_length} keys in a causal layer without a mask, which "
                "does not say where the queries stand; pass attention_mask to the model"
            )
        reach = None
        if window is not None and causal:  # otherwise no mask means every key, as it does in eager
            reach = (window - 1, 0)
        return AttentionMask(causal=causal, window=reach, q_offset=kv_length - q_length), None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        kind = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            kind += f" of shape {tuple(attention_mask.shape)}"
        raise UnsupportedError(
            f"the attention mask is a {kind}; attnzoo takes a 2-D padding mask given to the model, "
            "or a 4-D mask [batch, heads, queries, keys]"
        )
    tensor = attention_mask[..., :kv_length]
    if tensor.dtype == torch.bool:
        return AttentionMask(function=lambda: tensor, function_name="an arbitrary 4-D tensor"), None
    return AttentionMask(), tensor


def refuse_other_keys(mask: AttentionMask, kv_length: int) -> None:
    """Refuse a mask that is not of the keys which are given.

    Raises:
        UnsupportedError: A model made keys of its own, compressed ones perhaps, and says only in a
            mask tensor which of them are seen.
    """
    if isinstance(mask, ModelMask) and mask.shape[-1] != kv_length:
        raise UnsupportedError(
            f"the mask is of {mask.shape[-1]} keys, but {kv_length} are given, which the model "
            "made itself; use attn_implementation='sdpa' or 'eager' for it"
        )


def with_selection(mask: AttentionMask, indices: Tensor, kv_length: int) -> AttentionMask:
    """Narrow a mask to the keys that a sparse indexer selected.

    Args:
        mask: What the mask says already.
        indices: The selected keys of each query, ``[B, T, N]``, the same for all heads.
        kv_length: S.
    """
    batch, queries, _ = indices.shape

    def whole() -> Tensor:
        chosen = torch.zeros(batch, queries, kv_length, dtype=torch.bool, device=indices.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        seen = mask.dense(queries, kv_length, indices.device)
        return chosen if seen is None else chosen & seen

    return replace(mask, function=whole, function_name="a sparse indexer's selection of keys")


def with_boundaries(
    mask: AttentionMask,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    sizes: tuple[int, ...],
    *,
    shared: bool = False,
) -> AttentionMask:
    """Add packing that is given as cumulative lengths, ``[N + 1]``, as flash attention takes it.

    Args:
        mask: What the mask says already; packing found in ``position_ids`` is the same packing.
        of_queries: ``cu_seq_lens_q``.
        of_keys: ``cu_seq_lens_k``.
        sizes: Batch, queries and keys.
        shared: Whether these are a share of rows that lie on several processes.

    Raises:
        UnsupportedError: The boundaries do not describe the packing of one row.
    """
    if mask.segment_ids is not None and not shared:
        return mask
    boundaries = of_queries if of_queries is not None else of_keys
    batch, queries, keys = sizes
    reasons = []
    if batch != 1:
        reasons.append(f"there are {batch} rows (put all sequences into one)")
    if queries != keys:
        reasons.append(f"{queries} queries meet {keys} keys (packed rows take no cache)")
    if shared:
        reasons.append("rows lie on several processes (say it by position_ids)")
    if mask.padding is not None or mask.function is not None:
        reasons.append("there is an attention mask too (leave it out)")
    if reasons:
        raise UnsupportedError(f"cu_seq_lens cannot be honoured: {'; '.join(reasons)}")
    assert boundaries is not None
    tokens = torch.arange(queries, device=boundaries.device)
    ids = torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True)
    return replace(mask, segment_ids=ids[None])
